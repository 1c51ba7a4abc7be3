"""Rows in memory: what a run on GLUE's own files needs of `datasets`, which it need not wait for.

That library takes a second to import, as long as torch. It is still what reads the hub and one's
own CSV and JSON files; the scripts and the Trainer take either.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset
from tqdm.auto import tqdm

from loralib.training.process import rank

_ROWS_AT_ONCE = 1000  # that `Table.map` gives to its function


class Lists(Sequence[list[int]]):
    """Lists of integers, which take four bytes a number; one by one they take nine times as much.

    Args:
        lists: what it begins with.
    """

    def __init__(self, lists: Iterable[Sequence[int]] = ()):
        self._numbers, self._ends = array("i"), array("q", [0])
        self.extend(lists)

    def extend(self, lists: Iterable[Sequence[int]]) -> None:
        """Adds lists at the end."""
        for numbers in lists:
            self._numbers.extend(numbers)
            self._ends.append(len(self._numbers))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # as in a list, from the end where it is negative
        return self._numbers[self._ends[place] : self._ends[place + 1]].tolist()


class Table(Dataset):
    """Rows by column, with the part of `datasets.Dataset` that the scripts and the Trainer use.

    Args:
        columns: a name -> its value in each row.

    Raises:
        ValueError: columns are not of one length.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]):
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns of a table are of several lengths: {sizes}")
        self._columns = dict(columns)

    @property
    def column_names(self) -> list[str]:
        """The columns' names, in their order."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __getitem__(self, key: int | str) -> Any:
        """A row as a dict or, by its name, a column."""
        if isinstance(key, str):
            return self._columns[key]
        return {name: column[key] for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def select(self, rows: range) -> Table:
        """A table of some rows: the first, the last, every other one."""
        part = slice(rows.start, rows.stop, rows.step)
        return Table({name: column[part] for name, column in self._columns.items()})

    def remove_columns(self, names: str | Iterable[str]) -> Table:
        """A table without some columns."""
        without = {names} if isinstance(names, str) else set(names)
        return Table({name: c for name, c in self._columns.items() if name not in without})

    def map(
        self,
        function: Callable[[dict[str, Sequence[Any]]], Mapping[str, Sequence[Any]]],
        remove_columns: Iterable[str] = (),
        desc: str | None = None,
    ) -> Table:
        """A table with more columns, such as token ids; lists are kept as `Lists`.

        Args:
            function: some columns' rows -> those of the new ones, called with many rows at once.
            remove_columns: what the new table is without.
            desc: what the progress bar says, which the main process shows on a terminal.
        """
        added: dict[str, Any] = {}
        hidden = rank() != 0 or not sys.stderr.isatty()
        with tqdm(total=len(self), desc=desc, unit=" rows", disable=hidden) as bar:
            for start in range(0, len(self), _ROWS_AT_ONCE):
                part = slice(start, start + _ROWS_AT_ONCE)
                rows = function({name: column[part] for name, column in self._columns.items()})
                for name, values in rows.items():
                    if name not in added:
                        added[name] = Lists() if isinstance(values[0], list) else []
                    added[name].extend(values)
                bar.update(min(_ROWS_AT_ONCE, len(self) - start))
        return Table({**self.remove_columns(remove_columns)._columns, **added})
