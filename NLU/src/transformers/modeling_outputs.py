"""What models return."""

from dataclasses import dataclass

from torch import Tensor

from .file_utils import ModelOutput


@dataclass(eq=False)
class BaseModelOutput(ModelOutput):
    """An encoder's output.

    Args:
        last_hidden_state: (batch, length, hidden); zeros where the batch has padding.
        hidden_states: the embeddings' and each layer's output, shaped the same, where asked for.
        attentions: each layer's probabilities, (batch, heads, length, length), where asked for.
    """

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class BaseModelOutputWithPooling(ModelOutput):
    """An encoder's output with that of the pooler, (batch, hidden)."""

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class SequenceClassifierOutput(ModelOutput):
    """A classifier's output: loss (scalar, where labels are given) and logits (batch, labels)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class MaskedLMOutput(ModelOutput):
    """A masked language model's output.

    Args:
        loss: mean cross-entropy over the positions whose label is not -100.
        logits: (batch, length, vocabulary). In training with labels, or where `targets_only` asks
            for it, (targets, vocabulary): those of the positions with a label, row by row.
        hidden_states, attentions: as in `BaseModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
