"""Collates a list of examples into one batch of tensors.

Each entry of a batch is one array, which is filled row by row.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loralib.nn.packing import PackedRows

from ..modeling_losses import IGNORED_LABEL
from ..tokenization_padding import padded_rows
from ..tokenization_utils_base import BatchEncoding, PreTrainedTokenizerBase, to_tensor

# The prefixes of tokens that start a word, in a byte-level BPE and in SentencePiece; and of tokens
# that continue one, in WordPiece.
_WORD_STARTS, _WORD_GOES_ON = ("Ġ", "▁"), "##"
# The most targets per row in whole-word masking, as upstream.
_MOST_TARGETS = 512

DataCollator = Callable[[list[Any]], Mapping[str, Any]]


def default_data_collator(features: Sequence[Any]) -> dict[str, Tensor]:
    """Stacks examples whose rows all have the same length.

    Args:
        features: dicts (or dataclasses) of numbers, lists, arrays or tensors. ``label`` or
            ``label_ids`` becomes ``labels``. Other entries that are None or strings in all rows are
            left out.

    Returns:
        For each entry a tensor with one row per example; int64, or float32 for floats.

    Raises:
        ValueError: an entry's rows have different lengths, or only some have numbers.
    """
    examples, labels = _split_labels(features)
    names = dict.fromkeys(name for row in examples for name in row)
    columns = {name: [row.get(name) for row in examples] for name in names}
    batch = {
        name: to_tensor(name, values)
        for name, values in columns.items()
        if not all(isinstance(value, str | None) for value in values)
    }
    return batch | labels


@dataclass
class DataCollatorWithPadding:
    """Pads examples to one length, and stacks them.

    Args:
        tokenizer: its `pad` does the work.
        padding: True or "longest": to the batch's longest row; "max_length": to `max_length`.
        max_length: in tokens.
        pad_to_multiple_of: round the length up to a multiple of this, which suits tensor cores.
    """

    tokenizer: PreTrainedTokenizerBase
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Sequence[Any]) -> BatchEncoding:
        """Returns the batch: tensors (examples, tokens), with ``label(_ids)`` as ``labels``."""
        examples, labels = _split_labels(features)
        batch = self._padded(examples)
        batch.update(labels)
        return batch

    def _padded(self, examples: list[dict[str, Any]]) -> BatchEncoding:
        return self.tokenizer.pad(
            examples,
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors="pt",
        )


@dataclass
class DataCollatorForTokenClassification(DataCollatorWithPadding):
    """Pads examples, and their tokens' labels, to one length.

    Args:
        label_pad_token_id: the label of padding; losses ignore the default.
        others: see `DataCollatorWithPadding`.
    """

    label_pad_token_id: int = IGNORED_LABEL

    def __call__(self, features: Sequence[Any]) -> BatchEncoding:
        """Returns the batch; ``labels``, from ``labels`` or ``label``, are (examples, tokens).

        Raises:
            ValueError: a row's number of labels is not that of its tokens.
        """
        examples = _as_dicts(features)
        name = "label" if "label" in examples[0] else "labels"
        if name not in examples[0]:
            return self._padded(examples)
        labels = [torch.as_tensor(row.pop(name)) for row in examples]
        for index, (row, own) in enumerate(zip(examples, labels, strict=True)):
            if own.shape != (len(row["input_ids"]),):
                raise ValueError(
                    f"row {index} of the batch has {own.numel()} labels for its "
                    f"{len(row['input_ids'])} tokens: give one label per token, "
                    f"{self.label_pad_token_id} for a token without one"
                )
        batch = self._padded(examples)
        length, side = batch["input_ids"].shape[1], self.tokenizer.padding_side
        batch["labels"] = torch.from_numpy(
            padded_rows(labels, length, self.label_pad_token_id, side)
        )
        return batch


class DataCollatorForMultipleChoice(DataCollatorWithPadding):
    """Pads the choices of all examples to one length, and stacks them."""

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Returns the batch: tensors (examples, choices, tokens), and ``labels`` (examples,).

        Args:
            features: examples. Each of their entries is a list with one row per choice; ``label``
                is the index of the right choice, if it is known.

        Raises:
            ValueError: examples have different numbers of choices, or only some have a label.
        """
        examples = _as_dicts(features)
        labels = [row.pop("label", row.pop("labels", None)) for row in examples]
        counts = {len(row["input_ids"]) for row in examples}
        if len(counts) > 1:
            raise ValueError(
                f"examples of {min(counts)} to {max(counts)} choices cannot be batched: all need "
                "the same number"
            )
        choices = [
            {name: row[name][choice] for name in examples[0]}
            for row in examples
            for choice in range(len(row["input_ids"]))
        ]
        batch = {
            name: rows.view(len(examples), -1, rows.shape[-1])
            for name, rows in self._padded(choices).items()
        }
        if any(label is not None for label in labels):
            batch["labels"] = to_tensor("label", labels)
        return batch


