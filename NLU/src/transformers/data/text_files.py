"""The user's CSV and JSON-lines files: what is in them, and which columns are texts and labels.

`read_table` refuses what cannot be read as it was meant; `choose_columns` says which columns a run
takes, and `take_columns` takes them out under the names ``text``, ``text_pair`` and ``label``. Of
such tables, `label_names` and `number_labels` make classes of words.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from loralib.errors import first_line, in_short, quoted
from loralib.io.digests import file_digest
from loralib.io.encoding import refuse_utf16_file

from .json_rows import KINDS, begins_with_rows, difference_in_kind, find_fault, json_rows

if TYPE_CHECKING:  # else imported where a file is read: --help and wrong flags need not wait for it
    from datasets import Dataset

logger = logging.getLogger(__name__)

LABEL = "label"
TEXT_KEYS = ("text", "text_pair")
# Names of columns that identify rows and are not a part of them.
_IDENTIFIER = re.compile(r"(.*[-_ .])?(id|ids|idx|index|guid|uid|uuid|unnamed: \d+)", re.IGNORECASE)
# Values of a column, each of them ten times or more, that may be names rather than texts.
_FEW = 10
_LONGEST_FIELD = 2**31 - 1  # characters; the most that csv can be told on every system
# Bytes of a JSON file that are read at once: as the library does, and the most where its pieces
# would differ, as pyarrow counts them in 32 bits.
_PIECE, _LARGEST_PIECE = 10 * 2**20, 2**30
# A text in JSON which pyarrow takes for a time, where all of a column's in a piece are such.
_LOOKS_LIKE_A_TIME = re.compile(rb'"\d{4}-\d\d-\d\d(?:[ T][\d:.+\-]*Z?)?"(?!\s*:)')
# What some spreadsheets write in place of commas.
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs"}
_STRINGS = ("string", "large_string")
# How a file of JSON objects begins, which may be in a list.
_BEGINS_AS_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*("|\})')
# What tables have where a number is missing.
_MISSING = ("na", "n/a", "nan", "none", "null", "-", "?")
_DECIMAL_COMMA = re.compile(r"\s*-?\d+,\d+\s*")
# Where pyarrow says that a JSON file is wrong: it counts from 0, and within a part of the file.
_IN_ROW = re.compile(r" in row \d+$")


@dataclass(frozen=True)
class Columns:
    """The columns that a run takes from its files.

    Args:
        texts: names of the one or two text columns.
        label: name of the label's column.
    """

    texts: tuple[str, ...]
    label: str = LABEL


def read_table(path: str, texts: Sequence[str] = (), cache_dir: str | None = None) -> Dataset:
    """A CSV or JSON-lines file, by its name's end.

    Args:
        path: the file.
        texts: columns of a CSV file that are texts, even where they look like numbers.
        cache_dir: another folder than the usual one for the cache of datasets.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not of this kind, has a column twice, or no rows.
    """
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import ArrowInvalid

    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    refuse_utf16_file(path)
    kind = "csv" if path.endswith(".csv") else "json"
    in_pieces = os.path.getsize(path) > _PIECE
    options: dict[str, Any] = {}
    if kind == "csv":
        header = _header(path)
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
            _check_rows(path, header)
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
            types = _types_of_all_rows(path, options)
        except ValueError:  # another fault, in a later row
            raise error from error.__cause__
    return load_rows(kind, path, **{**options, **types})


def _types_of_all_rows(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by which a CSV file's columns are of the types that all its rows tell.

    It takes the memory of all the file, so it is not done before it has to be.
    """
    import pandas
    import pyarrow
    from datasets import Features

    given = {name: options[name] for name in ("keep_default_na", "converters")}
    frame = pandas.read_csv(path, low_memory=False, **given)
    schema = pyarrow.Schema.from_pandas(frame, preserve_index=False).remove_metadata()
    # A text that looks like a number is one by its column's type; no converter is needed then.
    return {"features": Features.from_arrow_schema(schema), "converters": None}


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
                f"{path}: is one object, which has its rows in the list '{name}': write that list "
                "alone, or an object a line"
            )


