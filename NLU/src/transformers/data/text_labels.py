"""Converts the labels of the user's files to scores or class numbers, and warns of mistakes.

The tables are those that `take_columns` returns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loralib.text import in_short, quoted

from .text_columns import LABEL, STRINGS, TEXT_KEYS, Columns, is_number, may_be_missing

if TYPE_CHECKING:  # else imported where a file is read: --help and wrong flags need not wait for it
    from datasets import Dataset

logger = logging.getLogger(__name__)


def as_scores(data: Dataset, path: str) -> Dataset:
    """Returns the table with its labels as scores; integers are scores as well.

    Raises:
        ValueError: a label is a word.
    """
    from datasets import Value

    if not is_score(data) and data.features[LABEL].dtype in STRINGS:
        raise ValueError(f"{path}: the labels are words, and the model gives scores")
    return data.cast_column(LABEL, Value("float64"))


def is_score(data: Dataset) -> bool:
    """Returns whether the labels of a table are scores rather than classes."""
    return str(getattr(data.features[LABEL], "dtype", "")).startswith("float")


def whole_scores(data: Dataset) -> list[float]:
    """Returns a table's scores, each once, if all of them are whole numbers; else []."""
    values = sorted(data.unique(LABEL)) if is_score(data) else []
    return values if all(value.is_integer() for value in values) else []


def check_varied(train: Dataset, path: str) -> None:
    """Checks that a training set has more than one label; else there is nothing to learn.

    Raises:
        ValueError: all rows have the same label.
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


def check_classes(train: Dataset, labels: Sequence[str], columns: Columns, path: str) -> None:
    """Checks that the classes of a training set are not its texts, and warns of likely mistakes.

    Args:
        train: the training set.
        labels: its classes.
        columns: the columns that it was taken from.
        path: its name.

    Raises:
        ValueError: most rows have a label of their own, and texts are few, as if the two columns
            were swapped.
    """
    if len(labels) > len(train) / 2:
        counts = f"{len(labels):,} classes in {len(train):,} rows"
        texts = len(train.unique(TEXT_KEYS[0]))
        if len(labels) >= 10 * texts and len(columns.texts) == 1:
            raise ValueError(
                f"{path}: {columns.label} has {counts}, but {columns.texts[0]} has {texts} values: "
                f"if they are swapped, give --text_columns {columns.label} --label_column "
                f"{columns.texts[0]}"
            )
        logger.warning("%s: %s; is %s its label?", path, counts, columns.label)
    numbers = [label for label in labels if is_finite(label)]
    words = [label for label in labels if not is_finite(label)]
    commas = [word for word in words if is_finite(word.replace(",", ".", 1))]
    if commas and commas == words:
        logger.warning(
            "%s: %s are words, so each is a class: if they are scores, write a decimal point, "
            "no comma",
            *(path, in_short(commas, width=70)),
        )
    elif numbers and words:
        logger.warning(
            "%s: labels are numbers (%s) and words (%s): each is a class; if some mean the same, "
            "write them alike",
            *(path, in_short(numbers, width=70), in_short(words, width=70)),
        )
    elif fractions := [number for number in numbers if not float(number).is_integer()]:
        logger.warning(
            "%s: %s are texts, so each is a class: if they are scores, write them without quotes",
            *(path, in_short(fractions, width=70)),
        )
    else:
        _warn_of_missing(train, path)
    _warn_of_spellings(labels, path)


def _warn_of_missing(train: Dataset, path: str) -> None:
    """Warns of words that may mean a missing label, except "none" and "-", which name classes."""
    values = [str(value) for value in train[LABEL][:]]
    missing = [v for v in values if may_be_missing(v) and v.strip().lower() not in ("none", "-")]
    if missing:
        logger.warning(
            "%s: the label of %d rows is '%s', row %d first, which counts as a class: if it means "
            "no label, leave the rows out",
            *(path, values.count(missing[0]), missing[0], values.index(missing[0]) + 1),
        )


def is_finite(text: str) -> bool:
    """Returns whether a label is a finite number; nan and inf count as words."""
    return is_number(text) and math.isfinite(float(text))


def _warn_of_spellings(labels: Sequence[str], path: str) -> None:
    """Warns of labels that differ only in spaces and capital letters."""
    spellings: dict[str, list[str]] = {}
    for label in labels:
        spellings.setdefault(" ".join(label.split()).casefold(), []).append(label)
    for several in spellings.values():
        if len(several) > 1:
            listed = quoted(several)
            logger.warning("%s: %s are separate classes; do they mean the same?", path, listed)


def label_names(train: Dataset | None, known: Sequence[str]) -> tuple[str, ...]:
    """Returns the model's classes, or, if the training set has others, its classes, sorted.

    Args:
        train: the training set, or None.
        known: the classes that the model was trained for, in its order.
    """
    if train is None:
        return tuple(known)
    values = train.unique(LABEL)
    if {str(value) for value in values} <= set(known):
        return tuple(known)
    return tuple(str(value) for value in sorted(values))


def number_labels(data: Dataset, labels: tuple[str, ...], path: str) -> Dataset:
    """Returns the table with its classes as numbers.

    Raises:
        ValueError: a row has another class.
    """
    from datasets import ClassLabel

    numbers = {label: number for number, label in enumerate(labels)}
    words = [str(label) for label in data[LABEL][:]]
    for row, word in enumerate(words):
        if word not in numbers:
            raise ValueError(
                f"{path}: row {row + 1}: unknown label '{word:.60}' (expected {quoted(labels)})"
            )
    numbered = data.remove_columns(LABEL).add_column(LABEL, [numbers[word] for word in words])
    return numbered.cast_column(LABEL, ClassLabel(names=list(labels)))
