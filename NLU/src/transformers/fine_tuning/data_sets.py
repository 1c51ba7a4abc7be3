"""The examples of a run: the user's own files, or a data set on the hub.

A `Table` knows where its rows come from, so that what is wrong with one can be said as
"FILE: row 7: …". Cells of a CSV file that hold several values are JSON: ["John", "lives", "here"].
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loralib.io.digests import folder_digest
from loralib.io.hub import is_a_path, why_out_of_reach
from loralib.text import first_line, quoted

from ..data.text_files import read_table, unreported
from .arguments import SUFFIXES, DataArguments, HubDataArguments

if TYPE_CHECKING:  # else imported where data is read: --help and wrong flags need not wait for it
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
        """The error of a row, counted from 0 here and from 1 in its message."""
        return ValueError(f"{self.source}: row {row + 1}: {what}")

    def check_columns(self, names: Sequence[str], hint: str = "") -> None:
        """Refuses a table without one of these columns.

        Raises:
            ValueError: it has not.
        """
        for name in names:
            if name not in self.rows.column_names:
                columns = quoted(self.rows.column_names)
                raise ValueError(f"{self.source}: has no column '{name}', but {columns}{hint}")

    def first(self, split: str, data_args: DataArguments) -> Table:
        """As many rows as --max_…_samples allows, see `first_rows`."""
        return replace(self, rows=first_rows(self.rows, split, data_args))

    def column(self, name: str) -> list[Any]:
        """The values of a column, by row."""
        return self.rows[name][:]  # at once: one by one, they take fifty times as long

    def with_column(self, name: str, values: Sequence[Any]) -> Table:
        """The same with another column of this name."""
        rows = self.rows
        if name in rows.column_names:
            rows = rows.remove_columns(name)
        return replace(self, rows=rows.add_column(name, values))

    def taking(self, names: Mapping[str, str]) -> Table:
        """The columns that are named, under other names: {old: new}."""
        rows = self.rows.select_columns(list(names))
        # In one step, as one column's old name may be another's new one.
        changed = {old: new for old, new in names.items() if old != new}
        return replace(self, rows=rows.rename_columns(changed))

    def decoded(self, *names: str) -> Table:
        """The same with these columns' values taken out of their cells, where the file is CSV.

        Raises:
            ValueError: a cell is not JSON.
        """
        if not self.source.endswith(".csv"):
            return self
        table = self
        for name in names:
            values = [self._value(name, row, cell) for row, cell in enumerate(self.column(name))]
            table = table.with_column(name, values)
        return table

    def _value(self, name: str, row: int, cell: Any) -> Any:
        try:
            return json.loads(cell)
        except (TypeError, ValueError) as error:
            raise self.wrong(row, f"its {name} is not JSON: {cell!s:.40}") from error

    def all_hidden(self, name: str, hidden: Sequence[bool]) -> bool:
        """Whether a test set's labels are hidden, as the hub has them.

        Args:
            name: their column.
            hidden: whether each row's are.

        Raises:
            ValueError: some are, and others are not.
        """
        if any(hidden) and not all(hidden):
            raise self.wrong(
                hidden.index(True),
                f"hides its {name} (-1), and row {hidden.index(False) + 1} does not: give those of "
                "all rows, for scores, or of none",
            )
        return any(hidden)

    def check_strings(self, name: str) -> None:
        """Refuses a column that does not have a text in each row.

        Raises:
            ValueError: a row has none.
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
    """The splits' examples, from files where these are given, else from the hub; cut to limits.

    Args:
        data_args: name files and data set.
        splits: "train", "validation", "test", as far as they are needed.
        cache_dir: where to keep what is downloaded, and what files are read into; None for the
            usual place.
        read: reads a file; it is called with its path and `cache_dir`.
        whole: splits that are not cut here, as something is to be found in all of their rows.

    Raises:
        ValueError: a split is needed and not to be had, or holds nothing.
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
                f"{data_args.dataset_name} has no {split} set, but {', '.join(loaded)}: give "
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
            "give it in files (--train_file and the like), or as a folder here",
        )
    except RuntimeError as error:  # what the library raises for a data set that is a program
        raise ValueError(f"--dataset_name {name}: {error}; give it in files") from error


def load_data_set(
    name: str, config: str | None, cache_dir: str | None, way_out: str
) -> Mapping[str, Dataset]:
    """The splits of a data set of the hub, or of a folder.

    Where the hub does not answer, those that an earlier run has put into the cache.

    Args:
        name: a repository's name, or a folder.
        config: which of its configurations; None for the only one.
        cache_dir: where to keep what is downloaded.
        way_out: what to do where it cannot be fetched.

    Raises:
        ValueError: the name is empty, or a file's, which another flag takes.
        OSError: there is none of that name, or it cannot be fetched.
        RuntimeError: it is a program, which the library runs no more.
    """
    from datasets import config as library
    from datasets import load_dataset

    if not name:
        raise ValueError("the data set's name is empty")
    if os.path.isdir(name):
        # As in `load_rows`: the library goes by names and times of a folder's files.
        with unreported():
            return load_dataset(name, config, cache_dir=cache_dir, description=folder_digest(name))
    if os.path.isfile(name):
        if name.endswith(".py"):
            return load_dataset(name)  # which says that it runs none
        if is_a_path(name) or name.endswith(SUFFIXES):
            raise ValueError(f"{name}: is a file: give it as --train_file")
    if is_a_path(name):
        raise FileNotFoundError(f"{name}: no such folder")
    why = why_out_of_reach(library.HF_HUB_OFFLINE)  # where HF_DATASETS_OFFLINE counts as well
    try:
        with _cache_alone() if why else nullcontext():
            return load_dataset(name, config, cache_dir=cache_dir)
    except ConnectionError as error:
        why = why or first_line(error)
        raise OSError(f"the data set '{name}' cannot be fetched: {why}; {way_out}") from error


@contextmanager
def _cache_alone() -> Iterator[None]:
    """Keeps the library from the hub, which it would ask again and again for half a minute."""
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
    """As many rows as --max_…_samples allows.

    Args:
        rows: the set.
        split: its name, which may have a second part, as "validation_matched" has.
        data_args: have the limits.

    Raises:
        ValueError: none is left.
    """
    name = split.split("_")[0]
    limit = data_args.limits[name]
    if limit is not None and limit < 1:
        name = {"validation": "val"}.get(name, name)
        raise ValueError(f"--max_{name}_samples must be at least 1, not {limit}")
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    if len(rows) == 0:
        raise ValueError(f"the {split} set holds no examples")
    return rows
