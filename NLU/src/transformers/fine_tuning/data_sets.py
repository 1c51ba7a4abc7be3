"""Loads the examples of a run, from the user's own files or a dataset on the hub.

A `Table` knows where its rows come from, so that an error can name the row: "FILE: row 7: …". In a
CSV file, a cell with several values holds JSON: ["John", "lives", "here"].
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loralib.io.command_line import check_bounds
from loralib.io.digests import folder_digest
from loralib.io.hub import is_a_path, why_out_of_reach
from loralib.text import first_line, quoted

from ..data.text_columns import select_and_rename
from ..data.text_files import read_table, unreported
from .arguments import SUFFIXES, DataArguments, HubDataArguments

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset


@dataclass(frozen=True)
class Table:
    """Examples, and where they come from.

    Args:
        rows: the examples.
        source: the file, or the data set's name and split.
    """

    rows: Dataset
    source: str

    def wrong(self, row: int, what: str) -> ValueError:
        """Returns the error for a row, which is counted from 0 here and from 1 in the message."""
        return ValueError(f"{self.source}: row {row + 1}: {what}")

    def check_columns(self, names: Sequence[str], hint: str = "") -> None:
        """Refuses a table that lacks one of these columns.

        Raises:
            ValueError: a column is missing.
        """
        for name in names:
            if name not in self.rows.column_names:
                columns = quoted(self.rows.column_names)
                raise ValueError(
                    f"{self.source}: has no column '{name}'; its columns are {columns}{hint}"
                )

    def first(self, split: str, data_args: DataArguments) -> Table:
        """Returns the rows that --max_…_samples allows, see `first_rows`."""
        return replace(self, rows=first_rows(self.rows, split, data_args))

    def column(self, name: str) -> list[Any]:
        """Returns the values of a column, in the rows' order."""
        return self.rows[name][:]  # one slice: reading value by value takes fifty times as long

    def with_column(self, name: str, values: Sequence[Any]) -> Table:
        """Returns the table with a new column, which replaces any of the same name."""
        rows = self.rows
        if name in rows.column_names:
            rows = rows.remove_columns(name)
        return replace(self, rows=rows.add_column(name, values))

    def taking(self, names: Mapping[str, str]) -> Table:
        """Returns the table with only the given columns, renamed: {old: new}."""
        return replace(self, rows=select_and_rename(self.rows, names))

    def decoded(self, *names: str, hint: str = "") -> Table:
        """Returns the table with these columns' cells parsed as JSON, if it is from a CSV file.

        Raises:
            ValueError: a cell is not JSON. The message ends with `hint`.
        """
        if not self.source.endswith(".csv"):
            return self
        table = self
        for name in names:
            cells = enumerate(self.column(name))
            table = table.with_column(name, [self._value(name, *cell, hint) for cell in cells])
        return table

    def _value(self, name: str, row: int, cell: Any, hint: str) -> Any:
        try:
            return json.loads(cell)
        except (TypeError, ValueError) as error:
            raise self.wrong(row, f"its {name} is not JSON: {cell!s:.40}{hint}") from error

    def all_hidden(self, name: str, hidden: Sequence[bool]) -> bool:
        """Returns whether a test set's labels are hidden, as in the hub's benchmarks.

        Args:
            name: the labels' column.
            hidden: for each row, whether its labels are hidden.

        Raises:
            ValueError: some rows' labels are hidden and others' are not.
        """
        if any(hidden) and not all(hidden):
            raise self.wrong(
                hidden.index(True),
                f"hides its {name} (-1), but row {hidden.index(False) + 1} does not: for scores, "
                f"give the {name} of all rows; otherwise, of none",
            )
        return any(hidden)

    def check_strings(self, name: str) -> None:
        """Refuses a column in which a value is not a string.

        Raises:
            ValueError: there is such a value.
        """
        for row, value in enumerate(self.column(name)):
            if not isinstance(value, str):
                shown = json.dumps(value, default=str)
                raise self.wrong(row, f"its {name} is not a text ({shown:.40})")