def _may_be_read(rows: Dataset, name: str) -> bool:
    """Whether a column may be a text, or its words; a version is that of a file of one object."""
    if name.lower() == "version":
        return False
    return _why_no_text(rows, name) is None or _are_words(rows[name][0])


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
    return load_dataset(kind, data_files=path, split="train", description=content, **options)


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
            f"{path}: {taken[0]} holds dates, which would not stay texts: write an object a line"
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


@contextmanager
def _open_csv(path: str) -> Iterator[TextIO]:
    """A file for the csv module, which by default takes no more than 131,072 characters a field."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    finally:
        csv.field_size_limit(before)


def _header(path: str) -> list[str]:
    """The names of a CSV file's columns.

    Raises:
        ValueError: there are none, or the file is JSON; they are not separated by commas; one is
            there twice, which pandas would give another name; or the first row has more fields.
    """
    if _is_json(path):
        raise ValueError(f"{path}: holds JSON: give it a name that ends in .json or .jsonl")
    try:
        with _open_csv(path) as file:
            rows = (row for row in csv.reader(file) if row)  # pandas passes empty lines over
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
                f"{path}: seems to be separated by {plural}: it has to be by commas, with texts "
                "that hold one in quotes"
            )
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise ValueError(
            f"{path}: has the column '{repeated[0]}' {names.count(repeated[0])} times; "
            "give each column a name of its own"
        )
    # pandas would take the first for names of rows, and move the others.
    _check_fields(path, 1, first, names)
    return names


def _is_json(path: str) -> bool:
    """Whether a file is of JSON objects; a CSV file's first name may begin as one."""
    with open(path, "rb") as file:
        if not _BEGINS_AS_JSON.match(file.read(4096)):
            return False
    try:
        find_fault(path, in_pieces=False)
    except ValueError:
        return False
    return True


def _not_utf8(path: str) -> ValueError:
    """The error of a file that is in another encoding: it names the line."""
    with open(path, "rb") as file:
        number = next(n for n, line in enumerate(file, start=1) if not _is_utf8(line))
    return ValueError(f"{path}: line {number}: is not UTF-8 text; save it as UTF-8")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_fields(path: str, row: int, fields: Sequence[str], names: Sequence[str]) -> None:
    if len(fields) > len(names):
        raise ValueError(
            f"{path}: row {row}: has {len(fields)} fields, the header names {len(names)} columns: "
            "a text that holds a comma has to be in quotes"
        )


def _check_rows(path: str, names: Sequence[str]) -> None:
    """Looks for the row for which pandas could not read a CSV file.

    Raises:
        ValueError: it is found; it has more fields than names, a quote that is not closed, or
            bytes that are not UTF-8.
    """
    row = 0  # the header's
    with _open_csv(path) as file:
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


