"""A table's digest depends on all of its rows, and not on how they are stored."""

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
# Another value for each column.
OTHER_VALUES = {
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


def test_the_digest_does_not_depend_on_how_rows_are_stored(tmp_path):
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


@pytest.mark.parametrize("name", OTHER_VALUES)
@pytest.mark.parametrize("row", [0, 22, 49])
def test_another_value_in_any_row_changes_the_digest(name, row):
    changed = [*ROWS]
    changed[row] = {**ROWS[row], name: OTHER_VALUES[name]}
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
def test_moving_values_changes_the_digest(one, other):
    assert digest(one) != digest(other)


def test_data_that_is_not_a_supported_table_has_no_digest():
    assert table_digest(ROWS) is None
    assert table_digest(None) is None
    assert digest([{"label": b"bytes"}]) is None
