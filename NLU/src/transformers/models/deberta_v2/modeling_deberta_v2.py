"""DeBERTa-v2 with LoRA, by default on attention's query and value projections, as published.

This file turns ids into a head's logits. Attention is in attention_deberta_v2.py. The code shared
with RoBERTa, the layers around attention and the forward passes, is in modeling_encoder.py.
The encoder works on packed tokens, (tokens, hidden); see loralib/nn/packing.py. adapters.py puts
LoRA and bottleneck adapters into the layers. Names are upstream's, so that published weights load.
Source: DeBERTa, arXiv 2006.03654, with version 2's convolution; LoRA, arXiv 2106.09685, section
4.2.
"""

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

import loralib as lora
from loralib.nn.fast_paths import is_recorded
from loralib.nn.norm import LayerNorm
from loralib.nn.packing import PackedRows
from loralib.nn.products import Linear

from ...activations import ACT2FN
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
    EncoderForQuestionAnswering,
    EncoderForTokenClassification,
    VocabularyProjection,
    first_tokens,
    in_own_precision,
    in_precision_of,
)
from ...modeling_padded import PaddedAttention, PaddedRows, visible
from ...modeling_utils import PreTrainedModel
from .attention_deberta_v2 import (
    SPARE_ON_GPU,
    Batch,
    DisentangledSelfAttention,
    RelativePositions,
    relative_rows,
    row_of,
)
from .configuration_deberta_v2 import DebertaV2Config
from .family import DEBERTA_V2

# Upstream's name for the dropout of its heads, which heads written for it import.
StableDropout = lora.Dropout


class DebertaV2Embeddings(nn.Module):
    """Word embeddings, plus position and token-type embeddings if configured, normalized."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(
            config.vocab_size, width, padding_idx=config.pad_token_id
        )
        self.position_embeddings = self.token_type_embeddings = None
        if config.position_biased_input:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        if config.type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)

    def columns(self, rows: AnyRows) -> Tensor:
        """Returns each token's column in the batch, (tokens,).

        Raises:
            ValueError: a token is in a column that the model has no position for.
        """
        known = self.position_embeddings.num_embeddings
        if not is_recorded() and rows.used_columns > known:
            raise too_long(rows.used_columns, known)
        return rows.positions

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
            position_ids: (batch, length); by default the columns of the batch.
            inputs_embeds: (batch, length, hidden), instead of `input_ids`.

        Returns:
            (tokens, hidden).
        """
        if input_ids is not None:
            embedded = self.word_embeddings(rows.pack(input_ids))
        else:
            embedded = rows.pack(inputs_embeds)
        if self.position_embeddings is not None:
            own = self.columns(rows) if position_ids is None else rows.pack(position_ids)
            embedded = embedded + self.position_embeddings(own)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                types = torch.zeros_like(rows.positions)
            else:
                types = rows.pack(token_type_ids)
            embedded = embedded + self.token_type_embeddings(types)
        return self.dropout(rows.hide_padding(self.LayerNorm(embedded)))


# ---- encoder ----