def choose_columns(
    data: Dataset,
    path: str,
    texts: Sequence[str] | None = None,
    label: str = LABEL,
    known_texts: Sequence[str] = (),
    known_labels: Sequence[str] = (),
) -> Columns:
    """Which columns are texts: those asked for, or those that can be nothing else.

    Where none are asked for, it takes those that the model was trained on, sentence1 and sentence2,
    or one or two columns of strings other than the label's: no numbers, and no column that is named
    like an identifier.

    Args:
        data: the file's rows.
        path: its name.
        texts: the columns asked for, one or two.
        label: the label's column.
        known_texts: the text columns that a model was already trained on, as far as it says.
        known_labels: its classes.

    Raises:
        ValueError: a column asked for is absent or asked for twice; or it is ambiguous, or what
            would be a text is one of the classes in each row, and nothing else is the label.
    """
    if texts is not None:
        if not 1 <= len(texts) <= 2 or len({*texts, label}) <= len(texts):
            raise ValueError(
                f"--text_columns takes one or two columns, not {label}'s and none twice; given "
                f"are {', '.join(texts)}"
            )
        for name in texts:
            _check_has(data, path, name, "text_columns")
        return Columns(tuple(texts), label)
    others = [name for name in data.column_names if name != label]
    by_name = {name.strip().lower(): name for name in others}
    if known_texts and all(name.strip().lower() in by_name for name in known_texts):
        exact = {*known_texts} <= {*others}
        own = known_texts if exact else [by_name[name.strip().lower()] for name in known_texts]
        return Columns(tuple(own), label)
    reasons = {name: _why_no_text(data, name) for name in others}
    found = [name for name, reason in reasons.items() if reason is None]
    if {"sentence1", "sentence2"} <= set(found):
        found = ["sentence1", "sentence2"]
    if not 1 <= len(found) <= 2:
        passed = [f"{name} is {reason}" for name, reason in reasons.items() if reason]
        if not found:
            _refuse_unusable(data, path, others)
        raise ValueError(
            f"{path}: has {len(found)} text columns ({in_short(found or passed) or 'none'}); one "
            f"or two are needed in addition to '{label}', or sentence1 and sentence2: name them "
            "with --text_columns"
        )
    # A label's name, or one that is asked for, tells that the first line is one of names.
    is_unclear = path.endswith(".csv") and label == LABEL and label not in data.column_names
    for name in found if is_unclear else ():
        if _looks_like_a_text(name):
            raise ValueError(
                f"{path}: the name of its column '{name:.60}' looks like a text: the first line "
                f"has to name the columns, as in text,{label}; where it does, name the texts with "
                "--text_columns"
            )
    for name in found if label not in data.column_names else ():
        if {*data.unique(name)} - {None, ""} <= {*known_labels}:
            raise ValueError(
                f"{path}: each value of '{name}' is one of the model's classes: if it is the "
                f"label, give --label_column {name}; if it is a text, name all texts with "
                "--text_columns"
            )
    for name in found:
        _warn_of_few(data, path, name)
    return Columns(tuple(found), label)


def _warn_of_few(data: Dataset, path: str, name: str) -> None:
    """Warns of a column of texts that may be none, such as the names of the labels' numbers."""
    values = [str(value) for value in data.unique(name)]
    if len(values) <= _FEW and len(data) >= 10 * len(values):
        logger.warning(
            "%s: %s is taken for text, and has %s: if it is none, name the texts with "
            "--text_columns",
            *(
                path,
                name,
                f"{len(values)} values in {len(data):,} rows ({in_short(values, width=60)})",
            ),
        )


def _refuse_unusable(data: Dataset, path: str, names: Sequence[str]) -> None:
    """Refuses columns that can be no texts if they are asked for either, with what to do about it.

    Raises:
        ValueError: all but identifiers are of lists of words, or empty.
    """
    words, empty = [], []
    for name in names:
        if _IDENTIFIER.fullmatch(name):
            continue
        values = [value for value in data[name][:] if value not in (None, "", [])]
        if not values:
            empty.append(name)
        elif all(map(_are_words, values)):
            words.append((name, json.dumps(" ".join(values[0]), ensure_ascii=False)))
        else:
            return
    for name, joined in words:
        raise ValueError(
            f"{path}: {name} is a list of words in each row: write them as one text, such as "
            f"{joined:.60}"
        )
    if empty:
        raise _empty_in_each_row(path, empty)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _empty_in_each_row(path: str, names: Sequence[str]) -> ValueError:
    columns = f"{' and '.join(names):.200}"
    return ValueError(f"{path}: {columns} is empty in each row: there is nothing to read in it")