def load_tables(
    data_args: HubDataArguments,
    splits: Sequence[str],
    cache_dir: str | None,
    read: Callable[..., Dataset] = read_table,
    whole: Sequence[str] = (),
) -> dict[str, Table]:
    """Loads the splits' examples, from their files if given, else from the hub; cut to the limits.

    Args:
        data_args: the flags that name files and dataset, and limit the examples.
        splits: the splits that are needed, of "train", "validation" and "test".
        cache_dir: folder for downloads and for the tables made of files; None for the default.
        read: reads a file. It is called with its path and `cache_dir`.
        whole: splits that are not cut here, because the caller has to see all of their rows.

    Raises:
        ValueError: a needed split is not available, or is empty.
    """
    files, tables = data_args.files, {}
    on_hub = {split for split in splits if files[split] is None}
    if on_hub and data_args.dataset_name is None:
        missing = next(split for split in splits if split in on_hub)
        raise ValueError(f"this run needs --{missing}_file")
    loaded = _from_hub(data_args, cache_dir) if on_hub else {}
    for split in splits:
        if split not in on_hub:
            tables[split] = Table(read(files[split], cache_dir=cache_dir), files[split])
        elif split in loaded:
            tables[split] = Table(loaded[split], f"{data_args.dataset_name} ({split})")
        else:
            raise ValueError(
                f"{data_args.dataset_name} has no {split} set; it has {', '.join(loaded)}: give "
                f"--{split}_file"
            )
        if split not in whole:
            tables[split] = tables[split].first(split, data_args)
    return tables


def _from_hub(data_args: HubDataArguments, cache_dir: str | None) -> Mapping[str, Dataset]:
    name = data_args.dataset_name
    try:
        return load_data_set(
            name,
            data_args.dataset_config_name,
            cache_dir,
            "give files (--train_file and the like), or a local folder",
        )
    except RuntimeError as error:  # from `datasets`, for a dataset that is a script
        raise ValueError(
            f"--dataset_name {name}: {error}; give files (--train_file and the like)"
        ) from error


def load_data_set(
    name: str, config: str | None, cache_dir: str | None, way_out: str
) -> Mapping[str, Dataset]:
    """Loads the splits of a dataset on the hub or in a folder.

    If the hub does not answer, a copy that an earlier run has left in the cache is used.

    Args:
        name: a repository's name, or a folder.
        config: the name of its configuration; None for the only one.
        cache_dir: folder for downloads.
        way_out: for the error message, what to do if it cannot be fetched.

    Raises:
        ValueError: the name is empty, or names a file, which another flag takes; or a folder's path
            has a character of patterns.
        OSError: there is no such dataset, or it cannot be fetched.
        RuntimeError: it is a script, which `datasets` no longer runs.
    """
    from datasets import config as library
    from datasets import load_dataset

    if not name:
        raise ValueError("the data set's name is empty")
    if os.path.isdir(name):
        _check_no_pattern(name)
        # As in `load_rows`: `datasets` would tell changed files by their names and times alone.
        with unreported():
            return load_dataset(name, config, cache_dir=cache_dir, description=folder_digest(name))
    if os.path.isfile(name):
        if name.endswith(".py"):
            return load_dataset(name)  # raises an error, as `datasets` no longer runs scripts
        if is_a_path(name) or name.endswith(SUFFIXES):
            raise ValueError(f"{name}: is a file: give it as --train_file")
    if is_a_path(name):
        raise FileNotFoundError(f"{name}: no such folder")
    why = why_out_of_reach(library.HF_HUB_OFFLINE)  # also true under HF_DATASETS_OFFLINE
    try:
        with _cache_alone() if why else nullcontext():
            return load_dataset(name, config, cache_dir=cache_dir)
    except ConnectionError as error:
        why = why or first_line(error)
        raise OSError(f"the data set '{name}' cannot be fetched: {why}; {way_out}") from error


def _check_no_pattern(folder: str) -> None:
    """Checks that `datasets` does not take a folder's path for a pattern.

    Raises:
        ValueError: it does.
    """
    path = os.path.realpath(folder)
    if glob.escape(path) != path:
        raise ValueError(
            f"{folder}: the library that reads it takes *, ? and [ in {path} for a pattern, and "
            "may read another folder: rename it, or give files (--train_file and the like)"
        )


@contextmanager
def _cache_alone() -> Iterator[None]:
    """Makes `datasets` use its cache only; it would otherwise retry the hub for half a minute."""
    import datasets
    import huggingface_hub

    settings = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in settings]
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, was in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = was


def first_rows(rows: Dataset, split: str, data_args: DataArguments) -> Dataset:
    """Returns the first rows of a set, as many as --max_…_samples allows.

    Args:
        rows: the set.
        split: its name, which may have a second part, as in "validation_matched".
        data_args: the flags with the limits.

    Raises:
        ValueError: the limit is below 1, or the set is empty.
    """
    name = split.split("_")[0]
    flag = f"max_{'val' if name == 'validation' else name}_samples"
    limit = getattr(data_args, flag)
    check_bounds(f"--{flag}", limit, least=1)
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    if len(rows) == 0:
        raise ValueError(f"the {split} set holds no examples")
    return rows
