"""Collates questions with several choices: a batch has a row for each choice of each question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..tokenization_utils_base import PreTrainedTokenizerBase, to_tensor
from .data_collator import DataCollatorWithPadding


@dataclass
class DataCollatorForMultipleChoice:
    """Pads the choices of all examples to one length, and stacks them.

    Args:
        tokenizer, padding, max_length, pad_to_multiple_of: as in `DataCollatorWithPadding`.
    """

    tokenizer: PreTrainedTokenizerBase
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Returns the batch: tensors (examples, choices, tokens), and ``labels`` (examples,).

        Args:
            features: examples. Each of their entries is a list with one row per choice; ``label``
                is the index of the right choice, if it is known.

        Raises:
            ValueError: examples have different numbers of choices.
        """
        labels = [row[name] for row in features for name in ("label", "labels") if name in row]
        counts = {len(row["input_ids"]) for row in features}
        if len(counts) > 1:
            raise ValueError(
                f"examples of {min(counts)} to {max(counts)} choices cannot be batched: all need "
                "the same number"
            )
        names = [name for name in features[0] if name not in ("label", "labels")]
        choices = [
            {name: row[name][choice] for name in names}
            for row in features
            for choice in range(len(row["input_ids"]))
        ]
        pad = DataCollatorWithPadding(
            self.tokenizer, self.padding, self.max_length, self.pad_to_multiple_of
        )
        batch = {
            name: rows.view(len(features), -1, rows.shape[-1])
            for name, rows in pad(choices).items()
        }
        if labels:
            batch["labels"] = to_tensor("label", labels)
        return batch
