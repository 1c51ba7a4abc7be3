"""Chooses the columns of texts and labels in the user's files, and checks that each row has them.

`choose_columns` says which columns a run uses. `take_columns` returns these under the names
``text``, ``text_pair`` and ``label``.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loralib.text import in_short, quoted

from .csv_rows import open_csv
from .json_rows import KINDS, difference_in_kind, json_rows

if TYPE_CHECKING:  # else imported where a file is read: --help and wrong flags need not wait for it
    from datasets import Dataset

logger = logging.getLogger(__name__)

LABEL = "label"
TEXT_KEYS = ("text", "text_pair")
# The types of columns of texts.
STRINGS = ("string", "large_string")
# Names of columns that identify rows and are not their texts or labels.
_IDENTIFIER = re.compile(r"(.*[-_ .])?(id|ids|idx|index|guid|uid|uuid|unnamed: \d+)", re.IGNORECASE)
# A column with at most this many different values, each ten times or more on average, may hold
# names rather than texts.
_FEW = 10
# A JSON file's only object, if it has more keys than this and no label, holds a value of each row.
_MOST_OF_A_ROW = 20
# The names of a pair of texts in most of GLUE's files.
_PAIR = ["sentence1", "sentence2"]
# How tables mark a number, or a label, that is missing.
_MISSING = ("na", "n/a", "nan", "none", "null", "-", "?")
_DECIMAL_COMMA = re.compile(r"\s*-?\d+,\d+\s*")


@dataclass(frozen=True)
class Columns:
    """The columns of its files that a run uses.

    Args:
        texts: names of the one or two text columns.
        label: name of the label's column.
    """

    texts: tuple[str, ...]
    label: str = LABEL


def choose_columns(
    data: Dataset,
    path: str,
    texts: Sequence[str] | None = None,
    label: str = LABEL,
    known_texts: Sequence[str] = (),
    known_labels: Sequence[str] = (),
    labeled: bool = False,
) -> Columns:
    """Returns the columns of texts: those asked for, or those that can be nothing else.

    If none are asked for, it takes those that the model was trained on, or sentence1 and sentence2,
    or one or two columns of strings other than the label's: no numbers, and no column that is named
    like an identifier.

    Args:
        data: the file's rows.
        path: its name.
        texts: the columns asked for, one or two.
        label: the label's column.
        known_texts: the text columns that the model was already trained on, if it records them.
        known_labels: the classes that it was trained on.
        labeled: whether `take_columns` will take the label as well.

    Raises:
        ValueError: a column asked for is missing or asked for twice; the choice is ambiguous; or
            every value of a column that would be a text is one of the model's classes, and there is
            no label column.
    """
    if texts is not None:
        _check_asked_for(data, path, texts, label)
        return Columns(tuple(texts), label)
    others = [name for name in data.column_names if name != label]
    by_name = {name.strip().lower(): name for name in others}
    if known_texts and all(name.strip().lower() in by_name for name in known_texts):
        exact = {*known_texts} <= {*others}
        own = known_texts if exact else [by_name[name.strip().lower()] for name in known_texts]
        return Columns(tuple(own), label)
    found = _find_texts(data, path, others, label, known_texts)
    # If the label's column is there, or is asked for by name, the first line does hold names.
    if path.endswith(".csv") and label == LABEL and label not in data.column_names:
        _check_names(path, found, known_texts)
    # Columns of mixed types are left out here; `take_columns` refuses them.
    of_texts = [n for n in found if getattr(data.features[n], "dtype", None) in STRINGS]
    for name in of_texts if label not in data.column_names else ():
        if {*data.unique(name)} - {None, ""} <= {*known_labels}:
            missing = [text for text in known_texts if text.strip().lower() not in by_name]
            lacks = f"lacks {quoted(missing)}, which the model was trained on, and "
            raise ValueError(
                f"{path}: {lacks if missing else ''}each value of '{name}' is one of the "
                f"model's classes: if it is the label, give --label_column {name}; if it is a "
                "text, name all texts with --text_columns"
            )
    if labeled:  # first, as one of these texts may be the label
        _check_has_label(data, path, Columns(tuple(found), label))
    words = [] if found == _PAIR else [n for n in of_texts if _is_of_words(data, n)]
    for name in of_texts:
        _warn_of_few(data, path, name, is_of_words=name in words and len(words) < len(found))
    return Columns(tuple(found), label)


def _check_asked_for(data: Dataset, path: str, texts: Sequence[str], label: str) -> None:
    if not 1 <= len(texts) <= 2 or len({*texts, label}) <= len(texts):
        raise ValueError(
            "--text_columns takes one or two different columns, not including the labels' column "
            f"('{label}'); given: {', '.join(texts)}"
        )
    for name in texts:
        _check_has(data, path, name, "text_columns")


def _find_texts(
    data: Dataset, path: str, names: Sequence[str], label: str, known_texts: Sequence[str]
) -> list[str]:
    """Returns the one or two columns, beside the label's, that can be nothing but texts.

    Args:
        data, path: the file.
        names: its columns, without the label's.
        label: the label's column.
        known_texts: the text columns that the model was trained on, not all of which are there.

    Raises:
        ValueError: there are none, or more than two.
    """
    reasons = {name: why_no_text(data, name) for name in names}
    found = [name for name, reason in reasons.items() if reason is None]
    if {*_PAIR} <= {*found}:
        return _PAIR
    if 1 <= len(found) <= 2:
        return found
    _refuse_object_of_rows(data, path, label)
    if not found:
        _refuse_unusable(data, path, names)
    passed = [f"{name} is {reason}" for name, reason in reasons.items() if reason]
    needed = (
        f"one or two are needed in addition to '{label}', or sentence1 and sentence2: name them "
        "with --text_columns"
    )
    if known_texts:
        needed = (
            f"the model was trained on {quoted(known_texts)}: rename the columns that are meant, "
            "or name them with --text_columns"
        )
    raise ValueError(
        f"{path}: has {len(found)} text columns ({in_short(found or passed) or 'none'}); {needed}"
    )


def _check_names(path: str, texts: Sequence[str], known_texts: Sequence[str]) -> None:
    """Checks that a CSV file's names of text columns are not texts; warns if they may be.

    Args:
        path: the file.
        texts: the names.
        known_texts: the text columns that a model was already trained on, if it records them.

    Raises:
        ValueError: a name looks like a text.
    """
    for name in texts:
        if _looks_like_a_text(name):
            raise ValueError(
                f"{path}: the name of its column '{name:.60}' looks like a text: the first line "
                f"has to name the columns, as in text,{LABEL}; where it does, name the texts with "
                "--text_columns"
            )
    if known_texts and any(" " in name for name in texts):
        logger.warning(
            "%s: its first line is taken for column names: %s; if that is a row, write the names "
            "in a line before it: %s",
            *(path, quoted(texts), ",".join(known_texts)),
        )


def _is_of_words(data: Dataset, name: str) -> bool:
    """Returns whether a column of strings has one word in each row, except empty ones."""
    values = [value for value in data[name][:] if value]
    return bool(values) and all(len(value.split()) == 1 for value in values)


def _warn_of_few(data: Dataset, path: str, name: str, is_of_words: bool) -> None:
    """Warns of a column that may not be one of texts, such as the names of numbered labels.

    Args:
        data, path: the file.
        name: the column.
        is_of_words: it has one word in each row, as dates, URLs and user names do, and another
            column has more.
    """
    values = [str(value) for value in data.unique(name)]
    is_few = len(values) <= _FEW and len(data) >= 10 * len(values)
    if is_few or is_of_words:
        count = f"{len(values):,} values in {len(data):,} rows" if is_few else "single words"
        logger.warning(
            "%s: %s is taken for text, but has %s (%s): if it is not text, name the texts with "
            "--text_columns",
            *(path, name, count, in_short(values, width=60)),
        )


def _refuse_object_of_rows(data: Dataset, path: str, label: str) -> None:
    """Checks that a JSON file is not one object that holds all rows, as columns or by their names.

    Raises:
        ValueError: it is: all of the object's values are lists or objects; or there are many, and
            none is a label.
    """
    if path.endswith(".csv") or len(data) != 1:
        return
    row = data[0]
    of_columns = len(row) > 1 and all(isinstance(value, list | dict) for value in row.values())
    if of_columns or (label not in row and len(row) > _MOST_OF_A_ROW):
        raise ValueError(
            f"{path}: is one object of {len(row):,} keys ({in_short(row, width=60)}), which is "
            f'read as one row: write one object per row, such as {{"text": "…", "{label}": "…"}}'
            f"{'' if of_columns else '; if it is one row, name its texts with --text_columns'}"
        )


def _refuse_unusable(data: Dataset, path: str, names: Sequence[str]) -> None:
    """Raises an error that says what to do, if no column can be one of texts even if asked for.

    Raises:
        ValueError: all columns except identifiers hold lists of words, or are empty.
    """
    words, empty = [], []
    for name in names:
        if _IDENTIFIER.fullmatch(name):
            continue
        values = [value for value in data[name][:] if value not in (None, "", [])]
        if not values:
            empty.append(name)
        elif all(map(are_words, values)):
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


def are_words(value: Any) -> bool:
    """Returns whether a row's value is a list of words."""
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _empty_in_each_row(path: str, names: Sequence[str]) -> ValueError:
    columns = f"{' and '.join(names):.200}"
    return ValueError(f"{path}: no row has a text in {columns}, so there is nothing to read")


