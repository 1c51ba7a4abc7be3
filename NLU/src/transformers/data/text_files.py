"""The user's CSV and JSON-lines files as tables.

`read_table` refuses what cannot be read as it was meant. Which columns are texts and labels is in
text_columns.py, what is made of labels in text_labels.py.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from loralib.io.digests import file_digest
from loralib.io.encoding import refuse_utf16_file
from loralib.text import first_line

from .csv_rows import check_rows, csv_header, types_of_all_rows
from .json_rows import begins_with_rows, find_fault, json_rows
from .text_columns import are_words, why_no_text

if TYPE_CHECKING:  # else imported where a file is read: --help and wrong flags need not wait for it
    from datasets import Dataset

# Bytes of a JSON file that are read at once: as the library does, and the most where its pieces
# would differ, as pyarrow counts them in 32 bits.
_PIECE, _LARGEST_PIECE = 10 * 2**20, 2**30
# A text in JSON which pyarrow takes for a time, where all of a column's in a piece are such.
_LOOKS_LIKE_A_TIME = re.compile(rb'"\d{4}-\d\d-\d\d(?:[ T][\d:.+\-]*Z?)?"(?!\s*:)')
# Where pyarrow says that a JSON file is wrong: it counts from 0, and within a part of the file.
_IN_ROW = re.compile(r" in row \d+$")


def check_is_file(path: str) -> None:
    """Checks that there is a file of that name.

    Raises:
        FileNotFoundError: there is none.
        IsADirectoryError: it is a folder.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: is a folder; give a file of it")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")


def read_table(path: str, texts: Sequence[str] = (), cache_dir: str | None = None) -> Dataset:
    """A CSV or JSON-lines file, by its name's end.

    Args:
        path: the file.
        texts: columns of a CSV file that are texts, even where they look like numbers.
        cache_dir: another folder than the usual one for the cache of datasets.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: it is not of this kind, has a column twice, or no rows.
    """
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowInvalid

    check_is_file(path)
    refuse_utf16_file(path)
    kind = "csv" if path.endswith(".csv") else "json"
    in_pieces = os.path.getsize(path) > _PIECE
    options: dict[str, Any] = {}
    if kind == "csv":
        header = csv_header(path)
        # pandas reads an empty cell as a missing value, and words such as "null" with it.
        options["keep_default_na"] = False
        options["converters"] = {name: str for name in texts if name in header} or None
    elif not begins_with_rows(path):
        find_fault(path, in_pieces)
    elif in_pieces and _has_times(path):
        # A column's type is then that of all its rows: a piece in which all texts look like times
        # would be refused beside others, or its texts written otherwise. It takes more memory.
        options["chunksize"] = min(os.path.getsize(path), _LARGEST_PIECE)
    try:
        rows = _load(kind, path, cache_dir=cache_dir, **options)
        if kind == "json":
            rows.data.validate(full=True)  # pyarrow reads bytes that are not UTF-8 as if they were
    except (DatasetGenerationError, ArrowInvalid, RecursionError) as error:
        if kind == "csv":
            check_rows(path, header)
        else:
            find_fault(path, in_pieces)
        why = _IN_ROW.sub("", first_line(error.__cause__ or error))
        if isinstance(error, RecursionError):
            why = "a row is nested too deep"
        raise ValueError(f"{path}: cannot be read ({why})") from error
    except (StopIteration, ValueError) as error:
        # What the library makes of a file without rows, or nested deeper than it can tell.
        if kind == "json":
            find_fault(path, in_pieces)
        raise ValueError(f"{path}: holds no examples, or none that can be read") from error
    if kind == "csv":
        return rows
    _refuse_one_object(rows, path)
    return _with_texts(rows, path)


def _load(kind: str, path: str, **options: Any) -> Dataset:
    """As `load_rows`; a CSV file also where a column turns from numbers to words.

    pandas reads it piece by piece, and the first one tells the columns' types.
    """
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowException

    try:
        return load_rows(kind, path, **options)
    except DatasetGenerationError as error:
        if kind != "csv" or not isinstance(error.__cause__, ArrowException):
            raise
        try:
            types = types_of_all_rows(path, options)
        except ValueError:  # another fault, in a later row
            raise error from error.__cause__
    return load_rows(kind, path, **{**options, **types})


def _refuse_one_object(rows: Dataset, path: str) -> None:
    """Refuses {"data": [rows]}, which the library takes for a row.

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
    """Whether a column may be a text, or its words; a version is that of a file of one object."""
    if name.lower() == "version":
        return False
    return why_no_text(rows, name) is None or are_words(rows[name][0])


def load_rows(kind: str, path: str, **options: Any) -> Dataset:
    """A file's rows by a reader of datasets, in whose cache they are found by the file's content.

    The library itself goes by a file's name and time, which another one that is put in its place
    may share, as after ``cp -p``.

    Args:
        kind: the reader's name.
        path: the file.
        options: the reader's own, and a ``cache_dir``.
    """
    from datasets import load_dataset

    # All settings of a reader are in the cache's key; this one changes nothing else.
    content = file_digest(path)
    with unreported():
        return load_dataset(kind, data_files=path, split="train", description=content, **options)


@contextmanager
def unreported() -> Iterator[None]:
    """Keeps datasets from reporting to a server that a file of the user's own is read.

    It waits for the server's name, for seconds where a network does not know it.
    """
    from datasets import config

    before = config.HF_UPDATE_DOWNLOAD_COUNTS
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = before


def _has_times(path: str) -> bool:
    """Whether a JSON file, which is not empty, has a text that looks like a time."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return _LOOKS_LIKE_A_TIME.search(content) is not None


def _with_texts(rows: Dataset, path: str) -> Dataset:
    """A JSON file's rows, where the reader took texts for times because all of them look like one.

    Raises:
        ValueError: there are such, and the file is not of objects.
    """
    from datasets import Dataset, concatenate_datasets

    schema = rows.features.arrow_schema
    taken = [name for name in schema.names if _holds_times(schema.field(name).type)]
    if not taken:
        return rows
    given = json_rows(path)
    if len(given) != len(rows):
        raise ValueError(
            f"{path}: {taken[0]} holds dates, which would not stay texts: write one object per line"
        )
    names = rows.column_names
    texts = Dataset.from_dict({name: [row.get(name) for row in given] for name in taken})
    others = [name for name in names if name not in taken]
    if others:  # a table without columns has no rows
        texts = concatenate_datasets([rows.select_columns(others), texts], axis=1)
    return texts.select_columns(names)  # in the file's order


def _holds_times(kind: Any) -> bool:
    """Whether a type of pyarrow's is one of times, or has parts that are."""
    import pyarrow

    parts = (kind.field(index).type for index in range(kind.num_fields))
    return pyarrow.types.is_temporal(kind) or any(map(_holds_times, parts))
