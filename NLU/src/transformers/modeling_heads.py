"""The heads of tagging, question answering, multiple choice and language generation.

What families share, as in modeling_encoder.py, which has the heads of pretraining and of GLUE:

    states ── classifier ─> a tag of every token                     EncoderForTokenClassification
    states ── two columns ─> start and end of an answer              EncoderForQuestionAnswering
    first tokens of a row's choices ── pooler, score ─> a choice     EncoderForMultipleChoice
    states ── vocabulary head ─> the token that follows each         EncoderForCausalLM

Heads run on packed tokens; logits are padded at last, and a loss sees no padding.
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
from .modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    TokenClassifierOutput,
)
from .modeling_padded import HIDDEN
from .modeling_utils import PreTrainedModel

# The label of what has no part in a loss.
IGNORED = -100


class VocabularyProjection(Linear):
    """Hidden states -> logits over a vocabulary, of some of a batch's tokens."""

    # For loralib.nn.products, which measures it for so many of them.
    rows_at_once = staticmethod(lambda dtype: 256)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the rows whose label is not -100; zero where none is.

    Args:
        logits: (rows, classes).
        labels: (rows,).
    """
    loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return loss / (labels != IGNORED).sum().clamp(min=1)


def _real(encoded: Encoded) -> Tensor:
    """(batch, length), False where there is padding."""
    # As a tensor's size, which a recorded graph keeps, not as a number.
    return encoded.rows.pad(torch.ones_like(encoded.last[:, 0]), fill=0) != 0


def _labels_of(encoded: Encoded, labels: Tensor) -> Tensor:
    """(batch, length) -> (tokens,); -100 at padding, which recorded graphs keep."""
    return encoded.rows.hide_padding(encoded.rows.pack(labels), fill=IGNORED)


def in_precision_of(layer: nn.Module, x: Tensor) -> Tensor:
    """x in the precision of a layer's weight; as it is where quantization has packed that."""
    weight = layer.weight
    return x.to(weight.dtype) if isinstance(weight, Tensor) else x


def in_own_precision(layer: nn.Linear, x: Tensor) -> Tensor:
    """A head's last product without autocast: it is cheap, and logits keep its precision."""
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
        """Logits (batch, length, labels) and, with `labels`, the mean loss.

        Args:
            labels: (batch, length), classes; -100 where a token counts for nothing, as padding does
                in any case.
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
        loss = None if labels is None else mean_loss(logits, _labels_of(encoded, labels))
        output = TokenClassifierOutput(loss, rows.pad(logits), *encoded.shown)
        return self._as_asked(output, return_dict)


class EncoderForQuestionAnswering(PreTrainedModel):
    """A backbone that scores each token as an answer's first and as its last.

    The answer is a span of the row's own tokens: the softmax of a loss is over these alone, so that
    it does not depend on how far the batch is padded. (Upstream's counts padding among the possible
    answers; without padding the two are the same.)

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
        """Logits of start and end and, with both positions, their mean loss.

        Logits are -10,000 at padding: its probability is 0, and a user's own loss of all columns,
        of distillation or of smoothed labels, stays finite.

        Args:
            start_positions, end_positions: (batch,), the columns of an answer's first and last
                token. One beyond the row's tokens counts for nothing: the answer is not in this
                part of its text. One below 0 is taken for 0.
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
    """Mean cross-entropy of where answers start or end.

    Args:
        logits: (batch, length), `HIDDEN` at padding.
        positions: (batch,) or (batch, 1), columns.
        real: (batch, length), what `_real` says.
    """
    columns = positions.flatten().clamp(0, logits.shape[1])
    # The last column, of what is beyond the batch, is of no token.
    is_token = F.pad(real, (0, 1))
    is_there = is_token.gather(1, columns[:, None])[:, 0]
    return mean_loss(logits, columns.masked_fill(~is_there, IGNORED))


class EncoderForMultipleChoice(PreTrainedModel):
    """A backbone that scores each of a row's choices, by its first token.

    To the backbone, and to a bank of adapters, each choice is a row.

    Attributes:
        dropout, classifier: the head, behind the backbone's pooler, which belongs to it.
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
        """Logits (batch, choices) and, with `labels`, the mean loss.

        Args:
            input_ids, token_type_ids, attention_mask, position_ids: (batch, choices, length).
            inputs_embeds: (batch, choices, length, hidden).
            labels: (batch,), the number of the right choice.
            packed_rows: of the choices one below the other, (batch · choices, length).
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

    With `is_decoder` in its settings, tokens look at those before them alone. Not carried, and
    refused: attention to an encoder's states, cached keys and values, and generation.
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
        """Logits (batch, length, vocabulary) and, with `labels`, the mean loss of the next tokens.

        Args:
            labels: (batch, length), token ids, of which a token's is that of the column after it;
                -100 where there is no target, as in padding in any case.
            encoder_hidden_states, encoder_attention_mask, past_key_values, use_cache: not carried.
            others: as in `EncoderModel.encode`.

        Raises:
            ValueError: something that is not carried is asked for.
        """
        _refuse(
            {"encoder_hidden_states": encoder_hidden_states, "past_key_values": past_key_values}
            | {"encoder_attention_mask": encoder_attention_mask, "use_cache": use_cache or None}
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
        loss = (
            None
            if labels is None
            else mean_loss(logits, _labels_of(encoded, _next_of(labels, _real(encoded))))
        )
        output = CausalLMOutputWithCrossAttentions(loss, rows.pad(logits), *encoded.shown)
        return self._as_asked(output, return_dict)

    def generate(self, *_: Any, **__: Any) -> None:
        """Refused: this package does not generate text from encoders."""
        _refuse({"generate": True})


def _next_of(labels: Tensor, real: Tensor) -> Tensor:
    """(batch, length), of each column the label of the next; -100 where that is no token."""
    return F.pad(labels.masked_fill(~real, IGNORED)[:, 1:], (0, 1), value=IGNORED)


def _refuse(given: dict[str, Any]) -> None:
    """Refuses what of decoding is not carried."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: this package's decoders have no cross-attention, no cache and no "
                "generation; upstream's transformers has them, in an environment of its own"
            )