def _why_no_text(data: Dataset, name: str) -> str | None:
    """Why a column is not taken for text unless asked for; None where it is."""
    from datasets import Value

    if _IDENTIFIER.fullmatch(name):
        return "named as an identifier"
    feature = data.features[name]
    if isinstance(feature, Value) and feature.dtype not in _STRINGS:
        return f"of {feature.dtype}"
    values = [value for value in data[name][:] if value not in (None, "")]
    if not any(isinstance(value, str) for value in values):
        return f"{KINDS.get(type(values[0]), 'not a string')} in each row" if values else "empty"
    if all(isinstance(value, str) and _is_number(value) for value in values):
        return "all numbers"
    return None


def _looks_like_a_text(name: str) -> bool:
    """Whether a column's name may be a row's text, in a file without a line of names."""
    return len(name.split()) > 3


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_finite(text: str) -> bool:
    """Whether a label is a number; nan and inf are words as others."""
    return _is_number(text) and math.isfinite(float(text))


def _check_has(data: Dataset, path: str, name: str, flag: str) -> None:
    names = data.column_names
    if name in names:
        return
    raw = path.endswith(".csv") and any(_is_number(n) or _looks_like_a_text(n) for n in names)
    hint = ", where the first line names the columns" if raw else ""
    raise ValueError(
        f"{path}: has no column '{name}', but {quoted(names)}{hint}: --{flag} has to name one of "
        "these"
    )


def take_columns(data: Dataset, path: str, columns: Columns, labelled: bool = True) -> Dataset:
    """The columns of a run under this module's names, after a check that each row has them.

    Args:
        data: the rows of a file.
        path: its name.
        columns: which of them.
        labelled: take the label as well.

    Raises:
        ValueError: a column is absent; a row has no value, or one that is not a text or a label.
    """
    names = dict(zip(columns.texts, TEXT_KEYS, strict=False))
    texts = {}
    for name in columns.texts:
        _check_has(data, path, name, "text_columns")
        texts[name] = _as_written(data, path, name)
        _check_texts(texts[name], path, name)
    warn_of_empty_texts(path, texts)
    if labelled:
        names[columns.label] = LABEL
        if not any(_may_be_label(name, columns) for name in data.column_names):
            raise ValueError(
                f"{path}: has no column '{columns.label}', but its text's alone, "
                f"'{columns.texts[0]}'; to predict labels, give it as --test_file, with "
                "--do_predict"
            )
        _check_has(data, path, columns.label, "label_column")
        _check_labels(data, path, columns.label)
    taken = data.select_columns(list(names))
    # In one step, as one column's old name may be another's new one.
    return taken.rename_columns({old: new for old, new in names.items() if old != new})


def _may_be_label(name: str, columns: Columns) -> bool:
    """Whether a column is no identifier, nor the text; of two texts one may be the label."""
    return not _IDENTIFIER.fullmatch(name) and (name,) != columns.texts


def _as_written(data: Dataset, path: str, name: str) -> list[Any]:
    """A column's values, as the file has them.

    Of a JSON file's column of several kinds, the library reads a text such as "1" as the number 1:
    that column is read again.
    """
    from datasets import Value

    if not isinstance(data.features[name], Value) and not path.endswith(".csv"):
        rows = json_rows(path)
        if len(rows) == len(data):
            return [row.get(name) for row in rows]
    return data[name][:]  # at once: row by row, it takes fifty times as long


def _check_texts(values: Sequence[Any], path: str, name: str) -> None:
    for row, value in enumerate(values, start=1):
        if value is None:
            raise ValueError(f"{path}: row {row}: has no {name}")
        if not isinstance(value, str):
            kind = KINDS.get(type(value), f"of the type {type(value).__name__}")
            shown = json.dumps(value, ensure_ascii=False, default=str)
            hint = ": write its words as one text" if _are_words(value) else ""
            raise ValueError(
                f"{path}: row {row}: its {name} is {kind}, not a text ({shown:.40}){hint}"
            )


