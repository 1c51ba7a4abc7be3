"""Reads the names of a CSV file's columns, and finds what is wrong in a file.

If the library that reads tables cannot read a file, it says little more than that. `check_rows`
finds the row.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from .json_rows import find_fault

_LONGEST_FIELD = 2**31 - 1  # characters; the largest limit that csv accepts on every system
# What some spreadsheets write instead of commas.
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs"}
# The start of a file of JSON objects, which may be in a list.
_BEGINS_AS_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*("|\})')


@contextmanager
def open_csv(path: str) -> Iterator[TextIO]:
    """Opens a file for the csv module, whose default limit is 131,072 characters per field."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    finally:
        csv.field_size_limit(before)


def csv_header(path: str) -> list[str]:
    """Returns the names of a CSV file's columns.

    Raises:
        ValueError: there are none, or the file is JSON; they are not separated by commas; a name
            occurs twice, and pandas would rename it; or the first row has more fields than names.
    """
    if _is_json(path):
        raise ValueError(f"{path}: holds JSON: give it a name that ends in .json or .jsonl")
    try:
        with open_csv(path) as file:
            rows = (row for row in csv.reader(file) if row)  # pandas skips empty lines
            names, first = next(rows, []), next(rows, [])
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except csv.Error as error:
        raise ValueError(f"{path}: cannot be read ({error}); is it CSV?") from error
    if not names:
        raise ValueError(f"{path}: is empty")
    for separator, plural in _OTHER_SEPARATORS.items():
        if len(names) == 1 and separator in names[0] and any(separator in f for f in first):
            raise ValueError(
                f"{path}: seems to be separated by {plural}: use commas, and put texts that "
                "contain one in quotes"
            )
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise ValueError(
            f"{path}: has the column '{repeated[0]}' {names.count(repeated[0])} times; "
            "give each column a different name"
        )
    # pandas would take the first fields as names of rows, and shift the others.
    _check_fields(path, 1, first, names)
    return names


def _is_json(path: str) -> bool:
    """Returns whether a file holds JSON objects; a CSV file's first name may only look so."""
    with open(path, "rb") as file:
        if not _BEGINS_AS_JSON.match(file.read(4096)):
            return False
    try:
        find_fault(path, in_pieces=False)
    except ValueError:
        return False
    return True


def check_rows(path: str, names: Sequence[str]) -> None:
    """Looks for the row that kept pandas from reading a CSV file.

    Raises:
        ValueError: a row has more fields than there are names, a quote that is not closed, or
            bytes that are not UTF-8.
    """
    row = 0  # the header's
    with open_csv(path) as file:
        try:
            for row, fields in enumerate(filter(None, csv.reader(file, strict=True))):
                _check_fields(path, row, fields, names)
        except UnicodeDecodeError as error:
            raise _not_utf8(path) from error
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise ValueError(
                    f"{path}: row {row + 1}: a quote is opened and not closed"
                ) from error


def _check_fields(path: str, row: int, fields: Sequence[str], names: Sequence[str]) -> None:
    if len(fields) > len(names):
        raise ValueError(
            f"{path}: row {row}: has {len(fields)} fields, the header names {len(names)} columns: "
            "a text that holds a comma has to be in quotes"
        )


def _not_utf8(path: str) -> ValueError:
    """Returns the error for a file in another encoding; it names the line."""
    with open(path, "rb") as file:
        number = next(n for n, line in enumerate(file, start=1) if not _is_utf8(line))
    return ValueError(f"{path}: line {number}: is not UTF-8 text; save it as UTF-8")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def types_of_all_rows(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options that give a CSV file's columns the types that fit all of its rows.

    This takes memory for the whole file, so it is done only if it has to be.
    """
    import pandas
    import pyarrow
    from datasets import Features

    given = {name: options[name] for name in ("keep_default_na", "converters")}
    frame = pandas.read_csv(path, low_memory=False, **given)
    schema = pyarrow.Schema.from_pandas(frame, preserve_index=False).remove_metadata()
    # A column's type now says that it holds texts, even if they look like numbers, so no converter
    # is needed.
    return {"features": Features.from_arrow_schema(schema), "converters": None}