class ConvLayer(nn.Module):
    """A convolution over neighboring tokens' embeddings, parallel to the first layer."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        width = config.hidden_size
        self.conv = nn.Conv1d(
            width,
            width,
            config.conv_kernel_size,
            padding=config.conv_kernel_size // 2,
            groups=config.conv_groups,
        )
        self.LayerNorm = LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)
        self.activation = ACT2FN[config.conv_act]

    def forward(self, embedded: Tensor, output: Tensor, rows: AnyRows) -> Tensor:
        """Adds the convolution of `embedded` to the first layer's `output`, and normalizes.

        Args:
            embedded: (tokens, hidden); padding and positions beyond a row's ends count as zero.
            output: (tokens, hidden), or (batch, hidden) for each row's first token alone.
            rows: which tokens belong to which row.
        """
        seen = rows.pack(self.conv(rows.pad(embedded).transpose(1, 2)).transpose(1, 2))
        if len(output) != len(seen):
            seen = seen[rows.first]
        return rows.hide_padding(self.LayerNorm(output + self.activation(self.dropout(seen))))


class DebertaV2Layer(EncoderLayer):
    """An `EncoderLayer` with `DisentangledSelfAttention`."""

    def __init__(self, config: DebertaV2Config, placed: Mapping[str, Placed]):
        super().__init__(config, placed, DisentangledSelfAttention(config, placed))


# Devices that copy from pinned memory asynchronously.
_FROM_PINNED_MEMORY = ("cuda",)
# On a GPU, PyTorch copies attention's bias in every layer unless its number of columns is a
# multiple of this.
_ALIGNED = 8


class DebertaV2Encoder(Encoder):
    """The layers in sequence, and what they share.

    Attributes:
        rel_embeddings: the distances' embeddings, (2 · attention_span, hidden).
        LayerNorm: normalizes them, if `norm_rel_ebd` is "layer_norm".
        conv: the convolution parallel to the first layer, or None.
    """

    def __init__(self, config: DebertaV2Config):
        super().__init__(config, (DebertaV2Layer(config, placed) for placed in by_layer(config)))
        width = config.hidden_size
        if config.relative_attention:
            self.rel_embeddings = nn.Embedding(2 * config.attention_span, width)
        if config.norm_rel_ebd == "layer_norm":
            self.LayerNorm = LayerNorm(width, eps=config.layer_norm_eps)
        self.conv = ConvLayer(config) if config.conv_kernel_size > 0 else None
        # One of each size and device that was needed. CUDA graphs may read any of them.
        self._rows_of_distances: list[Tensor] = []

    def relative_positions(self, length: int) -> RelativePositions | None:
        """Returns the distances within rows of `length` columns; None if no term uses them."""
        config = self.config
        if not config.relative_attention or not config.pos_att_type:
            return None
        first, last = (
            row_of(distance, config.position_buckets, config.furthest)
            for distance in (1 - length, length - 1)
        )
        embeddings = self.rel_embeddings.weight[first : last + 1]
        if config.norm_rel_ebd == "layer_norm":
            embeddings = self.LayerNorm(embeddings)
        of_distances = self._rows_on_device(length) - first
        return RelativePositions(embeddings, of_distances, of_distances.flip(0))

    def _rows_on_device(self, length: int) -> Tensor:
        """Returns `relative_rows` of a length, from a table that is copied to the device once."""
        config, device = self.config, self.rel_embeddings.weight.device
        if is_recorded():  # a tensor made while tracing must not be kept
            rows = relative_rows(length, config.position_buckets, config.furthest)
            return torch.tensor(rows, device=device)
        known = (t for t in self._rows_of_distances if t.device == device)
        table = next((t for t in known if len(t) >= 2 * length - 1), None)
        if table is None:
            longest = max(length, config.max_position_embeddings)
            rows = relative_rows(longest, config.position_buckets, config.furthest)
            with torch.inference_mode(False):  # training may use the table later
                table = torch.tensor(rows, device="cpu")
                # PyTorch's compiler has no rule for pinned memory.
                if device.type in _FROM_PINNED_MEMORY and not torch.compiler.is_compiling():
                    table = table.pin_memory()
                table = table.to(device, non_blocking=True)
            self._rows_of_distances.append(table)
        middle = len(table) // 2
        return table[middle - length + 1 : middle + length]

    def describe(self, rows: AnyRows) -> Batch:
        """Returns what every layer needs to know about a batch; called once per forward pass."""
        spare = 0
        if isinstance(rows, PackedRows) and rows.index.is_cuda:
            rows = rows.widened(-(-rows.shape[1] // _ALIGNED) * _ALIGNED)
            spare = SPARE_ON_GPU
        # A graph that is recorded has to work for batches of any length.
        length = self.config.max_position_embeddings if is_recorded() else rows.shape[1]
        relative = self.relative_positions(length + spare)
        return Batch(rows, relative, self.config.num_attention_heads)

    def after_layer(self, index: int, seen: Tensor, output: Tensor, rows: AnyRows) -> Tensor:
        """Returns a layer's output; after the first layer, adds the convolution to it."""
        if index > 0 or self.conv is None:
            return output
        return self.conv(seen, output, rows)


# ---- models ----


