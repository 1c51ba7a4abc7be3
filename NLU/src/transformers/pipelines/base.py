"""The base class of all pipelines, which encodes texts and runs the model on them.

    texts ─ encode ─> rows of ids ─ forward ─> rows of numbers, in the texts' order ─ …

Batches have rows of about the same length, the longest first. The model skips padding.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from loralib.nn.packing import PackedRows
from loralib.nn.routing import is_by_row

from ..file_utils import ModelOutput
from ..modeling_losses import IGNORED_LABEL
from ..modeling_utils import PreTrainedModel
from ..tokenization_utils_base import BatchEncoding, PreTrainedTokenizerBase
from ..utils import logging

logger = logging.get_logger(__name__)

ROWS_PER_BATCH = 32


class PipelineException(Exception):
    """Raised when a pipeline cannot use this model or this text.

    Args:
        task: the pipeline's task.
        model: the model's name.
        reason: what is wrong.
    """

    def __init__(self, task: str, model: str, reason: str):
        super().__init__(reason)
        self.task = task
        self.model = model


class ArgumentHandler(ABC):
    """Converts a pipeline's inputs, which can be given in several forms, to one form."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the inputs in that form."""


class Pipeline(ABC):
    """A model and its tokenizer, with the processing before and after the model.

    Args:
        model: a model with the head that the task needs. It is moved to `device`.
        tokenizer: the model's tokenizer.
        modelcard: kept as an attribute.
        framework: "pt".
        task: the task's name.
        args_parser: converts the inputs to one form, for tasks that accept several.
        device: -1 for the CPU, or a GPU's number.
        binary_output: kept as an attribute, without effect.

    Raises:
        PipelineException: the model has another head.
    """

    default_input_names: ClassVar[str | None] = None
    head: ClassVar[str] = ""
    """The head that its models have; see `PreTrainedModel.head`."""
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
        check_framework(framework)
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
        """Returns the answers for the inputs."""

    def transform(self, X: Any) -> Any:
        """Calls the pipeline, under scikit-learn's name."""
        return self(X)

    def predict(self, X: Any) -> Any:
        """Calls the pipeline, under scikit-learn's name."""
        return self(X)

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes the model and the tokenizer into a folder."""
        self.model.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)

    @contextmanager
    def device_placement(self) -> Iterator[None]:
        """Creates tensors on the pipeline's device within the block."""
        with self.device:
            yield

    # ---- texts -> rows of ids ----

    @property
    def longest(self) -> int | None:
        """The maximum number of tokens in a row, or None if there is no limit."""
        return self.model.config.longest_sequence

    def encode(self, texts: list[Any], **settings: Any) -> BatchEncoding:
        """Encodes texts, truncated to what the model takes; warns at the first truncation.

        Args:
            texts: a list of texts, or a list of pairs of texts.
            settings: further arguments of the tokenizer's call.
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
        """Runs the model, and returns for each row a tuple of float32 arrays.

        Args:
            rows: a dict for each row with arguments of the model's forward: lists of equal length.
        """
        order, size = range(len(rows)), len(rows)
        if not is_by_row():  # otherwise each row has its own adapter, chosen by the rows' order
            order = sorted(order, key=lambda index: -len(rows[index]["input_ids"]))
            size = ROWS_PER_BATCH
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
        """Runs the model on a batch, and returns for each output a list of the rows' arrays."""
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

    # The values of the padding.
    _FILL: ClassVar[dict[str, int]] = {"token_type_ids": 0, "labels": IGNORED_LABEL}

    def by_row(self, output: ModelOutput, lengths: list[int]) -> tuple[list[np.ndarray], ...]:
        """Returns a batch's logits, row by row."""
        return (list(output.logits.float().cpu().numpy()),)


def check_framework(name: str | None) -> None:
    """Refuses a framework other than PyTorch."""
    if name not in (None, "pt"):
        raise ValueError(f"framework={name!r}: this fork has only PyTorch's models, 'pt'")


def without_padding(logits: Tensor, lengths: list[int]) -> list[np.ndarray]:
    """Returns a batch's logits (rows, tokens, …) row by row, each with its own tokens."""
    rows = logits.float().cpu().numpy()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def as_list(inputs: Any, name: str) -> list[Any]:
    """Returns one or several texts as a list.

    Raises:
        ValueError: there is no text, or something is not a string.
    """
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list | tuple) or not texts:
        raise ValueError(f"{name} is a text or a list of texts, not {texts!r:.40}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name} {index} is {type(text).__name__} ({text!r:.40}), not a text")
    return list(texts)


def rows_of(encoded: BatchEncoding) -> list[dict[str, list[int]]]:
    """Returns an encoded batch as rows for `Pipeline.forward`."""
    names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*(encoded[name] for name in names), strict=True)
    ]
