"""Heads for tagging, question answering, multiple choice and causal language modeling.

All families share them. The heads for masked language modeling and for classifying sequences are in
modeling_encoder.py. This file has:

    states ── classifier ─> a tag of every token                     EncoderForTokenClassification
    states ── two columns ─> start and end of an answer              EncoderForQuestionAnswering
    first tokens of a row's choices ── pooler, score ─> a choice     EncoderForMultipleChoice
    states ── vocabulary head ─> the token that follows each         EncoderForCausalLM

Heads run on packed tokens. Logits are padded at the end, and padding never enters a loss.
"""

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loralib.nn.packing import PackedRows
from loralib.nn.products import Linear

from .configuration_utils import PretrainedConfig
from .modeling_encoder import Encoded
from .modeling_losses import IGNORED_LABEL, mean_loss
from .modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    TokenClassifierOutput,
)
from .modeling_padded import HIDDEN
from .modeling_utils import PreTrainedModel


class VocabularyProjection(Linear):
    """Hidden states -> logits over a vocabulary, of some of a batch's tokens."""

    # loralib.nn.products measures this layer for at most this many rows.
    rows_at_once = staticmethod(lambda dtype: 256)


def _real(encoded: Encoded) -> Tensor:
    """Returns (batch, length), False at padding."""
    # The size is taken from a tensor: a traced graph would keep a number as a constant.
    return encoded.rows.pad(torch.ones_like(encoded.last[:, 0]), fill=0) != 0


def first_tokens(states: Tensor) -> Tensor:
    """(batch, hidden), or (batch, length, hidden), all tokens' states -> (batch, hidden)."""
    return states[:, 0] if states.dim() == 3 else states


def in_precision_of(layer: nn.Module, x: Tensor) -> Tensor:
    """Casts x to the dtype of a layer's weight, unless quantization has packed that weight."""
    weight = layer.weight
    return x.to(weight.dtype) if isinstance(weight, Tensor) else x


def in_own_precision(layer: nn.Linear, x: Tensor) -> Tensor:
    """Applies a head's last layer without autocast: it is cheap, and logits keep its precision."""
    with torch.autocast(x.device.type, enabled=False):
        return layer(in_precision_of(layer, x))


class EncoderForTokenClassification(PreTrainedModel):
    """A backbone with a classifier on every token.

    Attributes:
        dropout, classifier: the head.
    """

    head: ClassVar[str | None] = "token_classification"
    dropout: nn.Module
    classifier: nn.Linear

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> TokenClassifierOutput | tuple:
        """Returns logits, (batch, length, labels), and with `labels` the mean loss.

        Args:
            labels: (batch, length), classes; -100 for tokens to be ignored. Padding always is.
            others: as in `EncoderModel.encode`.
        """
        encoded = self.base_model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            head_mask,
            inputs_embeds,
            packed_rows,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits, rows = in_own_precision(self.classifier, self.dropout(encoded.last)), encoded.rows
        loss = None if labels is None else mean_loss(logits, encoded.pack_labels(labels))
        output = TokenClassifierOutput(loss, rows.pad(logits), *encoded.shown)
        return self._as_asked(output, return_dict)