class DebertaV2PreTrainedModel(PreTrainedModel):
    """Initializes DeBERTa-v2's LoRA, and renames the weights of old files."""

    config_class = DebertaV2Config
    base_model_prefix = "deberta"

    def _initialize_lora(self, layer: lora.LoRALayer) -> None:
        super()._initialize_lora(layer)
        if layer.initialization == "default":
            nn.init.normal_(layer.lora_A, std=self.config.initializer_range)

    def _match_names(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Does what `PreTrainedModel` does, and knows the names in the first published files too.

        Those files call the language-model head ``lm_predictions``, and may hold absolute
        positions, which only that head's pretraining used.
        """
        renamed = {}
        for name, tensor in tensors.items():
            name = re.sub(r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias", name)
            name = re.sub(r"^lm_predictions\.lm_head\.", "cls.predictions.transform.", name)
            absolute = name.endswith("embeddings.position_embeddings.weight")
            if self.config.position_biased_input or not absolute:
                renamed[name] = tensor
        return super()._match_names(renamed, own)


class DebertaV2Model(DebertaV2PreTrainedModel, EncoderModel):
    """The backbone."""

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.embeddings = DebertaV2Embeddings(config)
        self.encoder = DebertaV2Encoder(config)
        self.pooler = None  # the classifier has one
        self.init_weights()

    def _prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        raise NotImplementedError(
            "prune_heads: DeBERTa-v2's heads cannot be pruned, neither here nor upstream"
        )

    def _padded_attention(
        self, rows: PaddedRows, given: Tensor, head_mask: Tensor | None, is_shown: bool
    ) -> list[PaddedAttention]:
        """Does what `EncoderModel` does, but padding attends to nothing, as in the release.

        In upstream's later versions, padding attends to all columns alike. That shows in the
        classification of rows that start with padding.
        """
        if head_mask is not None:
            raise TypeError("DeBERTa-v2 has no head_mask; pass embeddings as inputs_embeds=")
        if rows.mask is not None and rows.mask.dim() > 2:
            raise ValueError(
                f"attention_mask is {tuple(rows.mask.shape)}: DeBERTa-v2 takes (batch, length)"
            )
        seen = visible(rows.mask, causal=False, like=given)
        if seen is not None:
            seen = seen & seen.transpose(2, 3)
        layers = range(self.config.num_hidden_layers)
        return [PaddedAttention(rows, seen, blank=True, is_shown=is_shown) for _ in layers]


class DebertaV2PredictionHeadTransform(nn.Module):
    """The layers before the vocabulary projection: dense → activation → norm."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, hidden)."""
        return self.LayerNorm(self.activation(self.dense(hidden)))


class DebertaV2LMPredictionHead(nn.Module):
    """Computes vocabulary logits; its weight is the word embedding's, unless untied."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        self.transform = DebertaV2PredictionHeadTransform(config)
        self.decoder = VocabularyProjection(config.hidden_size, config.vocab_size)
        self.bias = self.decoder.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocabulary)."""
        return self.decoder(self.transform(hidden))


class DebertaV2OnlyMLMHead(nn.Module):
    """The language-model head under the name that checkpoints give it."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        self.predictions = DebertaV2LMPredictionHead(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocabulary)."""
        return self.predictions(hidden)


class DebertaV2ForMaskedLM(DebertaV2PreTrainedModel, EncoderForMaskedLM):
    """DeBERTa-v2 with its pretraining head."""

    tied_weights: ClassVar[Mapping[str, str]] = DEBERTA_V2.family.tied

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.deberta = DebertaV2Model(config)
        self.cls = DebertaV2OnlyMLMHead(config)
        self.init_weights()

    def logits_of(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocabulary)."""
        return self.cls(hidden)


class ContextPooler(nn.Module):
    """dropout → dense → activation, in the precision of its own weights."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = lora.Dropout(config.pooler_dropout)
        self.activation = ACT2FN[config.pooler_hidden_act]

    @property
    def output_dim(self) -> int:
        """The width of the output."""
        return self.dense.out_features

    def forward(self, first: Tensor) -> Tensor:
        """(batch, hidden), the first tokens, or all tokens' states as upstream -> pooled states."""
        first = first_tokens(first)
        with torch.autocast(first.device.type, enabled=False):
            first = self.dropout(in_precision_of(self.dense, first))
            return self.activation(self.dense(first))


class DebertaV2ForSequenceClassification(
    DebertaV2PreTrainedModel, EncoderForSequenceClassification
):
    """DeBERTa-v2 with a classifier on the first token, or a regressor if there is one label."""

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.deberta = DebertaV2Model(config)
        self.pooler = ContextPooler(config)
        dropout_p = config.cls_dropout
        self.dropout = lora.Dropout(config.hidden_dropout_prob if dropout_p is None else dropout_p)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.init_weights()

    def logits_of(self, first: Tensor) -> Tensor:
        """(batch, hidden), the first tokens -> (batch, labels)."""
        return in_own_precision(self.classifier, self.dropout(self.pooler(first)))


class DebertaV2ForTokenClassification(DebertaV2PreTrainedModel, EncoderForTokenClassification):
    """DeBERTa-v2 with a classifier on every token."""

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.deberta = DebertaV2Model(config)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.init_weights()


class DebertaV2ForQuestionAnswering(DebertaV2PreTrainedModel, EncoderForQuestionAnswering):
    """DeBERTa-v2 with a head that finds where an answer starts and ends."""

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.deberta = DebertaV2Model(self.config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.init_weights()
