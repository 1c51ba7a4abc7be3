"""Reads the user's own files of labeled texts, and converts their labels to numbers.

A row has one or two texts and a label: {"text": "A fine film.", "label": "positive"}.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loralib.text import quoted

from ..data.processors import GlueTask
from ..data.text_columns import (
    LABEL,
    TEXT_KEYS,
    Columns,
    check_not_empty,
    choose_columns,
    take_columns,
)
from ..data.text_files import read_table
from ..data.text_labels import (
    as_scores,
    check_classes,
    check_varied,
    is_score,
    label_names,
    number_labels,
    whole_scores,
)
from .starting_point import StartingPoint

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset

logger = logging.getLogger(__name__)


@dataclass
class TextData:
    """Texts by split, with labels as numbers.

    Args:
        splits: the splits by name. Their columns are the text columns and, if there are labels,
            ``label``.
        text_keys: the names of the text columns, one or two.
        labels: the names of the classes, in the order of their numbers; empty for scores.
        columns: the original names of the text columns.
        task: the GLUE task, or None for the user's own files.
    """

    splits: dict[str, Dataset]
    text_keys: tuple[str, ...]
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    task: GlueTask | None = None

    @property
    def is_regression(self) -> bool:
        """Whether labels are scores."""
        return not self.labels


def load_own_files(
    files: Mapping[str, str | None],
    splits: Sequence[str],
    texts: Sequence[str] | None,
    label: str | None,
    origin: StartingPoint,
    cache_dir: str | None,
) -> TextData:
    """Loads the user's own CSV or JSON files.

    Args:
        files: the files by split.
        splits: the splits that are needed.
        texts: the text columns that are asked for, one or two; None for those that can be nothing
            else.
        label: the label's column; None for "label".
        origin: the adapter or model that the run starts from. If it is trained, its classes keep
            their order, and the names of its text columns tell which columns to read.
        cache_dir: folder for the tables made of the files; None for the default.
    """
    for split in splits:
        if files[split] is None:
            raise ValueError(f"this run needs --{split}_file")
    label = label or LABEL
    first = files[splits[0]]
    # Training may start from a model that was trained on other columns.
    known = () if "train" in splits else origin.texts
    if label in known:
        raise ValueError(
            f"{origin.source} was trained on the texts of '{label}': give another name for "
            "the labels' column with --label_column, even if the file has no labels"
        )
    table = read_table(first, texts or known, cache_dir)
    has_labels = splits[0] != "test"
    columns = choose_columns(table, first, texts, label, known, origin.labels, has_labels)

    def read(split: str) -> Dataset:
        table = read_table(files[split], columns.texts, cache_dir)
        # A test set's labels, if any, are not used.
        return take_columns(table, files[split], columns, split != "test", split == splits[0])

    sets = {split: read(split) for split in splits}
    labeled = {split: data for split, data in sets.items() if split != "test"}
    if "train" not in sets and not origin.labels and files["train"] is not None:
        # The model does not name its classes, so their order is taken from its training set.
        labeled["train"] = read("train")
    if "train" in sets:
        check_not_empty(sets["train"], columns, files["train"])
        check_varied(sets["train"], files["train"])
    numbered, labels = _numbered(labeled, files, columns, origin, is_training="train" in sets)
    sets |= {split: data for split, data in numbered.items() if split in sets}
    what = f"classes {quoted(labels)}" if labels else "scores"
    logger.info(
        "%s: texts from %s%s",
        first,
        " and ".join(columns.texts),
        f"; labels from {label}: {what}" if labeled else "",
    )
    return TextData(sets, TEXT_KEYS[: len(columns.texts)], labels, columns.texts)


def _numbered(
    labeled: dict[str, Dataset],
    files: Mapping[str, str],
    columns: Columns,
    origin: StartingPoint,
    is_training: bool,
) -> tuple[dict[str, Dataset], tuple[str, ...]]:
    """Returns the labeled splits with numbers as labels, and the classes' names (none for scores).

    Args:
        labeled: the splits with labels by name, as they were read.
        files: the splits' files.
        columns: the files' columns that were read.
        origin: the adapter or model that the run starts from.
        is_training: whether the run trains, so that it may get a new head. Otherwise the labels
            have to fit the existing head.

    Raises:
        ValueError: some labels are classes and others are scores, they do not fit the head, the
            classes' names are unknown, or labels and texts seem to be swapped (see
            `check_classes`).
    """
    if not is_training and origin.outputs == 1:
        return {split: as_scores(data, files[split]) for split, data in labeled.items()}, ()
    scores = {split: is_score(data) for split, data in labeled.items()}
    whole = _whole_numbers(data for data in labeled.values() if is_score(data))
    if len(set(scores.values())) > 1:
        kinds = ("classes", "scores")
        listed = ", ".join(f"{kinds[of_scores]} in {files[s]}" for s, of_scores in scores.items())
        way_out = (
            _without_points(whole) or "; if all are scores, write them with a point, as in 1.0"
        )
        raise ValueError(f"some labels are classes and others are scores: {listed}{way_out}")
    if any(scores.values()):
        if not is_training:
            raise ValueError(
                f"{origin.source} has a head of {origin.outputs} classes, but the data's labels "
                f"are scores{_without_points(whole)}"
            )
        if origin.outputs != 1:  # a head with one output was already trained for scores
            _tell_whole_scores(whole, files["train"])
        return labeled, ()
    labels = label_names(labeled.get("train"), origin.labels)
    if not labels:
        origin.check_named()
    if is_training and labels != origin.labels:  # skipped if the head was trained for these
        check_classes(labeled["train"], labels, columns, files["train"])
    numbered = {s: number_labels(data, labels, files[s]) for s, data in labeled.items()}
    return numbered, labels


def _whole_numbers(scored: Iterable[Dataset]) -> list[float]:
    """Returns the distinct scores of all sets if they are all whole numbers, else []."""
    sets = [whole_scores(data) for data in scored]
    return sorted(set().union(*sets)) if all(sets) else []


def _without_points(whole: Sequence[float]) -> str:
    """Returns the advice to write classes without a decimal point; "" if `whole` is empty."""
    listed = ", ".join(f"{value:.0f}" for value in whole[:3])
    return f"; if they are classes, write them without a point, as in {listed}" if whole else ""


def _tell_whole_scores(whole: Sequence[float], path: str) -> None:
    """Logs that labels such as 0.0 and 1.0 are taken for scores.

    For two values, and for 0.0, 1.0, 2.0, it is a warning. They may be classes from a table that
    had missing values when it was saved, which adds a decimal point to whole numbers.
    """
    if not whole:
        return
    listed = ", ".join(map(str, whole[:3])) + (", …" if len(whole) > 3 else "")
    may_be_classes = len(whole) == 2 or whole == [0, 1, 2]
    logger.log(
        logging.WARNING if may_be_classes else logging.INFO,
        "%s: the labels %s are taken for scores%s",
        *(path, listed, _without_points(whole)),
    )
