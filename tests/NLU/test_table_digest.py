"""A table's digest is that of its rows, all of them, however they are stored."""

import pytest
from datasets import Dataset, concatenate_datasets, load_from_disk

from transformers.data import table_digest as module
from transformers.data.table_digest import table_digest

ROWS = [
    {
        "input_ids": [n, n + 1] * (n % 3),
        "label": n % 2,
        "text": "ü" * (n % 4),
        "score": n / 4,
        "answers": {"text": ["a", "bc"][: n % 3], "start": [n]},
        "choices": [[n], [], [1, 2]],
        "note": None if n % 5 else f"note {n}",
        "good": n % 3 < 2,
        "absent": None,
    }
    for n in range(50)
]
# What a row may have in place of its own, by column.
OTHERS = {
    "input_ids": [7],
    "label": 5,
    "text": "u",
    "score": 0.1,
    "answers": {"text": ["a", "b"], "start": [22]},
    "choices": [[22, 1], [2]],
    "note": "other",
    "good": False,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 20)


def digest(rows) -> str | None:
    return table_digest(Dataset.from_list(rows))


def test_it_is_of_the_rows_however_they_are_stored(tmp_path):
    table, expected = Dataset.from_list(ROWS), digest(ROWS)
    assert expected is not None
    parts = [table.select(range(*ends)) for ends in ((0, 7), (7, 33), (33, 50))]
    backwards = table.select(range(49, -1, -1))
    table.save_to_disk(tmp_path / "rows", num_shards=3)
    for same in (
        load_from_disk(tmp_path / "rows"),
        table.with_format("torch"),
        table.select_columns(table.column_names[::-1]),
        concatenate_datasets(parts),
        Dataset.from_list(ROWS[:3] + ROWS + ROWS).select(range(3, 53)),
        backwards.select(range(49, -1, -1)),
    ):
        assert table_digest(same) == expected
    assert table_digest(backwards) == digest(ROWS[::-1]) != expected


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("row", [0, 22, 49])
def test_it_tells_each_value_of_each_row(name, row):
    changed = [*ROWS]
    changed[row] = {**ROWS[row], name: OTHERS[name]}
    assert digest(changed) != digest(ROWS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([{"a": "ab"}, {"a": "c"}], [{"a": "a"}, {"a": "bc"}]),
        ([{"a": [1, 2]}, {"a": [3]}], [{"a": [1]}, {"a": [2, 3]}]),
        ([{"a": None}, {"a": 0}], [{"a": 0}, {"a": None}]),
        ([{"a": 1}], [{"b": 1}]),
        ([{"a": 1, "b": 2}], [{"a": 2, "b": 1}]),
    ],
)
def test_it_tells_where_values_are(one, other):
    assert digest(one) != digest(other)


def test_other_data_has_none():
    assert table_digest(ROWS) is None
    assert table_digest(None) is None
    assert digest([{"label": b"bytes"}]) is None