def warn_of_empty_texts(path: str, columns: Mapping[str, Sequence[str]]) -> None:
    """Says how many rows of a file have a text that is empty or blank, and which is the first.

    Args:
        path: the file.
        columns: the texts by their column's name; all are of as many rows.
    """
    for name, texts in columns.items():
        empty = [row for row, text in enumerate(texts, start=1) if not text.strip()]
        if empty:
            logger.warning(
                "%s: %d of %d rows have an empty %s, row %d first: if that is not meant, leave "
                "them out",
                *(path, len(empty), len(texts), name, empty[0]),
            )


def _check_labels(data: Dataset, path: str, name: str) -> None:
    from datasets import Value

    values = _as_written(data, path, name)
    for row, value in enumerate(values, start=1):
        # NaN alone differs from itself.
        if value is None or value == "" or value != value:
            raise ValueError(f"{path}: row {row}: has no {name}")
        if not isinstance(value, str | int | float):
            kind = KINDS.get(type(value), f"of the type {type(value).__name__}")
            raise ValueError(f"{path}: row {row}: its {name} is {kind}, not a class or a score")
    if not isinstance(data.features[name], Value):
        _refuse_kinds(values, path, name)
    _check_numbers(values, path, name)
    if path.endswith(".csv") and "int" in data.features[name].dtype:
        _check_numerals(path, name)


def _refuse_kinds(values: Sequence[Any], path: str, name: str) -> None:
    first = KINDS[type(values[0])]
    row = next((row for row, v in enumerate(values) if KINDS[type(v)] != first), 0)
    differing = difference_in_kind(name, values[row], "row 1", values[0])
    raise ValueError(f"{path}: row {row + 1}: {differing}")


def _check_numerals(path: str, name: str) -> None:
    """Refuses labels in a CSV file that are read as numbers and written otherwise, as 007 is."""
    with _open_csv(path) as file:
        texts = [(row[name] or "").strip() for row in csv.DictReader(file)]
    for row, text in enumerate(texts, start=1):
        if re.fullmatch(r"[+-]?\d+", text) and text != str(int(text)):
            raise ValueError(
                f"{path}: row {row}: its {name} is {text}, and would be read as {int(text)}: "
                "write it so, or give the classes names that are not numbers"
            )


def _check_numbers(values: Sequence[Any], path: str, name: str) -> None:
    """Refuses words that stand for a missing number, which would make a class of each number."""
    words = {value for value in values if isinstance(value, str)}
    missing = {word for word in words if word.strip().lower() in _MISSING}
    if missing and words != missing and all(map(_is_number, words - missing)):
        row = next(row for row, value in enumerate(values, start=1) if value in missing)
        raise ValueError(
            f"{path}: row {row}: its {name} is '{values[row - 1]}', where others are numbers: "
            "leave the row out"
        )
    if words and all(map(_DECIMAL_COMMA.fullmatch, words)):
        raise ValueError(f"{path}: {name} has decimal commas ({values[0]}): write points")


def as_scores(data: Dataset, path: str) -> Dataset:
    """A table, as `take_columns` makes it, with its labels as scores, which whole numbers may be.

    Raises:
        ValueError: a label is a word.
    """
    from datasets import Value

    if not is_score(data) and data.features[LABEL].dtype in _STRINGS:
        raise ValueError(f"{path}: the labels are words, and the model gives scores")
    return data.cast_column(LABEL, Value("float64"))


def is_score(data: Dataset) -> bool:
    """Whether the labels of a table, as `take_columns` makes it, are scores rather than classes."""
    return str(getattr(data.features[LABEL], "dtype", "")).startswith("float")


def whole_scores(data: Dataset) -> list[float]:
    """The scores of a table, each once, where all of them are whole numbers; else none."""
    values = sorted(data.unique(LABEL)) if is_score(data) else []
    return values if all(value.is_integer() for value in values) else []


