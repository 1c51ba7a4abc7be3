"""DeBERTa-v2 with LoRA, as published on its attention's query and value projections.

Disentangled attention depends on two tokens' contents and on the distance between them. With
content queries Q and keys K, and P, projected embeddings of the distance i - j:

    score(i, j)  =  ( Q_i · K_j  +  Q_i · P_key(i - j)  +  P_query(i - j) · K_j ) / √(d (1 + terms))
                       content            "c2p"                    "p2c"

Each position term is one product with all distances that occur, and a view of its result: see
loralib/nn/distances.py. What depends on distances alone is computed once a forward, see `Batch`.

This file goes from the ids to a head's logits. What RoBERTa has as well, the layers around
attention and the forward passes, is in modeling_encoder.py. The encoder works on packed tokens,
(tokens, hidden); see loralib/nn/packing.py. adapters.py says where LoRA and bottleneck
adapters go. Names are upstream's, so that published weights load.
Source: DeBERTa, arXiv 2006.03654, section 3, with version 2's buckets, shared projections and
convolution; LoRA, arXiv 2106.09685, section 4.2.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora
from loralib.nn.distances import skew
from loralib.nn.norm import LayerNorm
from loralib.nn.packing import PackedRows
from loralib.nn.products import Linear, linear, matmul
from loralib.nn.routing import for_each_segment
from loralib.nn.row_attention import attend_rows, trains_on_cpu

from ...activations import ACT2FN
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
    EncoderForQuestionAnswering,
    EncoderForTokenClassification,
    VocabularyProjection,
    in_precision_of,
)
from ...modeling_plain import PaddedRows, PlainAttention, visible
from ...modeling_utils import PreTrainedModel
from .configuration_deberta_v2 import DebertaV2Config
from .family import DEBERTA_V2


class DebertaV2Embeddings(nn.Module):
    """Word embeddings, with position and token-type embeddings where there are such, normalized."""

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
        """(tokens,): the column of the batch that each token stands in.

        Raises:
            ValueError: a token stands where the model has no position.
        """
        known = self.position_embeddings.num_embeddings
        if max(rows.spans) > known:
            raise too_long(max(rows.spans), known)
        return rows.positions

    def forward(
        self,
        rows: AnyRows,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Ids, each (batch, length), or embeddings (batch, length, hidden) -> (tokens, hidden)."""
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


# ---- disentangled attention ----


def relative_rows(length: int, buckets: int, furthest: int) -> tuple[int, ...]:
    """Rows of the relative positions' embedding for distances from 1 - length to length - 1.

    Args:
        length: tokens of the longest sequence.
        buckets: rows in each direction. Distances up to half of it have a row each, further ones
            share rows by their logarithm. With 0 or less, each distance has its own row.
        furthest: distances from this one on are clamped.

    Returns:
        2 · length - 1 rows, ascending.
    """
    return tuple(_row(distance, buckets, furthest) for distance in range(1 - length, length))


def _row(distance: int, buckets: int, furthest: int) -> int:
    span = buckets if buckets > 0 else furthest
    return min(max(span + _bucket(distance, buckets, furthest), 0), 2 * span - 1)


def _bucket(distance: int, buckets: int, furthest: int) -> int:
    middle = buckets // 2
    if buckets <= 0 or abs(distance) <= middle:
        return distance
    share = math.log(abs(distance) / middle) / math.log((furthest - 1) / middle)
    bucket = middle + math.ceil(share * (middle - 1))
    return bucket if distance > 0 else -bucket


# Keys and queries of distances, (2 · length - 1, hidden); None for a term that there is not. On a
# GPU, the length is that of the rows and one more; see `_SPARE_ON_GPU`.
_Positions = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class RelativePositions:
    """The distances within a batch.

    Args:
        embeddings: (rows, hidden), the rows of the relative positions' embedding that occur.
        rows: (2 · length - 1,), which of them each distance has, from 1 - length to length - 1.
        reversed_rows: the same from length - 1 to 1 - length.
    """

    embeddings: Tensor
    rows: Tensor
    reversed_rows: Tensor


