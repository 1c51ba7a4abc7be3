"""What a run starts from, an adapter or a model, and whether it fits the run's data."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from loralib.adapters.adapter import Adapter
from loralib.adapters.metadata import default_labels
from loralib.text import in_short

from ..configuration_utils import PretrainedConfig
from .arguments import AdaptedModelArguments

logger = logging.getLogger(__name__)

# For error messages: the flags to add if a base model alone cannot be evaluated.
WITH_ADAPTER = "--apply_lora --lora_path with an adapter"


@dataclass(frozen=True)
class StartingPoint:
    """The trained adapter or model that a run starts from, and what it says of its training.

    Args:
        source: the adapter's file, or the model's name.
        labels: its classes' names, in order; empty if it does not name them.
        task: the task it was trained for, if known.
        texts: the text columns of its training data, if known.
        outputs: the number of outputs of its head, or of the model's head if an adapter has none.
            With 1, the head predicts a score.
        is_adapter: whether it is an adapter's file.
    """

    source: str
    labels: tuple[str, ...]
    task: str | None
    texts: tuple[str, ...]
    outputs: int
    is_adapter: bool

    def check_named(self, what: str = "labels") -> None:
        """Checks that the classes have names. Called if the data does not name them.

        Args:
            what: the task's word for classes, such as "tags".

        Raises:
            ValueError: the classes have no names.
        """
        if not self.labels:
            way_out = "the --train_file that it was trained on as well"
            if not self.is_adapter:
                way_out = f"{WITH_ADAPTER} where it is a base, else {way_out}"
            raise ValueError(f"{self.source} does not name its {what}; give {way_out}")

    def check_task(self, task: str | None, training: bool) -> None:
        """Refuses to evaluate a head on another task; training may start from it, with a warning.

        Raises:
            ValueError: the task is another one, and the head is not to be trained.
        """
        if not task or not self.task or task == self.task:
            return
        if not training:
            raise ValueError(f"{self.source} was trained for {self.task}, not for {task}")
        logger.warning(
            "%s was trained for %s: training on %s starts from it", self.source, self.task, task
        )

    def order_of(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Maps the data's labels to the head's outputs, whatever their order and case.

        Returns:
            For each label, the number of its output; () if the labels are not the head's classes,
            or the head does not name its classes.
        """
        own, others = ([name.casefold() for name in names] for names in (self.labels, labels))
        if not own or sorted(own) != sorted(others) or len({*own}) < len(own):
            return ()
        return tuple(own.index(name) for name in others)

    def check_labels(self, labels: tuple[str, ...], training: bool) -> None:
        """Refuses to evaluate a head on classes that it was not trained for.

        Training on other classes starts from the head if it has as many outputs, with a warning.

        Raises:
            ValueError: the classes or their order differ, and the head is not to be trained.
        """
        if not self.labels or not labels or self.labels == labels:
            return
        theirs, ours = _labels_beside(self.labels, labels), _labels_beside(labels, self.labels)
        if not training:
            raise ValueError(
                f"{self.source} was trained for the labels {theirs}; the data has {ours}"
            )
        if len(self.labels) == len(labels):
            logger.warning(
                "%s was trained for the labels %s: its head is now trained for %s",
                *(self.source, theirs, ours),
            )

    def check_texts(self, columns: Sequence[str], training: bool) -> None:
        """Refuses to evaluate a head on text columns that differ from those of its training.

        For instance, a head trained on single sentences is not evaluated on pairs. Columns with
        other names are accepted, and logged, if there are as many.

        Args:
            columns: the data's text columns, in the order in which the model reads them.
            training: whether the head is to be trained on them.

        Raises:
            ValueError: their number differs from that of the training, or one of the training's
                columns is in another one's place.
        """
        if not self.texts or training or tuple(columns) == self.texts:
            return
        moved = any(
            name in self.texts and name != own
            for name, own in zip(columns, self.texts, strict=False)
        )
        if len(columns) == len(self.texts) and not moved:
            pairs = zip(columns, self.texts, strict=True)
            listed = ", ".join(f"{name} as {own}" for name, own in pairs if name != own)
            level = logging.WARNING if len(columns) > 1 else logging.INFO
            logger.log(level, "%s reads %s", self.source, listed)
            return
        raise ValueError(
            f"{self.source} was trained on rows of {' and '.join(self.texts)}, not of "
            f"{' and '.join(columns)}; in your own files, name the texts with --text_columns"
        )


def starting_point_of(
    model_args: AdaptedModelArguments, config: PretrainedConfig, adapters: Sequence[Adapter]
) -> StartingPoint:
    """Returns what a run starts from: the first adapter or, without one, the model."""
    metadata = next((adapter.metadata for adapter in adapters if adapter.metadata), None)
    names = metadata.labels if metadata and metadata.labels else config.label_names
    texts = metadata.text_columns if metadata else config.text_columns
    return StartingPoint(
        source=adapters[0].source if adapters else model_args.model_name_or_path,
        labels=() if names == default_labels(len(names)) else names,
        task=metadata.task if metadata else config.finetuning_task,
        texts=tuple(texts or ()),
        is_adapter=bool(adapters),
        outputs=(adapters[0].outputs if adapters else None) or config.num_labels,
    )


def _labels_beside(labels: Sequence[str], others: Sequence[str]) -> str:
    """Formats labels for a message.

    Long lists are shortened, so they begin with the labels that `others` lack.
    """
    ordered = labels if len(labels) <= 10 else sorted(labels, key={*others}.__contains__)
    return in_short(ordered, width=120)
