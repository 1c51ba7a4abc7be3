"""DeBERTa-v2's disentangled attention: to tokens' contents, and to the distances between them.

With the contents' queries Q and keys K, and the projected embeddings P of the distance i - j:

    score(i, j)  =  ( Q_i · K_j  +  Q_i · P_key(i - j)  +  P_query(i - j) · K_j ) / √(d (1 + terms))
                       content            "c2p"                    "p2c"

Each position term is one product with all distances that occur, and a view of the result: see
loralib/nn/distances.py. What depends on distances alone is computed once per forward: see `Batch`.
Source: DeBERTa, arXiv 2006.03654, section 3, with version 2's buckets and shared projections.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora
from loralib.nn.distances import skew
from loralib.nn.packing import PackedRows, padding_is_cheap
from loralib.nn.products import Linear, linear, matmul
from loralib.nn.routing import for_each_segment
from loralib.nn.row_attention import attend_rows, suits_cpu

from ...adapters import projection
from ...lora_placement import Placed
from ...modeling_encoder import AnyRows
from ...modeling_padded import PaddedAttention
from .configuration_deberta_v2 import DebertaV2Config


def relative_rows(length: int, buckets: int, furthest: int) -> tuple[int, ...]:
    """Returns the rows of `rel_embeddings` for the distances from 1 - length to length - 1.

    Args:
        length: tokens in the longest sequence.
        buckets: rows per direction. Distances up to half of this have a row each; larger ones
            share rows on a logarithmic scale. With 0 or less, each distance has its own row.
        furthest: distances at or beyond this one are clamped.

    Returns:
        2 · length - 1 row numbers, ascending.
    """
    return tuple(row_of(distance, buckets, furthest) for distance in range(1 - length, length))


def row_of(distance: int, buckets: int, furthest: int) -> int:
    """Returns the row of one distance; the arguments are those of `relative_rows`."""
    span = buckets if buckets > 0 else furthest
    return min(max(span + _bucket(distance, buckets, furthest), 0), 2 * span - 1)


def _bucket(distance: int, buckets: int, furthest: int) -> int:
    middle = buckets // 2
    if buckets <= 0 or abs(distance) <= middle:
        return distance
    share = math.log(abs(distance) / middle) / math.log((furthest - 1) / middle)
    bucket = middle + math.ceil(share * (middle - 1))
    return bucket if distance > 0 else -bucket


# The overhead of attending to one row by itself on a CPU, about 0.5 ms, as a number of scores that
# take 60 ns each.
_ONE_ROWS_CALLS = 8_000
# Keys and queries of distances, each (2 · length - 1, hidden), or None if the model does not have
# the term. On a GPU, length is the rows' length plus one; see `SPARE_ON_GPU`.
_Positions = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class RelativePositions:
    """The distances within a batch.

    Args:
        embeddings: (rows, hidden), the rows of `rel_embeddings` that occur.
        rows: (2 · length - 1,), each distance's index into `embeddings`, from 1 - length to
            length - 1.
        reversed_rows: the same, from length - 1 down to 1 - length.
    """

    embeddings: Tensor
    rows: Tensor
    reversed_rows: Tensor


class Batch:
    """What all layers need to know about a batch; made once per forward pass.

    Args:
        rows: where its tokens are.
        relative: its distances; None if attention does not use them.
        heads: number of attention heads.

    Attributes:
        padding: (batch, 1, 1, length), True at padding; None if there is none.
        by_row: on a CPU, whether attention is computed row by row if `attend_rows` does not apply.
        first: as in `PackedRows`.
        segments: one `Batch` for each segment, the rows that share an adapter (see
            loralib/nn/routing.py); empty if there is only one segment.
    On the padded path, `padding` is None, `by_row` False and `segments` empty.
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
        # On a GPU one kernel takes all rows, and a graph compiled for any number of tokens cannot
        # loop over them.
        at_once = rows.index.is_cuda or torch.compiler.is_compiling()
        if not at_once and self.is_dense:
            self.by_row = not padding_is_cheap(rows, heads, _ONE_ROWS_CALLS)
        if len(rows.segments) > 1:
            parts = map(rows.part, rows.segments)
            self.segments = [Batch(part, self.relative, heads) for part in parts]

    @property
    def is_dense(self) -> bool:
        """Whether no row has padding between its tokens, so that lengths determine distances."""
        return self.rows.spans == self.rows.lengths