def why_no_text(data: Dataset, name: str) -> str | None:
    """Returns why a column is not taken for text unless asked for; None if it is."""
    from datasets import Value

    if _IDENTIFIER.fullmatch(name):
        return "named as an identifier"
    feature = data.features[name]
    if isinstance(feature, Value) and feature.dtype not in STRINGS:
        return f"of {feature.dtype}"
    values = [value for value in data[name][:] if value not in (None, "")]
    if not any(isinstance(value, str) for value in values):
        return f"{KINDS.get(type(values[0]), 'not a string')} in each row" if values else "empty"
    if all(isinstance(value, str) and is_number(value) for value in values):
        return "all numbers"
    return None


def _looks_like_a_text(name: str) -> bool:
    """Returns whether a column's name may be a row's text, in a file without a line of names."""
    return len(name.split()) > 3


def is_number(text: str) -> bool:
    """Returns whether Python can read a value as a number, which may be nan or inf."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_has(data: Dataset, path: str, name: str, flag: str, is_first: bool = True) -> None:
    names = data.column_names
    if name in names:
        return
    raw = path.endswith(".csv") and any(is_number(n) or _looks_like_a_text(n) for n in names)
    hint = " (the first line has to name the columns)" if raw else ""
    way_out = f"--{flag} has to name one of them"
    if not is_first:  # the flag is for all files, and the first one has the column
        way_out = f"rename the one that is meant to '{name}' in this file"
    raise ValueError(
        f"{path}: has no column '{name}'; its columns are {quoted(names)}{hint}: {way_out}"
    )


def take_columns(
    data: Dataset, path: str, columns: Columns, labeled: bool = True, is_first: bool = True
) -> Dataset:
    """Returns a run's columns under this module's names, after checking that each row has them.

    Args:
        data: the rows of a file.
        path: its name.
        columns: the columns to return.
        labeled: take the label as well.
        is_first: whether the columns were chosen from this file, not from another one.

    Raises:
        ValueError: a column is missing; a row has no value, or one that is not a text or a label.
    """
    names = dict(zip(columns.texts, TEXT_KEYS, strict=False))
    texts = {}
    for name in columns.texts:
        _check_has(data, path, name, "text_columns", is_first)
        texts[name] = _as_written(data, path, name)
        _check_texts(texts[name], path, name)
    warn_of_empty_texts(path, texts)
    if labeled:
        names[columns.label] = LABEL
        _check_has_label(data, path, columns, is_first)
        _check_labels(data, path, columns.label)
    return select_and_rename(data, names)


def select_and_rename(data: Dataset, names: Mapping[str, str]) -> Dataset:
    """Returns a table's columns under other names: {old: new}."""
    # In one step, as one column's old name may be another's new one.
    renamed = {old: new for old, new in names.items() if old != new}
    return data.select_columns(list(names)).rename_columns(renamed)


