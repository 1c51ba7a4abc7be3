"""Reads the user's CSV and JSON-lines files as tables.

`read_table` raises an error for what cannot be read as it was meant. text_columns.py chooses the
columns of texts and labels; text_labels.py converts the labels.
"""

from __future__ import annotations

import errno
import glob
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loralib.errors import DiskFullError
from loralib.io.atomic import DISK_FULL
from loralib.io.digests import file_digest
from loralib.io.encoding import refuse_utf16_file
from loralib.text import first_line

from .csv_rows import check_rows, csv_header, types_of_all_rows
from .json_rows import begins_with_rows, find_fault, json_rows
from .text_columns import are_words, why_no_text

if TYPE_CHECKING:  # else imported where a file is read: --help and wrong flags need not wait for it
    from datasets import Dataset

# Bytes of a JSON file that are read at once: the library's default; and the most that are read if
# pieces might differ in type, since pyarrow counts them in 32 bits.
_PIECE, _LARGEST_PIECE = 10 * 2**20, 2**30
# A JSON text that pyarrow takes for a time if all of a column's texts in a piece are like it.
_LOOKS_LIKE_A_TIME = re.compile(rb'"\d{4}-\d\d-\d\d(?:[ T][\d:.+\-]*Z?)?"(?!\s*:)')
# The place that pyarrow's error for a JSON file names: it counts from 0 within a part of the file.
_IN_ROW = re.compile(r" in row \d+$")


