"""The labels of the user's files: scores, or classes and their numbers; and what may be a slip.

The tables are those that `take_columns` makes.
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
    """A table, as `take_columns` makes it, with its labels as scores, which whole numbers may be.

    Raises:
        ValueError: a label is a word.
    """
    from datasets import Value

    if not is_score(data) and data.features[LABEL].dtype in STRINGS:
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
            "%s: labels are numbers (%s) and words (%s): each is a class; if some mean the same, "
            "write them alike",
            *(path, in_short(numbers, width=70), in_short(words, width=70)),
        )
    else:
        _warn_of_missing(train, path)
    _warn_of_spellings(labels, path)


def _warn_of_missing(train: Dataset, path: str) -> None:
    """Warns of words that stand for a missing label, but for those that classes are called by."""
    values = [str(value) for value in train[LABEL][:]]
    missing = [v for v in values if may_be_missing(v) and v.strip().lower() not in ("none", "-")]
    if missing:
        logger.warning(
            "%s: the label of %d rows is '%s', row %d first, which counts as a class: if it means "
            "no label, leave the rows out",
            *(path, values.count(missing[0]), missing[0], values.index(missing[0]) + 1),
        )


def _is_finite(text: str) -> bool:
    """Whether a label is a number; nan and inf are words as others."""
    return is_number(text) and math.isfinite(float(text))


def _warn_of_spellings(labels: Sequence[str], path: str) -> None:
    """Warns of labels that differ in nothing but blanks and capitals."""
    spellings: dict[str, list[str]] = {}
    for label in labels:
        spellings.setdefault(" ".join(label.split()).casefold(), []).append(label)
    for several in spellings.values():
        if len(several) > 1:
            listed = quoted(several)
            logger.warning("%s: %s are separate classes; do they mean the same?", path, listed)


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