def check_varied(train: Dataset, path: str) -> None:
    """Refuses a training set with one label: there is nothing in it to tell apart.

    Raises:
        ValueError: it is such a set.
    """
    from datasets import ClassLabel

    labels = train.unique(LABEL)
    if len(labels) < 2:
        feature = train.features[LABEL]
        only = feature.int2str(labels[0]) if isinstance(feature, ClassLabel) else labels[0]
        raise ValueError(
            f"{path}: all {len(train)} rows have the label '{only}'; training needs at least two "
            "labels"
        )


def check_not_empty(train: Dataset, columns: Columns, path: str) -> None:
    """Refuses a training set without a text: there is nothing in it to learn from.

    Args:
        train: the training set, as `take_columns` makes it.
        columns: which columns it was taken from.
        path: its name.

    Raises:
        ValueError: it is such a set.
    """
    keys = TEXT_KEYS[: len(columns.texts)]
    if not any(row[key].strip() for row in train for key in keys):  # of most files the first row
        raise _empty_in_each_row(path, columns.texts)


def check_classes(train: Dataset, labels: Sequence[str], columns: Columns, path: str) -> None:
    """Refuses classes of a training set that are texts, and warns of what may be a slip.

    Args:
        train: the training set, as `take_columns` makes it.
        labels: its classes.
        columns: which columns it was taken from.
        path: its name.

    Raises:
        ValueError: labels are most rows' own, and texts are few, as where these columns are
            swapped.
    """
    if len(labels) > len(train) / 2:
        counts = f"{len(labels):,} classes in {len(train):,} rows"
        texts = len(train.unique(TEXT_KEYS[0]))
        if len(labels) >= 10 * texts and len(columns.texts) == 1:
            raise ValueError(
                f"{path}: {columns.label} has {counts}, and {columns.texts[0]} {texts} values: "
                f"if they are swapped, give --text_columns {columns.label} --label_column "
                f"{columns.texts[0]}"
            )
        logger.warning("%s: %s; is %s its label?", path, counts, columns.label)
    numbers = [label for label in labels if _is_finite(label)]
    words = [label for label in labels if not _is_finite(label)]
    if numbers and words:
        logger.warning(
            "%s: labels are numbers (%s) and words (%s): each is a class; if some are one, write "
            "them alike",
            *(path, in_short(numbers, width=70), in_short(words, width=70)),
        )
    _warn_of_spellings(labels, path)


def _warn_of_spellings(labels: Sequence[str], path: str) -> None:
    """Warns of labels that differ in nothing but blanks and capitals."""
    spellings: dict[str, list[str]] = {}
    for label in labels:
        spellings.setdefault(" ".join(label.split()).casefold(), []).append(label)
    for several in spellings.values():
        if len(several) > 1:
            listed = quoted(several)
            logger.warning("%s: %s are classes of their own; are they one?", path, listed)


def label_names(train: Dataset | None, known: Sequence[str]) -> tuple[str, ...]:
    """The classes in the model's order, or, where the training set has others, sorted.

    Args:
        train: the training set, as `take_columns` makes it; None where there is none.
        known: the classes that the model was trained for.
    """
    if train is None:
        return tuple(known)
    values = train.unique(LABEL)
    if {str(value) for value in values} <= set(known):
        return tuple(known)
    return tuple(str(value) for value in sorted(values))


def number_labels(data: Dataset, labels: tuple[str, ...], path: str) -> Dataset:
    """The table with classes as numbers.

    Raises:
        ValueError: a row has another class.
    """
    from datasets import ClassLabel

    numbers = {label: number for number, label in enumerate(labels)}
    words = [str(label) for label in data[LABEL][:]]
    for row, word in enumerate(words):
        if word not in numbers:
            raise ValueError(
                f"{path}: row {row + 1}: unknown label '{word:.60}' (expected {in_short(labels)})"
            )
    numbered = data.remove_columns(LABEL).add_column(LABEL, [numbers[word] for word in words])
    return numbered.cast_column(LABEL, ClassLabel(names=list(labels)))