class Batch:
    """What all layers use of a batch; made once a forward.

    Args:
        rows: where its tokens are.
        relative: its distances; None where attention does not use them.
        heads: attention heads.

    Attributes:
        padding: (batch, 1, 1, length), True on padding; None without padding.
        by_row: attention is computed row by row where nothing is trained.
        first: as in `PackedRows`.
        segments: of rows that share an adapter (see loralib/nn/routing.py), each as a batch; none
            where there is but one.
    On the plain path, the last three stay empty.
    """

    def __init__(self, rows: AnyRows, relative: RelativePositions | None, heads: int):
        self.rows, self.first = rows, rows.first
        self.relative = relative
        self.padding, self.by_row = None, False
        self.segments: list[Batch] = []
        if isinstance(rows, PackedRows):
            self._describe_packed(rows, heads)

    def _describe_packed(self, rows: PackedRows, heads: int) -> None:
        if len(rows.index) < rows.shape.numel():
            self.padding = ~rows.is_token[:, None, None, :]
        # On a GPU one kernel takes all rows, and a graph that is compiled for any number of tokens
        # has no loop over them.
        at_once = rows.index.is_cuda or torch.compiler.is_compiling()
        self.by_row = not at_once and not self._padding_is_cheap(heads)
        if len(rows.segments) > 1:
            parts = map(rows.part, rows.segments)
            self.segments = [Batch(part, self.relative, heads) for part in parts]

    @property
    def is_dense(self) -> bool:
        """Whether no row has padding between its tokens, so that its length says its distances."""
        return self.rows.spans == self.rows.lengths

    def _padding_is_cheap(self, heads: int) -> bool:
        """Whether attention over padding costs less than taking rows one by one.

        On a CPU a row costs about 0.5 ms of calls, a score about 60 ns.
        """
        rows, (count, longest) = self.rows, self.rows.shape
        wasted = heads * (count * longest**2 - sum(length**2 for length in rows.lengths))
        return wasted < 8_000 * count or not self.is_dense


