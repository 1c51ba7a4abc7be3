"""Reads and checks multiple-choice data (a context and several endings), from files or the hub.

A row has SWAG's columns: sent1 (the context), sent2 (the words with which every ending begins),
ending0, ending1 and so on, and label (the number of the right ending).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loralib.text import in_short

from ..data.text_columns import warn_of_empty_texts
from ..data.text_files import read_table
from .data_sets import Table

if TYPE_CHECKING:
    from datasets import Dataset

CONTEXT, BEGINNING, LABEL = "sent1", "sent2", "label"
_ENDING = re.compile(r"ending(\d+)")
_MOST_ENDINGS = 100


@dataclass(frozen=True)
class Choices:
    """Multiple-choice rows by split.

    Args:
        tables: the rows. Their columns are `CONTEXT`, `BEGINNING`, the endings and, if known,
            `LABEL`.
        endings: the names of the endings' columns, in order.
    """

    tables: dict[str, Table]
    endings: tuple[str, ...]


def read_choices(path: str, cache_dir: str | None = None) -> Dataset:
    """Reads the rows of a file; in a CSV, texts that look like numbers stay texts.

    Args:
        path: the file.
        cache_dir: as for `read_table`.

    Raises:
        FileNotFoundError, ValueError: as `read_table`.
    """
    endings = (f"ending{n}" for n in range(_MOST_ENDINGS))
    return read_table(path, (CONTEXT, BEGINNING, *endings), cache_dir)


def check_choices(tables: Mapping[str, Table]) -> Choices:
    """Checks the rows, and returns them with only the columns that are used.

    Args:
        tables: the rows by split. The test set need not have labels.

    Raises:
        ValueError: a column is missing, a row lacks an ending, a text is not a string, or a label
            is not an ending's number.
    """
    first = next(iter(tables.values()))
    endings = _endings(first)
    checked = {}
    for split, table in tables.items():
        labeled = split != "test" or _is_labeled(table)
        others = _endings(table)
        if others != endings:
            raise ValueError(
                f"{table.source}: has {len(others)} endings, but {first.source} has {len(endings)}"
            )
        label = [LABEL] if labeled else []
        table.check_columns([CONTEXT, BEGINNING, *label])
        _check_endings(table, endings)
        for name in (*endings, CONTEXT, BEGINNING):
            table.check_strings(name)
        # `BEGINNING` may be empty: endings need not share their first words.
        warn_of_empty_texts(table.source, {CONTEXT: table.column(CONTEXT)})
        if labeled:
            table = _with_numbers(table, len(endings))
        names = (CONTEXT, BEGINNING, *endings, *label)
        checked[split] = table.taking({name: name for name in names})
    return Choices(checked, endings)


def _is_labeled(table: Table) -> bool:
    """Returns whether a test set has labels, rather than none or the hub's -1."""
    if LABEL not in table.rows.column_names:
        return False
    return not table.all_hidden(LABEL, [label == -1 for label in table.column(LABEL)])


def _endings(table: Table) -> tuple[str, ...]:
    found = sorted(
        int(match[1]) for name in table.rows.column_names if (match := _ENDING.fullmatch(name))
    )
    if len(found) < 2 or found != list(range(len(found))):
        columns = in_short(table.rows.column_names)
        raise ValueError(
            f"{table.source}: needs columns ending0, ending1 and so on, at least two; has {columns}"
        )
    return tuple(f"ending{number}" for number in found)


def _check_endings(table: Table, endings: tuple[str, ...]) -> None:
    for row, texts in enumerate(zip(*map(table.column, endings), strict=True)):
        for name, text in zip(endings, texts, strict=True):
            if text in (None, ""):
                raise table.wrong(
                    row, f"its {name} is empty, but every row has to have {len(endings)} endings"
                )


def _with_numbers(table: Table, count: int) -> Table:
    """Returns the table with its labels as integers."""
    numbers = []
    for row, label in enumerate(table.column(LABEL)):
        number = int(label) if isinstance(label, str) and label.isdecimal() else label
        if type(number) is not int or not 0 <= number < count:
            raise table.wrong(
                row, f"its label is {label!r}; expected an ending's number, 0 to {count - 1}"
            )
        numbers.append(number)
    return table.with_column(LABEL, numbers)