def check_is_file(path: str) -> None:
    """Checks that there is a file of this name, or a pipe, which `refuse_utf16_file` refuses.

    Raises:
        FileNotFoundError: there is none.
        IsADirectoryError: it is a folder.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: is a folder; give a file of it")
    if not (os.path.isfile(path) or Path(path).is_fifo()):
        raise FileNotFoundError(f"{path}: no such file")


def read_table(path: str, texts: Sequence[str] = (), cache_dir: str | None = None) -> Dataset:
    """Reads a CSV or JSON-lines file, by how its name ends.

    Args:
        path: the file.
        texts: columns of a CSV file that are texts, even if they look like numbers.
        cache_dir: the folder for the cache of datasets; by default that of datasets.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: it is not of this kind, has a column twice, or no rows.
    """
    check_is_file(path)
    refuse_utf16_file(path)
    if path.endswith(".csv"):
        return _read_csv(path, texts, cache_dir)
    return _read_json(path, cache_dir)


def _read_csv(path: str, texts: Sequence[str], cache_dir: str | None) -> Dataset:
    header = csv_header(path)
    options = {
        "cache_dir": cache_dir,
        # By default, pandas reads empty cells, and words such as "null", as missing values.
        "keep_default_na": False,
        "converters": {name: str for name in texts if name in header} or None,
    }
    with _explained(path, partial(check_rows, path, header)):
        rows = _load_csv(path, options)
    _refuse_second_header(rows, header, path)
    return rows


def _load_csv(path: str, options: Mapping[str, Any]) -> Dataset:
    """Does what `load_rows` does, also for a file with a column of numbers and then words.

    pandas reads a file piece by piece, and takes the columns' types from the first piece.
    """
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowException

    try:
        return load_rows("csv", path, **options)
    except DatasetGenerationError as error:
        if not isinstance(error.__cause__, ArrowException):
            raise
        try:
            types = types_of_all_rows(path, options)
        except ValueError:  # another fault, in a later row
            raise error from error.__cause__
    return load_rows("csv", path, **{**options, **types})


def _refuse_second_header(rows: Dataset, header: Sequence[str], path: str) -> None:
    """Checks that no row of a CSV file is the line of column names, as after ``cat a.csv b.csv``.

    Its label would be a class. With a single column, such a row may be a text. A second file may
    begin with a byte order mark, as spreadsheets write it.

    Raises:
        ValueError: there is such a row.
    """
    from pyarrow import compute, types

    table = rows.data
    if len(table.column_names) < 2:
        return
    repeats = None
    for column, name in zip(table.columns, header, strict=True):
        if not (types.is_string(column.type) or types.is_large_string(column.type)):
            return
        same = compute.or_(compute.equal(column, name), compute.equal(column, f"\ufeff{name}"))
        repeats = same if repeats is None else compute.and_(repeats, same)
        if not compute.any(repeats).as_py():
            return
    row = repeats.index(True).as_py() + 1
    raise ValueError(
        f"{path}: row {row}: is the line of column names again, as in files that were joined: "
        "remove it"
    )


def _read_json(path: str, cache_dir: str | None) -> Dataset:
    in_pieces = os.path.getsize(path) > _PIECE
    options = {}
    if not begins_with_rows(path):
        find_fault(path, in_pieces)
    elif in_pieces and _has_times(path):
        # The file is read as one piece, which takes more memory, and a column's type is that of all
        # its rows. Among several pieces, one in which all of a column's texts look like times would
        # be refused, or these texts rewritten.
        options["chunksize"] = min(os.path.getsize(path), _LARGEST_PIECE)
    with _explained(path, partial(find_fault, path, in_pieces)):
        rows = load_rows("json", path, cache_dir=cache_dir, **options)
        rows.data.validate(full=True)  # pyarrow reads bytes that are not UTF-8 as if they were
    _refuse_one_object(rows, path)
    return _with_texts(rows, path)


@contextmanager
def _explained(path: str, find: Callable[[], None]) -> Iterator[None]:
    """Explains the library's errors about a file: `find` looks for the row that caused them.

    Raises:
        ValueError: the file cannot be read.
    """
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowInvalid

    try:
        yield
    except (DatasetGenerationError, ArrowInvalid, RecursionError) as error:
        find()
        why = _IN_ROW.sub("", first_line(error.__cause__ or error))
        if isinstance(error, RecursionError):
            why = "a row is nested too deep"
        raise ValueError(f"{path}: cannot be read ({why})") from error
    except (StopIteration, ValueError) as error:
        # The library raises these for a file without rows, or nested deeper than it can report.
        find()
        raise ValueError(f"{path}: holds no examples, or none that can be read") from error


def _refuse_one_object(rows: Dataset, path: str) -> None:
    """Checks that a file is not {"data": [rows]}, which the library takes for one row.

    Raises:
        ValueError: the file holds such an object, and nothing else that could be a text.
    """
    names = rows.column_names
    if len(rows) != 1 or any(map(partial(_may_be_read, rows), names)):
        return
    for name in names if len(names) == 1 else {"data"} & {*names}:
        value = rows[name][0]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            raise ValueError(
                f"{path}: is one object with its rows in the list '{name}': write only that list, "
                "or one object per line"
            )


def _may_be_read(rows: Dataset, name: str) -> bool:
    """Returns whether a column may be a text, or its words; "version" is that of a whole file."""
    if name.lower() == "version":
        return False
    return why_no_text(rows, name) is None or are_words(rows[name][0])


def load_rows(kind: str, path: str, **options: Any) -> Dataset:
    """Reads a file's rows with a reader of datasets, whose cache finds them by the file's content.

    The library itself identifies a file by its name and time, which another file that replaces it
    may share, as after ``cp -p``.

    Args:
        kind: the reader's name.
        path: the file.
        options: the reader's own options, and ``cache_dir``.

    Raises:
        DiskFullError: the cache's disk is full.
        OSError: the cache is damaged, as by a power failure soon after it was written.
    """
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowInvalid

    # All settings of a reader are in the cache's key; this one changes nothing else.
    content = file_digest(path)
    # The library takes "[1]" in the names of the file and of all folders around it for a pattern,
    # which means another file.
    name = glob.escape(os.path.abspath(path))
    cache = Path(options.get("cache_dir") or config.HF_DATASETS_CACHE, kind)
    try:
        with unreported():
            return load_dataset(
                kind, data_files=name, split="train", description=content, **options
            )
    except DatasetGenerationError as error:
        code = getattr(error.__cause__, "errno", None)
        if code not in DISK_FULL:
            raise
        raise DiskFullError(cache, 0, code == errno.EDQUOT) from error
    except (ArrowInvalid, json.JSONDecodeError) as error:  # in `path`, it is the error above
        why = f"the cache is damaged ({first_line(error)}): remove this folder, and start again"
        raise OSError(f"{cache}: {why}") from error


@contextmanager
def unreported() -> Iterator[None]:
    """Keeps datasets from reporting to a server that a file of the user's is read.

    The report would wait for the server's name, for seconds if the network cannot resolve it.
    """
    from datasets import config

    before = config.HF_UPDATE_DOWNLOAD_COUNTS
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = before


def _has_times(path: str) -> bool:
    """Returns whether a JSON file, which must not be empty, has a text that looks like a time."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return _LOOKS_LIKE_A_TIME.search(content) is not None


def _with_texts(rows: Dataset, path: str) -> Dataset:
    """Returns a JSON file's rows with texts in columns that the reader took for times.

    Raises:
        ValueError: there are such columns, and the file's rows are not objects.
    """
    from datasets import Dataset, concatenate_datasets

    schema = rows.features.arrow_schema
    taken = [name for name in schema.names if _holds_times(schema.field(name).type)]
    if not taken:
        return rows
    given = json_rows(path)
    if len(given) != len(rows):
        raise ValueError(
            f"{path}: {taken[0]} holds dates, which would not be read as texts: write one object "
            "per line"
        )
    names = rows.column_names
    texts = Dataset.from_dict({name: [row.get(name) for row in given] for name in taken})
    others = [name for name in names if name not in taken]
    if others:  # a table without columns has no rows
        texts = concatenate_datasets([rows.select_columns(others), texts], axis=1)
    return texts.select_columns(names)  # in the file's order


def _holds_times(kind: Any) -> bool:
    """Returns whether a type of pyarrow is one of times, or has parts that are."""
    import pyarrow

    parts = (kind.field(index).type for index in range(kind.num_fields))
    return pyarrow.types.is_temporal(kind) or any(map(_holds_times, parts))