@dataclass
class DataCollatorForLanguageModeling:
    """Pads examples, and makes the targets of masked or plain language modeling.

    Masked (BERT, section 3.1): each token that is not special is a target with probability
    `mlm_probability`; 80% of the targets become the mask token, 10% a random token, and 10% stay.
    Plain: each token is a target; the model shifts them.

    Args:
        tokenizer: pads, and says which tokens are special.
        mlm: make the targets of masked language modeling, else of plain.
        mlm_probability: share of tokens that are targets.
        pad_to_multiple_of: round the length up to a multiple of this.
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
            raise ValueError("masked language modeling needs a tokenizer with a mask_token")
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(
                f"mlm_probability must be above 0 and at most 1, not {self.mlm_probability}"
            )

    def __call__(self, features: Sequence[Any]) -> BatchEncoding:
        """Returns the batch; ``labels`` (examples, tokens) hold ids at targets, -100 elsewhere.

        Args:
            features: encoded rows as dicts, or rows of ids.
        """
        examples = [row if isinstance(row, Mapping) else {"input_ids": row} for row in features]
        batch = self.tokenizer.pad(
            examples, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors="pt"
        )
        own = batch.pop("special_tokens_mask", None)
        if self.mlm:
            batch["input_ids"], batch["labels"] = self.mask_tokens(batch["input_ids"], own)
        else:
            padding = batch["attention_mask"] == 0
            batch["labels"] = batch["input_ids"].masked_fill(padding, IGNORED_LABEL)
        return batch

    def mask_tokens(
        self, inputs: Tensor, special_tokens_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the ids with targets masked, and the labels; both in the shape of `inputs`.

        Args:
            inputs: (examples, tokens), ids.
            special_tokens_mask: of the same shape, 1 where no target may be. Tokens that the
                tokenizer knows as special are never targets either.
        """
        share = torch.full(inputs.shape, self.mlm_probability)
        share.masked_fill_(self._special(inputs, special_tokens_mask), 0.0)
        return self._hidden(inputs, self._draw(share))

    def _special(self, inputs: Tensor, given: Tensor | None) -> Tensor:
        """Returns where no target may be."""
        special = torch.isin(inputs, torch.tensor(self.tokenizer.all_special_ids))
        return special if given is None else special | given.bool()

    def _draw(self, share: Tensor) -> Tensor:
        """Draws booleans that are True with these probabilities."""
        return torch.bernoulli(share, generator=self.generator).bool()

    def _hidden(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Does what `mask_tokens` does for given targets; draws random numbers as upstream does."""
        labels = inputs.masked_fill(~targets, IGNORED_LABEL)
        masked = self._draw(torch.full(inputs.shape, 0.8)) & targets
        replaced = self._draw(torch.full(inputs.shape, 0.5)) & targets & ~masked
        others = torch.randint(len(self.tokenizer), inputs.shape, generator=self.generator)
        ids = inputs.masked_fill(masked, self.tokenizer.mask_token_id)
        return torch.where(replaced, others, ids), labels


@dataclass
class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """Masked language modeling whose targets are whole words: all tokens of a word, or none.

    A row's words are taken in random order, each if it still fits, up to `mlm_probability` of the
    row's tokens. Each target token is then masked, replaced or kept on its own, as in
    `DataCollatorForLanguageModeling`. A word starts at a token with Ġ in a byte-level BPE, with ▁
    in SentencePiece, without ## in WordPiece. In other vocabularies, each token is a word.

    Args:
        others: see `DataCollatorForLanguageModeling`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mlm:
            raise ValueError("whole-word masking is masked language modeling: leave out mlm=False")

    def mask_tokens(
        self, inputs: Tensor, special_tokens_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Does what `DataCollatorForLanguageModeling` does, with whole words as targets."""
        special = self._special(inputs, special_tokens_mask)
        after_special = F.pad(special, (1, 0), value=True)[:, :-1]
        starts = self._starts_word[inputs] | after_special
        words = starts.cumsum(1).masked_fill_(special, 0)
        lengths = (inputs != self.tokenizer.pad_token_id).sum(1).tolist()
        targets = [
            torch.isin(row, self._choose(row, length))
            for row, length in zip(words, lengths, strict=True)
        ]
        return self._hidden(inputs, torch.stack(targets))

    def _choose(self, words: Tensor, length: int) -> Tensor:
        """Chooses a row's words to hide, and returns their numbers.

        Args:
            words: (tokens,), the number of each token's word, 0 for none.
            length: how many tokens are not padding.
        """
        left = min(_MOST_TARGETS, max(1, round(length * self.mlm_probability)))
        counts = torch.bincount(words)
        counts[0] = 0
        numbers = counts.nonzero().squeeze(1)
        order = numbers[torch.randperm(len(numbers), generator=self.generator)]
        chosen = []
        for number, count in zip(order.tolist(), counts[order].tolist(), strict=True):
            if count <= left:
                chosen.append(number)
                left -= count
        return torch.tensor(chosen, dtype=words.dtype)

    @cached_property
    def _starts_word(self) -> Tensor:
        """(ids,), whether each id's token starts a word."""
        tokens = self.tokenizer.get_vocab()
        if any(token.startswith(_WORD_STARTS) for token in tokens):
            ids = [index for token, index in tokens.items() if token.startswith(_WORD_STARTS)]
        else:
            ids = [index for token, index in tokens.items() if not token.startswith(_WORD_GOES_ON)]
        starts = torch.zeros(max(tokens.values()) + 1, dtype=torch.bool)
        starts[ids] = True
        return starts


@dataclass(frozen=True)
class PackedCollator:
    """Adds to a collator's batches where their tokens are, for models that take this.

    ``packed_rows`` is a `loralib.nn.packing.PackedRows` of the batch's attention mask, or of all
    tokens if it has none. It is made here, on the CPU, so that no model has to wait for a device
    to get it. If ``labels`` has one for each token, it also holds which of them are targets. A
    batch of embeddings, or one whose mask does not have the shape of the ids, stays as it is.

    Args:
        collator: makes a batch of a list of examples.
    """

    collator: Callable[[list[Any]], Mapping[str, Any]]

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        """Returns the collator's batch, with its `packed_rows` if it can have them."""
        batch = dict(self.collator(features))
        ids, mask, labels = (batch.get(name) for name in ("input_ids", "attention_mask", "labels"))
        if not isinstance(ids, Tensor):
            return batch
        mask = torch.ones_like(ids) if mask is None else mask
        if mask.shape != ids.shape:
            return batch
        rows = PackedRows(mask.flatten(0, -2))  # in multiple choice, each choice is a row
        if isinstance(labels, Tensor) and labels.shape == ids.shape:
            rows = rows.with_targets(labels != IGNORED_LABEL)
        return {**batch, "packed_rows": rows}


def only_pads(collator: Any) -> bool:
    """Returns whether an example's row and loss are the same in any batch, apart from padding.

    They are not if tokens have labels: a loss is the mean over a batch's labeled tokens, so it
    depends on which examples are in the batch.
    """
    return collator is default_data_collator or type(collator) is DataCollatorWithPadding


class SameMasks:
    """Makes the batches of one pass over a set, and masks the same tokens in each such pass.

    Args:
        collator: masks tokens. It is copied, and the copy gets a generator of its own at its first
            batch, as worker processes cannot be given one.
        seed: the generator's seed.
    """

    def __init__(self, collator: DataCollatorForLanguageModeling, seed: int):
        self.collator, self.seed = copy.copy(collator), seed
        self.collator.generator = None

    def __call__(self, features: list[Any]) -> BatchEncoding:
        """Returns the batch of the collator."""
        if self.collator.generator is None:
            self.collator.generator = torch.Generator().manual_seed(self.seed)
        return self.collator(features)


def _split_labels(
    features: Sequence[Any],
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Returns the examples without labels, and ``{"labels": ...}``, or {} if there are none."""
    examples = _as_dicts(features)
    labels = {}
    for name in ("labels", "label", "label_ids"):
        values = [row.pop(name, None) for row in examples]
        if any(value is not None for value in values):
            labels["labels"] = to_tensor(name, values)
    return examples, labels


def _as_dicts(features: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns copies of the examples, as dicts.

    Raises:
        TypeError: they are something else, such as the tuples of a `TensorDataset`.
        ValueError: there are none.
    """
    if not features:
        raise ValueError("there are no examples to make a batch of")
    return [_as_dict(row) for row in features]


def _as_dict(row: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(row):
        fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        return {name: value for name, value in fields.items() if value is not None}
    if not hasattr(row, "keys"):  # a pandas Series has them too
        raise TypeError(
            f"an example is a {type(row).__name__}, not a dict with the model's arguments by name: "
            "make it one, or give the Trainer a data_collator that makes batches of them"
        )
    return dict(row)
