"""What models return.

In all of them, where asked for: `hidden_states` are the embeddings' and each layer's output, each
(batch, length, hidden) with zeros where the batch has padding; `attentions` are each layer's
probabilities, (batch, heads, length, length). Of multiple choice, `batch` counts every choice.
"""

from dataclasses import dataclass

from torch import Tensor

from .file_utils import ModelOutput


@dataclass(eq=False)
class BaseModelOutput(ModelOutput):
    """An encoder's output.

    Args:
        last_hidden_state: (batch, length, hidden); zeros where the batch has padding.
        hidden_states, attentions: see the module's head.
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
class TokenClassifierOutput(ModelOutput):
    """A token classifier's output.

    Args:
        loss: mean cross-entropy over the tokens whose label is not -100.
        logits: (batch, length, labels); zeros where the batch has padding.
        hidden_states, attentions: see the module's head.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class QuestionAnsweringModelOutput(ModelOutput):
    """Where an answer starts and ends.

    Args:
        loss: mean of the cross-entropies of start and end.
        start_logits, end_logits: (batch, length); -inf where the batch has padding, which is no
            answer.
        hidden_states, attentions: see the module's head.
    """

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class MultipleChoiceModelOutput(ModelOutput):
    """Which choice it is: loss (scalar, where labels are given) and logits (batch, choices)."""

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
        hidden_states, attentions: see the module's head.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class CausalLMOutputWithCrossAttentions(ModelOutput):
    """A language model's output; upstream's name for it, without what this package lacks.

    Args:
        loss: mean cross-entropy of each next token whose label is not -100.
        logits: (batch, length, vocabulary); zeros where the batch has padding.
        hidden_states, attentions: see the module's head.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
