"""Rows in memory, beside the `datasets.Dataset` that they stand in for."""

import pickle

import pytest
from datasets import Dataset

from transformers.data import table
from transformers.data.table import Lists, Table

TEXTS = ["a", "bb", "", "dddd", "eeeee"]
COLUMNS = {"text": TEXTS, "label": [0, 1, 1, 0, 1], "score": [0.5, 1.0, -1.5, 2.0, 0.0]}


@pytest.fixture(params=[Table, Dataset.from_dict], ids=["Table", "Dataset"])
def rows(request):
    return request.param(COLUMNS)


def test_rows_and_columns(rows):
    assert len(rows) == 5
    assert rows.column_names == ["text", "label", "score"]
    assert rows[1] == {"text": "bb", "label": 1, "score": 1.0}
    assert rows[-1] == rows[4]
    assert list(rows["label"]) == COLUMNS["label"]
    assert list(rows)[3]["text"] == "dddd"
    with pytest.raises(IndexError):
        rows[5]
    with pytest.raises((KeyError, ValueError)):
        rows["no such column"]


@pytest.mark.parametrize("part", [range(2), range(5), range(0), range(1, 5, 2)])
def test_some_rows(rows, part):
    chosen = rows.select(part)
    assert list(chosen["text"]) == [TEXTS[row] for row in part]
    assert len(chosen) == len(part)


@pytest.mark.parametrize("names", ["score", ["score", "label"], {"text"}, []])
def test_without_columns(rows, names):
    left = rows.remove_columns(names if isinstance(names, str) else list(names))
    without = {names} if isinstance(names, str) else set(names)
    assert left.column_names == [name for name in COLUMNS if name not in without]
    assert rows.column_names == [*COLUMNS]


@pytest.mark.parametrize("at_once", [1, 2, 1000])
def test_new_columns(rows, monkeypatch, at_once):
    calls = []

    def encode(part):
        calls.append(list(part["text"]))
        return {
            "ids": [list(text.encode()) for text in part["text"]],
            "label": [7] * len(calls[-1]),
        }

    monkeypatch.setattr(table, "_ROWS_AT_ONCE", at_once)
    batched = {"batched": True, "batch_size": at_once} if isinstance(rows, Dataset) else {}
    new = rows.map(encode, remove_columns=["text"], desc="encoding", **batched)
    assert [text for call in calls for text in call] == TEXTS
    assert max(map(len, calls)) <= at_once
    assert sorted(new.column_names) == ["ids", "label", "score"]
    assert list(new["ids"]) == [list(text.encode()) for text in TEXTS]
    assert new[1] == {"ids": [98, 98], "label": 7, "score": 1.0}


def test_columns_of_several_lengths():
    with pytest.raises(ValueError, match=r"several lengths: \{'a': 2, 'b': 1\}"):
        Table({"a": [1, 2], "b": [1]})


def test_no_columns():
    assert len(Table({})) == 0
    assert Table({}).column_names == []


def test_lists():
    given = [[1, 2], [], [2**31 - 1, -(2**31)]]
    lists = Lists(given)
    assert list(lists) == given
    assert (lists[-1], lists[1:], lists[::-2]) == (given[-1], given[1:], given[::-2])
    lists.extend([[5]])
    assert len(lists) == 4
    assert lists[3] == [5]
    for index in (4, -5):
        with pytest.raises(IndexError):
            lists[index]
    with pytest.raises(OverflowError):
        lists.extend([[2**31]])


def test_a_worker_of_a_loader_gets_a_copy():
    new = Table(COLUMNS).map(lambda part: {"ids": [[len(text)] for text in part["text"]]})
    copy = pickle.loads(pickle.dumps(new))
    assert list(copy) == list(new)