class DisentangledSelfAttention(nn.Module):
    """Multi-head attention to contents and distances, without its output projection.

    With `share_att_key`, the contents' projections also project the distances: `query_proj` for the
    "p2c" term, `key_proj` for "c2p". LoRA then changes the contents only, as in the release, and
    distances are projected by the frozen weight. With `config.lora_positions`, LoRA changes both,
    as in PEFT. In a batch with several such adapters, each segment then has distances of its own,
    and attention is computed segment by segment. See loralib/positions.py.

    Attributes:
        shared_with_positions: names of the projections that also project distances.
        lora_positions: whether the LoRA of these applies to distances too.
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
        """Names of the projections that also project distances."""
        if not self.share_att_key:
            return ()
        terms = {"key_proj": self.c2p, "query_proj": self.p2c}
        return tuple(name for name, is_there in terms.items() if is_there)

    def unshare_positions(self) -> None:
        """Gives distances projections of their own: copies of the shared ones, without LoRA."""
        for name in self.shared_with_positions:
            setattr(self, f"pos_{name}", _plain_copy(self.get_submodule(name)))
        self.share_att_key = self.config.share_att_key = False

    def _position_projection(self, name: str) -> Callable[[Tensor], Tensor]:
        """Returns the function that projects a term's distances: (n, hidden) -> (n, hidden)."""
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
        padded: PaddedAttention | None = None,
    ) -> Tensor:
        """Attends from `queries` to `hidden`.

        Args:
            hidden: (tokens, hidden).
            queries: the same tensor, or (batch, hidden) with each row's first token alone.
            batch: which tokens belong to which row.
            padded: as in `EncoderLayer.forward`.

        Returns:
            The same shape as `queries`.
        """
        q, k, v = self.query_proj(queries), self.key_proj(hidden), self.value_proj(hidden)
        positions = self._project_positions(batch)
        if padded is not None:
            return self._attend_on_padded_path(q, k, v, positions, padded)
        if not batch.segments:
            return self._attend_segment(q, k, v, positions[0], batch)
        of_keys = [len(segment.rows.index) for segment in batch.segments]
        firsts = [len(segment.first) for segment in batch.segments]
        of_queries = of_keys if len(q) == len(k) else firsts
        tensors = (q.split(of_queries), k.split(of_keys), v.split(of_keys))
        parts = zip(*tensors, positions, batch.segments, strict=True)
        return torch.cat([self._attend_segment(*part) for part in parts])

    def _project_positions(self, batch: Batch) -> list[_Positions]:
        """Returns each segment's keys and queries of distances, scaled.

        Keys are sorted by key - query, from 1 - length to length - 1, as in the drawing in
        loralib/nn/distances.py; queries by query - key, over the same range.
        """
        relative = batch.relative
        keys = queries = [None] * len(batch.rows.segments)
        if relative is not None:
            embeddings = self.pos_dropout(relative.embeddings)
            if self.c2p:
                keys = self._of_distances("key_proj", embeddings, relative.reversed_rows)
            if self.p2c:
                queries = self._of_distances("query_proj", embeddings, relative.rows)
        return list(zip(keys, queries, strict=True))

    def _of_distances(self, name: str, embeddings: Tensor, rows: Tensor) -> list[Tensor]:
        """Returns, for each segment, the scaled projections of these rows of the embeddings."""
        projected = for_each_segment(self._position_projection(name), embeddings)
        return [(each * self.scale).index_select(0, rows) for each in projected]

    def _attend_on_padded_path(
        self, q: Tensor, k: Tensor, v: Tensor, positions: list[_Positions], padded: PaddedAttention
    ) -> Tensor:
        """Attends in all rows at once, with attention's probabilities in memory."""
        query, key = (padded.by_head(x, self.heads) for x in (q, k))
        parts = zip(positions, padded.rows.segments, strict=True)
        scores = [_position_scores(query[part], key[part], *terms) for terms, part in parts]
        of_positions = None if scores[0] is None else torch.cat(scores)
        dropout_p = self.dropout_p if self.training else 0.0
        return padded.attend(q, k, v, self.heads, dropout_p, self.scale, of_positions)

    def _attend_segment(
        self, q: Tensor, k: Tensor, v: Tensor, positions: _Positions, batch: Batch
    ) -> Tensor:
        """Attends within the rows of one segment, which `batch` describes."""
        dropout_p = self.dropout_p if self.training else 0.0
        if suits_cpu(q, k, v, *positions, dropout_p=dropout_p) and batch.is_dense:
            settings = {"scale": self.scale, "c2p": positions[0], "p2c": positions[1]}
            return attend_rows(q, k, v, batch.rows.lengths, self.heads, dropout_p, **settings)
        attend = self._attend_rows if batch.by_row else self._attend_padded
        return attend(q, k, v, positions, batch)

    def _attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, positions: _Positions, batch: Batch
    ) -> Tensor:
        """Attends row by row, without padding."""
        lengths = batch.rows.lengths
        of_queries = lengths if len(q) == len(k) else [1] * len(lengths)
        parts = zip(q.split(of_queries), k.split(lengths), v.split(lengths), strict=True)
        attended = [self._attend(*(x[None] for x in row), positions, None) for row in parts]
        return torch.cat([row[0] for row in attended])

    def _attend_padded(
        self, q: Tensor, k: Tensor, v: Tensor, positions: _Positions, batch: Batch
    ) -> Tensor:
        """Attends in all rows at once, over the padded batch."""
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
        """Attends from (batch, queries, hidden) to (batch, keys, hidden)."""
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
    """Returns a linear layer with copies of another's weight and bias, without its LoRA."""
    copy = nn.Linear(layer.in_features, layer.out_features, device="meta")
    for name in ("weight", "bias"):
        own = getattr(layer, name)
        setattr(copy, name, nn.Parameter(own.detach().clone(), requires_grad=own.requires_grad))
    return copy.train(layer.training)