class DisentangledSelfAttention(nn.Module):
    """Multi-head attention to contents and distances, without its output projection.

    Where keys are shared, the content's projections are the distances' too: the query's those of
    the "p2c" term, the key's those of "c2p". As in the release, LoRA reaches contents alone, and
    distances are projected by the frozen weight. With `config.lora_positions` it reaches both, as
    PEFT's does: in a batch with several such adapters each segment has distances of its own, and
    attention takes segment after segment. See loralib/nn/positions.py.

    Attributes:
        shared_with_positions: names of the projections that are the distances' too.
        lora_positions: whether LoRA in these reaches distances.
    """

    def __init__(self, config: DebertaV2Config, placed: Mapping[str, Placed]):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout_p = config.attention_probs_dropout_prob
        self.scale = (width // self.heads * (1 + len(config.pos_att_type))) ** -0.5
        self.query_proj = projection(config, placed, "query", width, width)
        self.key_proj = projection(config, placed, "key", width, width)
        self.value_proj = projection(config, placed, "value", width, width)
        terms = config.pos_att_type if config.relative_attention else ()
        self.c2p, self.p2c = "c2p" in terms, "p2c" in terms
        self.config = config
        self.share_att_key, self.lora_positions = config.share_att_key, config.lora_positions
        self.pos_dropout = lora.Dropout(config.hidden_dropout_prob)
        if self.c2p and not self.share_att_key:
            self.pos_key_proj = Linear(width, width)
        if self.p2c and not self.share_att_key:
            self.pos_query_proj = Linear(width, width)

    @property
    def shared_with_positions(self) -> tuple[str, ...]:
        """Names of the projections that are the distances' too."""
        if not self.share_att_key:
            return ()
        terms = {"key_proj": self.c2p, "query_proj": self.p2c}
        return tuple(name for name, is_there in terms.items() if is_there)

    def unshare_positions(self) -> None:
        """Gives distances projections of their own, which compute what the shared ones do."""
        for name in self.shared_with_positions:
            setattr(self, f"pos_{name}", _plain_copy(self.get_submodule(name)))
        self.share_att_key = self.config.share_att_key = False

    def _position_projection(self, name: str) -> Callable[[Tensor], Tensor]:
        """What projects distances for a term: (n, hidden) -> the same."""
        if name not in self.shared_with_positions:
            return self.get_submodule(f"pos_{name}")
        shared = self.get_submodule(name)
        if isinstance(shared, lora.Linear) and not self.lora_positions:
            return partial(linear, weight=shared.weight, bias=shared.bias)
        return shared

    def forward(
        self,
        hidden: Tensor,
        queries: Tensor,
        batch: Batch,
        plain: PlainAttention | None = None,
    ) -> Tensor:
        """What `queries` gather from `hidden`.

        Args:
            hidden: (tokens, hidden).
            queries: the same or, for each row's first token alone, (batch, hidden).
            batch: which tokens make a row.
            plain: as in `EncoderLayer.forward`.

        Returns:
            The same shape as `queries`.
        """
        q, k, v = self.query_proj(queries), self.key_proj(hidden), self.value_proj(hidden)
        positions = self._project_positions(batch)
        if plain is not None:
            return self._attend_plainly(q, k, v, positions, plain)
        if not batch.segments:
            return self._attend_segment(q, k, v, positions[0], batch)
        of_keys = [len(segment.rows.index) for segment in batch.segments]
        firsts = [len(segment.first) for segment in batch.segments]
        of_queries = of_keys if len(q) == len(k) else firsts
        tensors = (q.split(of_queries), k.split(of_keys), v.split(of_keys))
        parts = zip(*tensors, positions, batch.segments, strict=True)
        return torch.cat([self._attend_segment(*part) for part in parts])

    def _project_positions(self, batch: Batch) -> list[_Positions]:
        """For each segment, keys and queries of distances, scaled.

        Keys go from key - query = 1 - length to length - 1, as in the picture at the module's head;
        queries go from query - key = 1 - length to length - 1.
        """
        relative = batch.relative
        keys = queries = [None] * len(batch.rows.segments)
        if relative is None:
            return list(zip(keys, queries, strict=True))
        embeddings = self.pos_dropout(relative.embeddings)
        if self.c2p:
            project = self._position_projection("key_proj")
            keys = self._of_distances(project, embeddings, relative.reversed_rows)
        if self.p2c:
            project = self._position_projection("query_proj")
            queries = self._of_distances(project, embeddings, relative.rows)
        return list(zip(keys, queries, strict=True))

    def _of_distances(
        self, project: Callable[[Tensor], Tensor], embeddings: Tensor, rows: Tensor
    ) -> list[Tensor]:
        """For each segment, the scaled projections of these rows of the embeddings."""
        projected = for_each_segment(project, embeddings)
        return [(each * self.scale).index_select(0, rows) for each in projected]

    def _attend_plainly(
        self, q: Tensor, k: Tensor, v: Tensor, positions: list[_Positions], plain: PlainAttention
    ) -> Tensor:
        """All rows at once, with attention's probabilities at hand."""
        query, key = (plain.by_head(x, self.heads) for x in (q, k))
        parts = zip(positions, plain.rows.segments, strict=True)
        scores = [_position_scores(query[part], key[part], *terms) for terms, part in parts]
        of_positions = None if scores[0] is None else torch.cat(scores)
        dropout_p = self.dropout_p if self.training else 0.0
        return plain.attend(q, k, v, self.heads, dropout_p, self.scale, of_positions)

    def _attend_segment(
        self, q: Tensor, k: Tensor, v: Tensor, positions: _Positions, batch: Batch
    ) -> Tensor:
        """Attention within rows that share an adapter; `batch` is theirs."""
        dropout_p = self.dropout_p if self.training else 0.0
        if trains_on_cpu(q, k, v, *positions, dropout_p=dropout_p) and batch.is_dense:
            settings = {"scale": self.scale, "c2p": positions[0], "p2c": positions[1]}
            return attend_rows(q, k, v, batch.rows.lengths, self.heads, dropout_p, **settings)
        attend = self._attend_rows if batch.by_row else self._attend_padded
        return attend(q, k, v, positions, batch)

    def _attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, positions: _Positions, batch: Batch
    ) -> Tensor:
        """Row by row: no padding."""
        lengths = batch.rows.lengths
        of_queries = lengths if len(q) == len(k) else [1] * len(lengths)
        parts = zip(q.split(of_queries), k.split(lengths), v.split(lengths), strict=True)
        attended = [self._attend(*(x[None] for x in row), positions, None) for row in parts]
        return torch.cat([row[0] for row in attended])

    def _attend_padded(
        self, q: Tensor, k: Tensor, v: Tensor, positions: _Positions, batch: Batch
    ) -> Tensor:
        """All rows at once, over the padded batch."""
        rows = batch.rows
        if len(q) != len(k):
            q, k, v = q[:, None], rows.pad(k), rows.pad(v)
            return self._attend(q, k, v, positions, batch.padding)[:, 0]
        return rows.pack(self._attend(*map(rows.pad, (q, k, v)), positions, batch.padding))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: _Positions,
        padding: Tensor | None,
    ) -> Tensor:
        """Attention of (batch, queries, hidden) to (batch, keys, hidden)."""
        query, key, value = (x.unflatten(2, (self.heads, -1)) for x in (query, key, value))
        bias = _position_scores(query, key, *positions)
        if bias is not None and padding is not None:
            bias = bias.masked_fill(padding, float("-inf"))
        elif padding is not None:
            bias = ~padding
        parts = (x.transpose(1, 2) for x in (query, key, value))
        dropout_p = self.dropout_p if self.training else 0.0
        return _attention(*parts, bias, self.scale, dropout_p).transpose(1, 2).flatten(2)


