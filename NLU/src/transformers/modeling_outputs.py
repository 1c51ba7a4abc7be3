"""The models' outputs.

All of them have two fields that are None unless asked for: `hidden_states`, the output of the
embeddings and of every layer, each (batch, length, hidden) with zeros at padding; and `attentions`,
every layer's probabilities, each (batch, heads, length, length). In multiple choice, every choice
is a row of these.
"""

from dataclasses import dataclass

from torch import Tensor

from .file_utils import ModelOutput


@dataclass(eq=False)
class BaseModelOutput(ModelOutput):
    """An encoder's output.

    Args:
        last_hidden_state: (batch, length, hidden); zeros at padding.
        hidden_states, attentions: see the module's docstring.
    """

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class BaseModelOutputWithPooling(ModelOutput):
    """An encoder's output, and its pooler's, (batch, hidden)."""

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
        logits: (batch, length, labels); zeros at padding.
        hidden_states, attentions: see the module's docstring.
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
        start_logits, end_logits: (batch, length); -10,000 at padding, which is no answer.
        hidden_states, attentions: see the module's docstring.
    """

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class MultipleChoiceModelOutput(ModelOutput):
    """A choice's output: loss (scalar, where labels are given) and logits (batch, choices)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class MaskedLMOutput(ModelOutput):
    """A masked language model's output.

    Args:
        loss: mean cross-entropy over the positions whose label is not -100.
        logits: (batch, length, vocabulary). In training with labels, or with `targets_only`,
            (targets, vocabulary): those of the positions with a label, row by row.
        hidden_states, attentions: see the module's docstring.
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
        logits: (batch, length, vocabulary); zeros at padding.
        hidden_states, attentions: see the module's docstring.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