# Extra distances, which are multiplied but never read. With as many queries as keys, the number of
# distances is odd, and rows of scores lack the memory alignment that a GPU's fast kernels need.
SPARE_ON_GPU = 1


def _position_scores(
    query: Tensor, key: Tensor, pos_key: Tensor | None, pos_query: Tensor | None
) -> Tensor | None:
    """Returns the sum of the position terms, (batch, heads, queries, keys), or None without any.

    Args:
        query: (batch, queries, heads, dim), of the first tokens of the rows.
        key: (batch, keys, heads, dim).
        pos_key, pos_query: as `_project_positions` returns them, for rows at least this long.
    """
    terms = []
    queries, keys = query.shape[1], key.shape[1]
    spare = SPARE_ON_GPU if query.is_cuda and queries > 1 else 0
    if pos_key is not None:
        zero = len(pos_key) // 2
        pos_key = pos_key[zero - queries + 1 : zero + keys + spare]
        terms.append(skew(_products(query, pos_key), keys))
    if pos_query is not None:
        zero = len(pos_query) // 2
        pos_query = pos_query[zero - keys + 1 : zero + queries + spare]
        terms.append(skew(_products(key, pos_query), queries).transpose(-1, -2))
    if not terms:
        return None
    scores = sum(terms[1:], terms[0])
    # A single term is a view, whose rows a GPU's fast kernels refuse, or copy in every layer.
    return (scores.contiguous() if query.is_cuda else scores).transpose(0, 1)


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
    """Computes attention of (batch, heads, length, dim).

    A float `bias` is added to the scores; a boolean one is False where no token may attend.
    """
    if dropout_p == 0 or query.is_cuda:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=scale
        )
    # On a CPU, PyTorch's fused attention has no dropout, and PyTorch's own dropout is slow.
    scores = (query * scale) @ key.transpose(2, 3)
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, float("-inf"))
    elif bias is not None:
        scores = scores + bias
    return lora.dropout(scores.softmax(dim=-1), dropout_p, training=True) @ value