def _plain_copy(layer: nn.Linear) -> nn.Linear:
    """A linear layer with a copy of another's weight and bias, and without its LoRA."""
    copy = nn.Linear(layer.in_features, layer.out_features, device="meta")
    for name in ("weight", "bias"):
        own = getattr(layer, name)
        setattr(copy, name, nn.Parameter(own.detach().clone(), requires_grad=own.requires_grad))
    return copy.train(layer.training)


# Distances that are multiplied with and not read: as many queries as keys have an odd number of
# them, which is not aligned in memory, as a GPU's fast kernels need it.
_SPARE_ON_GPU = 1


def _position_scores(
    query: Tensor, key: Tensor, pos_key: Tensor | None, pos_query: Tensor | None
) -> Tensor | None:
    """The position terms, (batch, heads, queries, keys), or None without any.

    Args:
        query: (batch, queries, heads, dim), of the first tokens of the rows.
        key: (batch, keys, heads, dim).
        pos_key, pos_query: as `_project_positions` gives them, for rows at least as long as these.
    """
    terms = []
    queries, keys = query.shape[1], key.shape[1]
    spare = _SPARE_ON_GPU if query.is_cuda and queries > 1 else 0
    if pos_key is not None:
        zero = len(pos_key) // 2
        pos_key = pos_key[zero - queries + 1 : zero + keys + spare]
        terms.append(skew(_products(query, pos_key), keys))
    if pos_query is not None:
        zero = len(pos_query) // 2
        pos_query = pos_query[zero - keys + 1 : zero + queries + spare]
        terms.append(skew(_products(key, pos_query), queries).transpose(-1, -2))
    return sum(terms[1:], terms[0]).transpose(0, 1) if terms else None


def _products(content: Tensor, positions: Tensor) -> Tensor:
    """(batch, tokens, heads, dim), (distances, hidden) -> (heads, batch, tokens, distances)."""
    batch, tokens, heads, dim = content.shape
    by_head = positions.view(-1, heads, dim).permute(1, 2, 0)
    products = matmul(content.reshape(-1, heads, dim).transpose(0, 1), by_head)
    return products.unflatten(1, (batch, tokens))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Attention of (batch, heads, length, dim).

    `bias` is added to the scores, or is False where no token may look.
    """
    if dropout_p == 0 or query.is_cuda:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=scale
        )
    # On a CPU, PyTorch's fused attention has no dropout, and its dropout is slow.
    scores = (query * scale) @ key.transpose(2, 3)
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, float("-inf"))
    elif bias is not None:
        scores = scores + bias
    return lora.dropout(scores.softmax(dim=-1), dropout_p, training=True) @ value


# ---- encoder ----


class ConvLayer(nn.Module):
    """A convolution over the embeddings, parallel to the first layer: it sees neighbours."""

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
            embedded: (tokens, hidden); padding, and what is beyond a row's ends, counts as zero.
            output: (tokens, hidden), or (batch, hidden) for each row's first token alone.
            rows: which tokens make a row.
        """
        seen = rows.pack(self.conv(rows.pad(embedded).transpose(1, 2)).transpose(1, 2))
        if len(output) != len(seen):
            seen = seen[rows.first]
        return rows.hide_padding(self.LayerNorm(output + self.activation(self.dropout(seen))))


