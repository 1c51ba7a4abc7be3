"""RoBERTa with LoRA, by default on attention's query and value projections, as published.

This file turns ids into a head's logits. The code shared with DeBERTa-v2, the layers around
attention and the forward passes, is in modeling_encoder.py. The encoder works on packed tokens,
(tokens, hidden); see loralib/nn/packing.py. adapters.py puts LoRA and bottleneck adapters into the
layers. Names are upstream's, so that published weights load.
Source: RoBERTa, arXiv 1907.11692; LoRA, arXiv 2106.09685, section 4.2.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora
from loralib.nn.fast_paths import is_recorded
from loralib.nn.norm import LayerNorm
from loralib.nn.packing import attend
from loralib.nn.products import Linear

from ...adapters import projection
from ...lora_placement import Placed, by_layer
from ...modeling_encoder import (
    AnyRows,
    Encoder,
    EncoderForMaskedLM,
    EncoderForSequenceClassification,
    EncoderLayer,
    EncoderModel,
    too_long,
)
from ...modeling_heads import (
    EncoderForCausalLM,
    EncoderForMultipleChoice,
    EncoderForQuestionAnswering,
    EncoderForTokenClassification,
    VocabularyProjection,
    first_tokens,
    in_precision_of,
)
from ...modeling_padded import PaddedAttention
from ...modeling_utils import PreTrainedModel
from ...utils import logging
from .configuration_roberta import RobertaConfig
from .family import ROBERTA

logger = logging.get_logger(__name__)


class RobertaEmbeddings(nn.Module):
    """Word + position + token-type embeddings, normalized.

    Args:
        config: the model's settings.

    Raises:
        ValueError: the settings ask for relative positions.
    """

    def __init__(self, config: RobertaConfig):
        super().__init__()
        kind = getattr(config, "position_embedding_type", "absolute")
        if kind != "absolute":
            raise ValueError(
                f"position_embedding_type is '{kind}': this package's RoBERTa has only absolute "
                "ones; for others, use upstream's transformers in a separate environment"
            )
        pad = config.pad_token_id
        self.padding_idx = pad
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=pad)
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, width, padding_idx=pad
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)

    def create_position_ids_from_inputs_embeds(self, inputs_embeds: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, length): padding_idx + 1, + 2, … in every row."""
        columns = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        return (columns + self.padding_idx + 1).expand(inputs_embeds.shape[:2])

    def _check_length(self, rows: AnyRows, position_ids: Tensor) -> None:
        """Checks that every token's position has an embedding."""
        longest = self.position_embeddings.num_embeddings - self.padding_idx - 1
        if is_recorded() or rows.used_columns <= longest:
            return  # decided without waiting for the device
        tokens = int(rows.pack(position_ids).max()) - self.padding_idx
        if tokens > longest:
            raise too_long(tokens, longest)

    def forward(
        self,
        rows: AnyRows,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Embeds a batch's ids; `inputs_embeds` take the place of word embeddings.

        Args:
            rows: where the tokens are.
            input_ids: (batch, length).
            token_type_ids: (batch, length); zeros by default.
            position_ids: (batch, length); by default padding_idx + 1, + 2, … on tokens.
            inputs_embeds: (batch, length, hidden), instead of `input_ids`.

        Returns:
            (tokens, hidden).

        Raises:
            ValueError: a row has more tokens than the model has positions.
        """
        if position_ids is None:
            if input_ids is not None:
                position_ids = create_position_ids_from_input_ids(input_ids, self.padding_idx)
            else:
                position_ids = self.create_position_ids_from_inputs_embeds(inputs_embeds)
            self._check_length(rows, position_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        if input_ids is not None:
            words = self.word_embeddings(rows.pack(input_ids))
        else:
            words = rows.pack(inputs_embeds)
        embedded = (
            words
            + self.token_type_embeddings(rows.pack(token_type_ids))
            + self.position_embeddings(rows.pack(position_ids))
        )
        return self.dropout(self.LayerNorm(embedded))


def create_position_ids_from_input_ids(
    input_ids: Tensor, padding_idx: int, past_key_values_length: int = 0
) -> Tensor:
    """Returns (batch, length): padding_idx + 1, + 2, … on tokens; padding_idx on padding.

    Args:
        input_ids: (batch, length).
        padding_idx: the id of padding.
        past_key_values_length: number of tokens before these.
    """
    real = input_ids.ne(padding_idx).long()
    return (real.cumsum(dim=1) + past_key_values_length) * real + padding_idx


class RobertaSelfAttention(nn.Module):
    """Multi-head attention without its output projection."""

    def __init__(self, config: RobertaConfig, placed: Mapping[str, Placed]):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout_p = config.attention_probs_dropout_prob
        self.causal = config.is_decoder
        self.query = projection(config, placed, "query", width, width)
        self.key = projection(config, placed, "key", width, width)
        self.value = projection(config, placed, "value", width, width)

    def forward(
        self,
        hidden: Tensor,
        queries: Tensor,
        rows: AnyRows,
        padded: PaddedAttention | None = None,
    ) -> Tensor:
        """Attends from `queries` to `hidden`; see `attend` for shapes."""
        dropout_p = self.dropout_p if self.training else 0.0
        q, k, v = self.query(queries), self.key(hidden), self.value(hidden)
        if padded is not None:
            scale = (q.shape[1] // self.heads) ** -0.5
            return padded.attend(q, k, v, self.heads, dropout_p, scale)
        return attend(q, k, v, rows, self.heads, dropout_p, self.causal)


class RobertaLayer(EncoderLayer):
    """An `EncoderLayer` with `RobertaSelfAttention`."""

    def __init__(self, config: RobertaConfig, placed: Mapping[str, Placed]):
        super().__init__(config, placed, RobertaSelfAttention(config, placed))


class RobertaEncoder(Encoder):
    """The layers in sequence."""

    def __init__(self, config: RobertaConfig):
        super().__init__(config, (RobertaLayer(config, placed) for placed in by_layer(config)))


class RobertaPooler(nn.Module):
    """tanh of a projection of the first token."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        return torch.tanh(self.dense(first))


class RobertaPreTrainedModel(PreTrainedModel):
    """The base class of RoBERTa's models."""

    config_class = RobertaConfig
    base_model_prefix = "roberta"


class RobertaModel(RobertaPreTrainedModel, EncoderModel):
    """The backbone.

    Args:
        config: its settings.
        add_pooling_layer: add BERT's pooler, which multiple choice uses.

    Raises:
        ValueError: the settings ask for cross-attention.
    """

    may_pool = True

    def __init__(self, config: RobertaConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        if config.add_cross_attention:
            raise ValueError("add_cross_attention: this package's decoders have no cross-attention")
        self.embeddings = RobertaEmbeddings(config)
        self.encoder = RobertaEncoder(config)
        self.pooler = RobertaPooler(config) if add_pooling_layer else None
        self.init_weights()


class RobertaLMHead(nn.Module):
    """Computes vocabulary logits; its weight is the word embedding's, unless untied."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = VocabularyProjection(config.hidden_size, config.vocab_size)
        self.bias = self.decoder.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocabulary)."""
        return self.decoder(self.layer_norm(F.gelu(self.dense(hidden))))


class RobertaForMaskedLM(RobertaPreTrainedModel, EncoderForMaskedLM):
    """RoBERTa with its pretraining head."""

    tied_weights: ClassVar[Mapping[str, str]] = ROBERTA.family.tied

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.lm_head = RobertaLMHead(config)
        self.init_weights()

    def logits_of(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocabulary)."""
        return self.lm_head(hidden)


class RobertaForCausalLM(RobertaPreTrainedModel, EncoderForCausalLM):
    """RoBERTa that predicts the next token; a decoder with `is_decoder` in its settings."""

    tied_weights: ClassVar[Mapping[str, str]] = ROBERTA.family.tied

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        if not config.is_decoder:
            logger.warning("without is_decoder=True in its config, tokens attend to later ones")
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.lm_head = RobertaLMHead(config)
        self.init_weights()

    def logits_of(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocabulary)."""
        return self.lm_head(hidden)


class RobertaClassificationHead(nn.Module):
    """dropout → dense → tanh → dropout → out_proj, in the precision of its own weights."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = lora.Dropout(config.head_dropout)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, first: Tensor) -> Tensor:
        """(batch, hidden), the first tokens, or all tokens' states as upstream -> (batch, labels).

        Autocast is off: one token per row is cheap in float32, and logits keep that precision.
        """
        first = first_tokens(first)
        with torch.autocast(first.device.type, enabled=False):
            first = self.dropout(in_precision_of(self.dense, first))
            return self.out_proj(self.dropout(torch.tanh(self.dense(first))))


class RobertaForSequenceClassification(RobertaPreTrainedModel, EncoderForSequenceClassification):
    """RoBERTa with a classifier on the first token, or a regressor if there is one label."""

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.classifier = RobertaClassificationHead(config)
        self.init_weights()

    def logits_of(self, first: Tensor) -> Tensor:
        """(batch, hidden), the first tokens -> (batch, labels)."""
        return self.classifier(first)


class RobertaForTokenClassification(RobertaPreTrainedModel, EncoderForTokenClassification):
    """RoBERTa with a classifier on every token."""

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.dropout = lora.Dropout(config.head_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.init_weights()


class RobertaForQuestionAnswering(RobertaPreTrainedModel, EncoderForQuestionAnswering):
    """RoBERTa with a head that finds where an answer starts and ends."""

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.roberta = RobertaModel(self.config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.init_weights()


class RobertaForMultipleChoice(RobertaPreTrainedModel, EncoderForMultipleChoice):
    """RoBERTa that scores choices; its pooler is trained with the head."""

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.roberta = RobertaModel(config)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.init_weights()
