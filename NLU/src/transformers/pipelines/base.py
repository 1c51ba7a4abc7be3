"""What all pipelines share: from texts to rows of ids, and from those to what a model says of them.

    texts ─ encode ─> rows of ids ─ forward ─> rows of numbers, in the texts' order ─ …

Batches have rows of about one length, the longest first, and no padding is computed.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from loralib.nn.packing import PackedRows
from loralib.nn.routing import is_by_row

from ..file_utils import ModelOutput
from ..modeling_utils import PreTrainedModel
from ..tokenization_utils_base import BatchEncoding, PreTrainedTokenizerBase
from ..utils import logging

logger = logging.get_logger(__name__)

ROWS_A_BATCH = 32


class PipelineException(Exception):
    """A pipeline cannot work with this model, or on this text.

    Args:
        task: the pipeline's.
        model: the model's name.
        reason: what is wrong.
    """

    def __init__(self, task: str, model: str, reason: str):
        super().__init__(reason)
        self.task = task
        self.model = model


class ArgumentHandler(ABC):
    """Makes one form of the many in which a pipeline's inputs can be given."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The inputs in that form."""


class Pipeline(ABC):
    """A model, its tokenizer, and what is done before and after.

    Args:
        model: with the head that the task needs; it is moved to `device`.
        tokenizer: the model's.
        modelcard: kept as an attribute.
        framework: "pt".
        task: the task's name.
        args_parser: makes one form of the inputs, for tasks that have several.
        device: -1 for the CPU, or a GPU's number.
        binary_output: kept as an attribute; what a pipeline gives does not depend on it.

    Raises:
        PipelineException: the model has another head.
    """

    default_input_names: ClassVar[str | None] = None
    head: ClassVar[str] = ""
    """Of the models that it takes; see `PreTrainedModel.head`."""
    forward_settings: ClassVar[dict[str, Any]] = {}
    """Further arguments of the model's forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        modelcard: Any = None,
        framework: str | None = None,
        task: str = "",
        args_parser: ArgumentHandler | None = None,
        device: int = -1,
        binary_output: bool = False,
    ):
        if framework not in (None, "pt"):
            raise ValueError(f"framework={framework!r}: this fork has only PyTorch's models, 'pt'")
        self.task = task
        self.model = model
        self.tokenizer = tokenizer
        self.modelcard = modelcard
        self.framework = "pt"
        self.device = torch.device("cpu" if device < 0 else f"cuda:{device}")
        self.binary_output = binary_output
        self._warned = False
        if model.head != self.head:
            raise self._exception(f"{type(model).__name__} has no head for {self.head}")
        self.model.to(self.device)

    def _exception(self, reason: str) -> PipelineException:
        return PipelineException(self.task, self.model.config.name_or_path, reason)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The answers for the inputs."""

    def transform(self, X: Any) -> Any:
        """The same, under scikit-learn's name."""
        return self(X)

    def predict(self, X: Any) -> Any:
        """The same, under scikit-learn's name."""
        return self(X)

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes the model and the tokenizer into a folder."""
        self.model.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)

    @contextmanager
    def device_placement(self) -> Iterator[None]:
        """Within this block, tensors are made on the pipeline's device."""
        with self.device:
            yield

    # ---- texts -> rows of ids ----

    @property
    def longest(self) -> int | None:
        """Tokens that a row can have at most; None where there is no limit."""
        return self.model.config.longest_sequence

    def encode(self, texts: list[Any], **settings: Any) -> BatchEncoding:
        """The texts' rows, cut to what the model takes; the first cut is warned of.

        Args:
            texts: texts, or all pairs of texts.
            settings: of the tokenizer's call.
        """
        first, second = texts, None
        if texts and not isinstance(texts[0], str):
            first, second = (list(each) for each in zip(*texts, strict=True))
        limit = {} if self.longest is None else {"truncation": True, "max_length": self.longest}
        encoded = self.tokenizer(first, second, **limit, **settings)
        if not self._warned and self._is_cut(encoded["input_ids"], first, second):
            self._warned = True
            logger.warning(
                "texts of more than the %d tokens that the model takes are cut", self.longest
            )
        return encoded

    def _is_cut(self, rows: list[list[int]], first: list[str], second: list[str] | None) -> bool:
        full = [index for index, row in enumerate(rows) if len(row) == self.longest]
        frame = self.tokenizer.num_special_tokens_to_add(second is not None)
        return any(
            frame + len(self.tokenizer.tokenize(first[index], second and second[index]))
            > self.longest
            for index in full
        )

    # ---- rows of ids -> rows of numbers ----

    def forward(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[np.ndarray, ...]]:
        """What the model says of each row: a tuple of arrays, in float32.

        Args:
            rows: dicts of lists of one length, which the model's forward takes by these names.
        """
        order, size = range(len(rows)), len(rows)
        if not is_by_row():  # where rows have adapters of their own, their order says which
            order = sorted(order, key=lambda index: -len(rows[index]["input_ids"]))
            size = ROWS_A_BATCH
        said: list[tuple[np.ndarray, ...]] = [()] * len(rows)
        if self.model.training:
            self.model.eval()
        for start in range(0, len(rows), size):
            indices = order[start : start + size]
            with torch.no_grad():
                parts = self._forward_batch([rows[index] for index in indices])
            for index, *arrays in zip(indices, *parts, strict=True):
                said[index] = tuple(arrays)
        return said

    def _forward_batch(self, rows: list[Mapping[str, Any]]) -> tuple[list[np.ndarray], ...]:
        """What the model says of a batch: for each output a list of the rows' arrays."""
        lengths = [len(row["input_ids"]) for row in rows]
        names = [name for name in ("input_ids", "token_type_ids", "labels") if name in rows[0]]
        batch = {
            name: pad_sequence(
                [torch.tensor(row[name], device="cpu") for row in rows],
                batch_first=True,
                padding_value=self._FILL.get(name, self.model.config.pad_token_id),
            ).to(self.device)
            for name in names
        }
        packed = PackedRows.from_lengths(lengths).to(self.device)
        output = self.model(**batch, packed_rows=packed, return_dict=True, **self.forward_settings)
        return self.by_row(output, lengths)

    # What rows of a batch are filled up with.
    _FILL: ClassVar[dict[str, int]] = {"token_type_ids": 0, "labels": -100}

    def by_row(self, output: ModelOutput, lengths: list[int]) -> tuple[list[np.ndarray], ...]:
        """A batch's logits, row by row."""
        return (list(output.logits.float().cpu().numpy()),)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def as_list(inputs: Any, name: str) -> list[Any]:
    """One text, or several, as a list.

    Raises:
        ValueError: there is none, or something is not a text.
    """
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list | tuple) or not texts:
        raise ValueError(f"{name} is a text or a list of texts, not {texts!r:.40}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name} {index} is {type(text).__name__} ({text!r:.40}), not a text")
    return list(texts)


def rows_of(encoded: BatchEncoding) -> list[dict[str, list[int]]]:
    """An encoded batch as rows for `Pipeline.forward`."""
    names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*(encoded[name] for name in names), strict=True)
    ]