class DebertaV2Layer(EncoderLayer):
    """An `EncoderLayer` with `DisentangledSelfAttention`."""

    def __init__(self, config: DebertaV2Config, placed: Mapping[str, Placed]):
        super().__init__(config, placed, DisentangledSelfAttention(config, placed))


# Devices that copy from such memory without being waited for.
_FROM_PINNED_MEMORY = ("cuda",)
# Columns of scores. On a GPU, PyTorch copies a bias of another number of them, in every layer.
_ALIGNED = 8


class DebertaV2Encoder(Encoder):
    """The layers one after the other, and what they share.

    Attributes:
        rel_embeddings: (2 · attention_span, hidden), of distances.
        LayerNorm: on these, where `norm_rel_ebd` asks for it.
        conv: the convolution parallel to the first layer; None without.
    """

    def __init__(self, config: DebertaV2Config):
        super().__init__(config, (DebertaV2Layer(config, placed) for placed in by_layer(config)))
        width = config.hidden_size
        if config.relative_attention:
            self.rel_embeddings = nn.Embedding(2 * config.attention_span, width)
        if config.norm_rel_ebd == "layer_norm":
            self.LayerNorm = LayerNorm(width, eps=config.layer_norm_eps)
        self.conv = ConvLayer(config) if config.conv_kernel_size > 0 else None
        self._rows_of_distances: Tensor | None = None

    def relative_positions(self, length: int) -> RelativePositions | None:
        """The distances within rows of `length` columns; None where no term uses them."""
        config = self.config
        if not config.relative_attention or not config.pos_att_type:
            return None
        first, last = (
            _row(distance, config.position_buckets, config.furthest)
            for distance in (1 - length, length - 1)
        )
        embeddings = self.rel_embeddings.weight[first : last + 1]
        if config.norm_rel_ebd == "layer_norm":
            embeddings = self.LayerNorm(embeddings)
        of_distances = self._rows_on_device(length) - first
        return RelativePositions(embeddings, of_distances, of_distances.flip(0))

    def _rows_on_device(self, length: int) -> Tensor:
        """What `relative_rows` gives for a length: part of a table that is copied there once."""
        config, device = self.config, self.rel_embeddings.weight.device
        if torch.jit.is_tracing():  # whose tensors are not to be kept
            rows = relative_rows(length, config.position_buckets, config.furthest)
            return torch.tensor(rows, device=device)
        table = self._rows_of_distances
        if table is None or table.device != device or len(table) < 2 * length - 1:
            longest = max(length, config.max_position_embeddings)
            rows = relative_rows(longest, config.position_buckets, config.furthest)
            with torch.inference_mode(False):  # training uses it as well
                table = torch.tensor(rows, device="cpu")
                # PyTorch's compiler has no rule for pinned memory.
                if device.type in _FROM_PINNED_MEMORY and not torch.compiler.is_compiling():
                    table = table.pin_memory()
                table = table.to(device, non_blocking=True)
            self._rows_of_distances = table
        middle = len(table) // 2
        return table[middle - length + 1 : middle + length]

    def describe(self, rows: AnyRows) -> Batch:
        """What every layer is told of a batch; computed once a forward."""
        # A recorded graph is for batches of any length.
        tracing = torch.jit.is_tracing()
        spare = 0
        if isinstance(rows, PackedRows) and rows.index.is_cuda:
            rows = rows.widened(-(-rows.shape[1] // _ALIGNED) * _ALIGNED)
            spare = _SPARE_ON_GPU
        length = self.config.max_position_embeddings if tracing else rows.shape[1]
        relative = self.relative_positions(length + spare)
        return Batch(rows, relative, self.config.num_attention_heads)

    def after_layer(self, index: int, seen: Tensor, output: Tensor, rows: AnyRows) -> Tensor:
        """The layer's output; the first one's with the convolution's added."""
        if index > 0 or self.conv is None:
            return output
        return self.conv(seen, output, rows)


# ---- models ----


class DebertaV2PreTrainedModel(PreTrainedModel):
    """How DeBERTa-v2's LoRA is initialized, and what old files call its weights."""

    config_class = DebertaV2Config
    base_model_prefix = "deberta"

    def _initialize_lora(self, layer: lora.LoRALayer) -> None:
        super()._initialize_lora(layer)
        if layer.initialization == "default":
            nn.init.normal_(layer.lora_A, std=self.config.initializer_range)

    def _match_names(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """As in `PreTrainedModel`, for the names of the first published files as well.

        Those call the language-model head ``lm_predictions``, and may hold absolute positions,
        which only that head's pretraining used.
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
        raise NotImplementedError("prune_heads: DeBERTa-v2's heads cannot be pruned, as upstream's")

    def _plain(
        self, rows: PaddedRows, given: Tensor, head_mask: Tensor | None, is_shown: bool
    ) -> list[PlainAttention]:
        """As in `EncoderModel`; padding looks at nothing, as it does upstream."""
        if head_mask is not None:
            raise TypeError("head_mask: DeBERTa-v2 takes none; embeddings are inputs_embeds=…")
        if rows.mask is not None and rows.mask.dim() > 2:
            raise ValueError(
                f"attention_mask is {tuple(rows.mask.shape)}: DeBERTa-v2 takes (batch, length)"
            )
        seen = visible(rows.mask, causal=False, like=given)
        if seen is not None:
            seen = seen & seen.transpose(2, 3)
        layers = range(self.config.num_hidden_layers)
        return [PlainAttention(rows, seen, blank=True, is_shown=is_shown) for _ in layers]


class DebertaV2PredictionHeadTransform(nn.Module):
    """What comes before the vocabulary: dense → activation → norm."""

    def __init__(self, config: DebertaV2Config):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, hidden)."""
        return self.LayerNorm(self.activation(self.dense(hidden)))


class DebertaV2LMPredictionHead(nn.Module):
    """Vocabulary logits; the projection is the word embedding itself."""

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
    """DeBERTa-v2 with the head that it is pretrained with."""

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

    def forward(self, first: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        with torch.autocast(first.device.type, enabled=False):
            first = self.dropout(in_precision_of(self.dense, first))
            return self.activation(self.dense(first))


class DebertaV2ForSequenceClassification(
    DebertaV2PreTrainedModel, EncoderForSequenceClassification
):
    """DeBERTa-v2 with a classifier, or with one label a regressor, on the first token."""

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.deberta = DebertaV2Model(config)
        self.pooler = ContextPooler(config)
        dropout_p = config.cls_dropout
        self.dropout = lora.Dropout(config.hidden_dropout_prob if dropout_p is None else dropout_p)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.init_weights()

    def logits_of(self, first: Tensor) -> Tensor:
        """(batch, hidden), of the first tokens -> (batch, labels).

        Without autocast: one token a row is cheap in float32, and logits keep its precision.
        """
        pooled = self.pooler(first)
        with torch.autocast(pooled.device.type, enabled=False):
            return self.classifier(self.dropout(pooled))


class DebertaV2ForTokenClassification(DebertaV2PreTrainedModel, EncoderForTokenClassification):
    """DeBERTa-v2 with a classifier on every token."""

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.deberta = DebertaV2Model(config)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.init_weights()


class DebertaV2ForQuestionAnswering(DebertaV2PreTrainedModel, EncoderForQuestionAnswering):
    """DeBERTa-v2 that finds where an answer starts and ends."""

    def __init__(self, config: DebertaV2Config):
        super().__init__(config)
        self.deberta = DebertaV2Model(self.config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.init_weights()