def _check_has_label(data: Dataset, path: str, columns: Columns, is_first: bool = True) -> None:
    if not any(_may_be_label(name, columns) for name in data.column_names):
        raise ValueError(
            f"{path}: has no column '{columns.label}', only its text's, "
            f"'{columns.texts[0]}'; to predict labels, give it as --test_file, with "
            "--do_predict"
        )
    _check_has(data, path, columns.label, "label_column", is_first)


def _may_be_label(name: str, columns: Columns) -> bool:
    """Returns whether a column may be the label: no identifier, and not the only text."""
    return not _IDENTIFIER.fullmatch(name) and (name,) != columns.texts


def _as_written(data: Dataset, path: str, name: str) -> list[Any]:
    """Returns a column's values as the file has them.

    In a JSON file's column of mixed types, the library reads a text such as "1" as the number 1, so
    such a column is read again.
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
            raise ValueError(f"{path}: row {row}: has no '{name}'")
        if not isinstance(value, str):
            kind = KINDS.get(type(value), f"of the type {type(value).__name__}")
            shown = json.dumps(value, ensure_ascii=False, default=str)
            hint = ": write its words as one text" if are_words(value) else ""
            raise ValueError(
                f"{path}: row {row}: its {name} is {kind}, not a text ({shown:.40}){hint}"
            )


def warn_of_empty_texts(path: str, columns: Mapping[str, Sequence[str]]) -> None:
    """Warns of rows whose text is empty or blank: says how many there are, and names the first.

    Args:
        path: the file.
        columns: column -> its texts.
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
        # Only NaN differs from itself.
        if value is None or value != value or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"{path}: row {row}: has no '{name}'")
        if not isinstance(value, str | int | float):
            kind = KINDS.get(type(value), f"of the type {type(value).__name__}")
            raise ValueError(f"{path}: row {row}: its {name} is {kind}, not a class or a score")
        if isinstance(value, float):
            _check_finite(value, row, path, name)
    if not isinstance(data.features[name], Value):
        _refuse_kinds(values, path, name)
    _check_numbers(values, path, name)
    if path.endswith(".csv") and "int" in data.features[name].dtype:
        _check_numerals(path, name)