class EncoderForQuestionAnswering(PreTrainedModel):
    """A backbone that scores each token as the first and as the last one of an answer.

    An answer is a span of the row's own tokens. The loss's softmax is over these alone, so the loss
    does not depend on how far the batch is padded. (Upstream counts padding among the possible
    answers. Without padding, both losses are the same.)

    Attributes:
        qa_outputs: hidden -> 2.
    """

    head: ClassVar[str | None] = "question_answering"
    qa_outputs: nn.Linear

    def __init__(self, config: PretrainedConfig):
        if config.num_labels != 2:  # upstream's heads have as many outputs as that
            config = copy.deepcopy(config)
            config.num_labels = 2
        super().__init__(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> QuestionAnsweringModelOutput | tuple:
        """Returns the logits of start and end, and with both positions their mean loss.

        Logits are -10,000 at padding. Its probability is then 0, and a user's own loss over all
        columns, for distillation or label smoothing, stays finite.

        Args:
            start_positions, end_positions: (batch,), the columns of an answer's first and last
                token. A position beyond the row's tokens is ignored: the answer is not in this part
                of the text. A negative one is taken as 0.
            others: as in `EncoderModel.encode`.
        """
        encoded = self.base_model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            head_mask,
            inputs_embeds,
            packed_rows,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits, rows = in_own_precision(self.qa_outputs, encoded.last), encoded.rows
        start, end = (rows.pad(column, fill=HIDDEN) for column in logits.unbind(1))
        loss = None
        if start_positions is not None and end_positions is not None:
            real = _real(encoded)
            loss = (_loss_of(start, start_positions, real) + _loss_of(end, end_positions, real)) / 2
        output = QuestionAnsweringModelOutput(loss, start, end, *encoded.shown)
        return self._as_asked(output, return_dict)


def _loss_of(logits: Tensor, positions: Tensor, real: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the answers' starts, or of their ends.

    Args:
        logits: (batch, length), `HIDDEN` at padding.
        positions: (batch,) or (batch, 1), columns.
        real: (batch, length), as `_real` returns it.
    """
    columns = positions.flatten().clamp(0, logits.shape[1])
    # One more column, which holds no token, for positions beyond the batch.
    is_token = F.pad(real, (0, 1))
    is_there = is_token.gather(1, columns[:, None])[:, 0]
    return mean_loss(logits, columns.masked_fill(~is_there, IGNORED_LABEL))


class EncoderForMultipleChoice(PreTrainedModel):
    """A backbone that scores each of a row's choices by the choice's first token.

    To the backbone, and to a bank of adapters, each choice is a row.

    Attributes:
        dropout, classifier: the head, which also includes the backbone's pooler before them.
    """

    head: ClassVar[str | None] = "multiple_choice"
    dropout: nn.Module
    classifier: nn.Linear

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> MultipleChoiceModelOutput | tuple:
        """Returns logits, (batch, choices), and with `labels` the mean loss.

        Args:
            input_ids, token_type_ids, attention_mask, position_ids: (batch, choices, length).
            inputs_embeds: (batch, choices, length, hidden).
            labels: (batch,), the index of the right choice.
            packed_rows: those of the choices as rows, (batch · choices, length).
            others: as in `EncoderModel.encode`.

        Raises:
            ValueError: there is no dimension of choices.
        """
        first = input_ids if inputs_embeds is None else inputs_embeds
        if first is None or first.dim() != (3 if inputs_embeds is None else 4):
            shape = None if first is None else tuple(first.shape)
            raise ValueError(f"multiple choice takes (batch, choices, length, …), not {shape}")
        choices = first.shape[1]
        encoded = self.base_model.encode(
            _choices_as_rows(input_ids),
            _choices_as_rows(attention_mask),
            _choices_as_rows(token_type_ids),
            _choices_as_rows(position_ids),
            head_mask,
            _choices_as_rows(inputs_embeds),
            packed_rows,
            first_only=True,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        pooled = self.dropout(self.base_model.pooler(encoded.last))
        logits = in_own_precision(self.classifier, pooled).view(-1, choices)
        loss = None if labels is None else mean_loss(logits, labels.flatten())
        output = MultipleChoiceModelOutput(loss, logits, *encoded.shown)
        return self._as_asked(output, return_dict)


def _choices_as_rows(x: Tensor | None) -> Tensor | None:
    """(batch, choices, …) -> (batch · choices, …)."""
    return None if x is None else x.flatten(0, 1)


class EncoderForCausalLM(PreTrainedModel):
    """A backbone with a language-model head that predicts the next token.

    With `is_decoder` in its settings, tokens attend only to themselves and to those before them.
    Cross-attention, cached keys and values, and generation are not supported: they raise an error.
    """

    head: ClassVar[str | None] = "causal_lm"

    def logits_of(self, hidden: Tensor) -> Tensor:
        """The head: (…, hidden) -> (…, vocabulary)."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: None = None,
        encoder_attention_mask: None = None,
        labels: Tensor | None = None,
        past_key_values: None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> CausalLMOutputWithCrossAttentions | tuple:
        """Returns logits, (batch, length, vocabulary), and with `labels` the mean loss.

        Args:
            labels: (batch, length), token ids, not shifted: a token's target is the label of the
                next column. -100 where there is no target; padding never is one.
            encoder_hidden_states, encoder_attention_mask, past_key_values, use_cache: not
                supported.
            others: as in `EncoderModel.encode`.

        Raises:
            ValueError: something that is not supported is asked for.
        """
        _refuse(
            encoder_hidden_states=encoder_hidden_states,
            past_key_values=past_key_values,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache or None,
        )
        encoded = self.base_model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            head_mask,
            inputs_embeds,
            packed_rows,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits, rows = self.logits_of(encoded.last), encoded.rows
        loss = None
        if labels is not None:
            targets = next_labels(labels, _real(encoded))
            loss = mean_loss(logits, encoded.pack_labels(targets))
        output = CausalLMOutputWithCrossAttentions(loss, rows.pad(logits), *encoded.shown)
        return self._as_asked(output, return_dict)

    def generate(self, *_: Any, **__: Any) -> None:
        """Raises ValueError: this package does not generate text with encoders."""
        _refuse(generate=True)


def next_labels(labels: Tensor, real: Tensor) -> Tensor:
    """Returns, for each column, the label of the next one; -100 if that is not a token.

    Args:
        labels: (batch, length).
        real: (batch, length), whether a column is a token.
    """
    return F.pad(labels.masked_fill(~real, IGNORED_LABEL)[:, 1:], (0, 1), value=IGNORED_LABEL)


def _refuse(**given: Any) -> None:
    """Raises ValueError if an argument of decoding that is not supported is given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: this package's decoders have no cross-attention, no cache and no "
                "generation; for these, use upstream's transformers in a separate environment"
            )
