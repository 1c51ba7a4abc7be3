"""From a list of examples to one batch of tensors.

Each entry of a batch is filled into one array allocated for it, row by row.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loralib.nn.packing import PackedRows

from ..tokenization_utils_base import PreTrainedTokenizerBase, to_tensor

# The label of a token that has no part in the loss; torch's cross-entropy skips it.
IGNORED_LABEL = -100


def default_data_collator(features: Sequence[Any]) -> dict[str, Tensor]:
    """Stacks examples whose rows have one length.

    Args:
        features: dicts (or dataclasses) of numbers, lists, arrays or tensors. ``label`` or
            ``label_ids`` becomes ``labels``. Entries that are None or strings are left out.

    Returns:
        For each entry a tensor with one row an example; int64, or float32 for floats.

    Raises:
        ValueError: rows of an entry have several lengths.
    """
    examples, labels = _split_labels(features)
    kept = [name for name, value in examples[0].items() if not isinstance(value, str | None)]
    batch = {name: to_tensor(name, [row[name] for row in examples]) for name in kept}
    return batch | labels


@dataclass
class DataCollatorWithPadding:
    """Pads examples to one length, and stacks them.

    Args:
        tokenizer: its `pad` does the work.
        padding: True or "longest": to the batch's longest row; "max_length": to `max_length`.
        max_length: in tokens.
        pad_to_multiple_of: round the length up to a multiple, which suits tensor cores.
    """

    tokenizer: PreTrainedTokenizerBase
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Sequence[Any]) -> dict[str, Tensor]:
        """The batch: tensors (examples, tokens), and ``labels`` for ``label`` or ``label_ids``."""
        examples, labels = _split_labels(features)
        batch = self.tokenizer.pad(
            examples,
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors="pt",
        )
        return dict(batch) | labels


@dataclass
class DataCollatorForLanguageModeling:
    """Pads examples, and makes the targets of masked or of plain language modelling.

    Masked (BERT, section 3.1): of the tokens that are not special, each is a target with
    probability `mlm_probability`; of the targets 80% become the mask token, 10% a random token, and
    10% stay. Plain: each token is a target; the model does the shifting.

    Args:
        tokenizer: pads, and says which tokens are special.
        mlm: masked language modelling.
        mlm_probability: share of tokens that are targets.
        pad_to_multiple_of: round the length up to a multiple.
        generator: where randomness comes from; torch's default generator by default.

    Raises:
        ValueError: masking without a mask token, or a share outside 0 to 1.
    """

    tokenizer: PreTrainedTokenizerBase
    mlm: bool = True
    mlm_probability: float = 0.15
    pad_to_multiple_of: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.mlm and self.tokenizer.mask_token is None:
            raise ValueError("masked language modelling needs a tokenizer with a mask_token")
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(
                f"mlm_probability is above 0 and at most 1, not {self.mlm_probability}"
            )

    def __call__(self, features: Sequence[Any]) -> dict[str, Tensor]:
        """The batch; ``labels`` (examples, tokens) hold ids at targets and -100 elsewhere.

        Args:
            features: encoded rows as dicts, or rows of ids.
        """
        examples = [row if isinstance(row, Mapping) else {"input_ids": row} for row in features]
        batch = dict(
            self.tokenizer.pad(
                examples, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors="pt"
            )
        )
        special = self._special_tokens(batch)
        if self.mlm:
            batch["input_ids"], batch["labels"] = self._mask_tokens(batch["input_ids"], special)
        else:
            padding = batch["attention_mask"] == 0
            batch["labels"] = batch["input_ids"].masked_fill(padding, IGNORED_LABEL)
        return batch

    def _special_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Where no target may be; takes the examples' own mask out of the batch."""
        special = torch.isin(batch["input_ids"], torch.tensor(self.tokenizer.all_special_ids))
        own = batch.pop("special_tokens_mask", None)
        return special if own is None else special | own.bool()

    def _mask_tokens(self, input_ids: Tensor, special: Tensor) -> tuple[Tensor, Tensor]:
        """The ids with targets masked, and the labels; both of `input_ids`' shape."""
        # One random number a token: below p it is a target, below 0.8 p masked, and from there to
        # 0.9 p replaced.
        number = torch.rand(input_ids.shape, generator=self.generator).div_(self.mlm_probability)
        number.masked_fill_(special, 1.0)
        labels = input_ids.masked_fill(number >= 1.0, IGNORED_LABEL)
        masked = input_ids.masked_fill(number < 0.8, self.tokenizer.mask_token_id)
        others = torch.randint(len(self.tokenizer), input_ids.shape, generator=self.generator)
        return torch.where((number >= 0.8) & (number < 0.9), others, masked), labels


@dataclass(frozen=True)
class PackedCollator:
    """A collator whose batches say as well where their tokens are, for models that ask for it.

    To the batch comes ``packed_rows``, a `loralib.nn.packing.PackedRows` of its attention mask, or
    of all tokens where there is none; it is made here, on the CPU, so that no model has to wait for
    a device to learn it. With ``labels`` of each token, it holds which of them are targets.

    Args:
        collator: makes a batch of a list of examples.
    """

    collator: Callable[[list[Any]], Mapping[str, Any]]

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        """The collator's batch, and its `packed_rows`.

        Raises:
            ValueError: padding is where no model of this package takes it; see `PackedRows`.
        """
        batch = dict(self.collator(features))
        ids, mask, labels = (batch.get(name) for name in ("input_ids", "attention_mask", "labels"))
        mask = torch.ones_like(ids) if mask is None else mask
        rows = PackedRows(mask.flatten(0, -2))  # of multiple choice, each choice is a row
        if isinstance(labels, Tensor) and labels.shape == ids.shape:
            rows = rows.with_targets(labels != IGNORED_LABEL)
        return {**batch, "packed_rows": rows}


def only_pads(collator: Any) -> bool:
    """Whether a collator makes the same rows of an example in any batch, but for padding."""
    return collator is default_data_collator or type(collator) is DataCollatorWithPadding


def _split_labels(
    features: Sequence[Any],
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The examples without their labels, and ``{"labels": ...}``, empty where there are none."""
    if not features:
        raise ValueError("there are no examples to make a batch of")
    examples = [_as_dict(row) for row in features]
    labels = {}
    for name in ("label", "label_ids"):
        values = [row.pop(name) for row in examples if name in row]
        if values and values[0] is not None:
            labels["labels"] = to_tensor(name, values)
    return examples, labels


def _as_dict(row: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(row):
        fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        return {name: value for name, value in fields.items() if value is not None}
    return dict(row)