def _check_finite(score: float, row: int, path: str, name: str) -> None:
    if math.isinf(score):
        raise ValueError(f"{path}: row {row}: its {name} is {score}: a score has to be finite")


def _refuse_kinds(values: Sequence[Any], path: str, name: str) -> None:
    first = KINDS[type(values[0])]
    row = next((row for row, v in enumerate(values) if KINDS[type(v)] != first), 0)
    differing = difference_in_kind(name, values[row], "row 1", values[0])
    raise ValueError(f"{path}: row {row + 1}: {differing}")


def _check_numerals(path: str, name: str) -> None:
    """Checks that no label in a CSV file is a number in an unusual form, as 007 is."""
    with open_csv(path) as file:
        names, *rows = filter(None, csv.reader(file))  # pandas skips empty lines
    place = names.index(name)
    texts = ["".join(row[place : place + 1]).strip() for row in rows]
    for row, text in enumerate(texts, start=1):
        if re.fullmatch(r"[+-]?\d+", text) and text != str(int(text)):
            raise ValueError(
                f"{path}: row {row}: its {name} is {text}, which would be read as {int(text)}: "
                f"write {int(text)}, or give the classes names that are not numbers"
            )


def _check_numbers(values: Sequence[Any], path: str, name: str) -> None:
    """Checks that no word stands for a missing number, which would make each number a class.

    It also checks that numbers are finite, and have no decimal commas.
    """
    words = {value for value in values if isinstance(value, str)}
    missing = {word for word in words if may_be_missing(word)}
    if missing and words != missing and all(map(is_number, words - missing)):
        row = next(row for row, value in enumerate(values, start=1) if value in missing)
        raise ValueError(
            f"{path}: row {row}: its {name} is '{values[row - 1]}', where others are numbers: "
            "leave the row out"
        )
    # pandas before 3 keeps a column as text if a number in it is too large, such as 1e999.
    if path.endswith(".csv") and words and all(map(is_number, words)):
        for row, value in enumerate(values, start=1):
            _check_finite(float(value), row, path, name)
    if words and all(map(_DECIMAL_COMMA.fullmatch, words)):
        raise ValueError(f"{path}: {name} has decimal commas ({values[0]}): write points")


def may_be_missing(label: str) -> bool:
    """Returns whether a label is a mark for a missing one."""
    return label.strip().lower() in _MISSING


def check_not_empty(train: Dataset, columns: Columns, path: str) -> None:
    """Checks that not all texts of a training set are empty; else there is nothing to learn from.

    Args:
        train: the training set, as `take_columns` returns it.
        columns: the columns that it was taken from.
        path: its name.

    Raises:
        ValueError: all of its texts are empty.
    """
    keys = TEXT_KEYS[: len(columns.texts)]
    if not any(row[key].strip() for row in train for key in keys):  # mostly, the first row has one
        raise _empty_in_each_row(path, columns.texts)
