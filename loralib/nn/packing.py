"""Packs a batch's real tokens end to end, and computes attention within its rows.

A batch comes padded, (batch, length), because rows differ in length. Whatever a transformer does to
each token by itself (projections, norms, feed-forward) is done on packed tokens, (tokens, hidden),
so that padding costs nothing:

    a b c .            a b c d e f g h i
    d e . .    pack
    f g h i   ----->   lengths 3, 2, 4

Only attention depends on rows. On a GPU, a kernel is given the ends of the rows. On a CPU, rows of
similar length are computed in groups or, without gradients, one at a time or all padded again,
whichever is cheaper. If rows have different adapters, routing.py is told where their tokens are.
"""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import flash
from .routing import note_tokens, slices
from .row_attention import attend_rows, suits_cpu
from .row_groups import GROUP_OVERHEAD


class PackedRows:
    """Where the real tokens of a padded batch are.

    Made on the CPU when the batch is collated, it travels with the batch, and the model's forward
    pass never waits for the device. A mask that is on a device costs one such wait.

    Args:
        attention_mask: (batch, length); zero where there is padding, which may be anywhere.

    Attributes:
        shape: (batch, length).
        lengths: the number of tokens in each row.
        longest: the largest of `lengths`, kept apart so that a compiled graph does not depend on
            the number of rows.
        spans: each row's number of columns up to its last token, which is the row's length if its
            padding is on the right.
        used_columns: the largest of `spans`; kept apart like `longest`.
        is_filled: whether a row was added that brings the batch to a size that recurs, see
            training/cuda_graphs.py; `longest` and `used_columns` are then that size's.
        padded_right: whether all rows have their padding on the right; a flag, so that a compiled
            graph does not depend on the numbers.
        starts_padded: whether the first position of some row is padding. Attention within packed
            rows does not support such batches: a row may have no token at all, and the first
            position, which a classifier reads, is not among the packed tokens.
        is_token: (batch, length), true at real tokens, false at padding.
        index: (tokens,), positions of the real tokens in the flattened batch.
        positions: (tokens,), each token's column.
        first: (batch,), position of each row's first token among the packed ones.
        offsets: (batch + 1,), int32: `first`, then the number of all tokens. These are the
            cumulative lengths that kernels for rows of several lengths take.
        targets: (targets,), positions among the packed tokens of those with a target, in their
            order; None if not known, see `with_targets`.
        segments: slices of adjacent rows that share an adapter, see `routed`; mostly one slice of
            all rows.

    Raises:
        ValueError: the mask is not two-dimensional.
    """

    _TENSORS = ("is_token", "index", "positions", "first", "offsets", "targets")

    def __init__(self, attention_mask: Tensor):
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must be (batch, length), not {tuple(attention_mask.shape)}"
            )
        self.is_token = mask = attention_mask.cpu() != 0
        self.starts_padded = not bool(mask[:, 0].all())
        self.shape = mask.shape
        row, self.positions = mask.nonzero(as_tuple=True)
        self.index = row * mask.shape[1] + self.positions
        lengths = mask.sum(dim=1)
        ends = lengths.cumsum(0)
        self.first = ends - lengths
        self.offsets = F.pad(ends, (1, 0)).int()
        self.lengths: list[int] = lengths.tolist()
        self.longest = max(self.lengths, default=0)
        columns = torch.arange(1, mask.shape[1] + 1, device="cpu")
        self.spans: list[int] = (mask * columns).amax(dim=1).tolist()
        self.used_columns = max(self.spans, default=0)
        self.padded_right = self.spans == self.lengths
        self.is_filled = False
        self.targets: Tensor | None = None
        self.segments = slices([len(self.lengths)])
        self._move(lambda tensor: tensor.to(attention_mask.device))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], length: int | None = None) -> "PackedRows":
        """Returns rows of these lengths, at least 1 each, padded on the right; on the CPU.

        Args:
            lengths: the number of tokens in each row.
            length: columns of the batch; by default as many as the longest row has.

        Raises:
            ValueError: a row has no token.
        """
        if min(lengths, default=1) < 1:
            raise ValueError(f"row {lengths.index(min(lengths))} of the batch has no token")
        columns = torch.arange(max(lengths) if length is None else length, device="cpu")
        return cls(columns < torch.tensor(lengths, device="cpu")[:, None])

    # ---- on the way to the model ----

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedRows":
        """Returns the same rows with their tensors on a device."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedRows":
        """Returns the same rows in pinned memory, which is copied to a GPU without waiting."""
        return self._moved(Tensor.pin_memory)

    def with_targets(self, is_target: Tensor) -> "PackedRows":
        """Returns the same rows with `targets`.

        Args:
            is_target: (batch, length), true at tokens with a target; on the rows' device, which
                should be the CPU, because this waits for any other.
        """
        rows = copy.copy(self)
        # Cloned so that it is not a view, as the result of `fill` is none either: a layer is
        # compiled once for views, and once more for other tensors.
        rows.targets = self.pack(is_target).nonzero().squeeze(1).clone()
        return rows

    def routed(self) -> "PackedRows":
        """Returns the same rows in the segments that the bank in effect divides them into.

        A model's forward pass calls this before its first layer, so that the bank knows which
        tokens belong to which adapter; see routing.py.

        Raises:
            ValueError: adapters are named for a different number of rows.
        """
        rows = copy.copy(self)
        rows.segments = note_tokens(self.lengths)
        return rows

    def copied(self, device: torch.device | str) -> "PackedRows":
        """Returns the same rows with their tensors in new memory on a device."""
        return self._moved(lambda tensor: tensor.to(device, copy=True))

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of the rows that are known, always in the same order."""
        held = (getattr(self, name) for name in self._TENSORS)
        return [tensor for tensor in held if tensor is not None]

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "PackedRows":
        rows = copy.copy(self)
        rows._move(move)
        return rows

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        for name in self._TENSORS:
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else move(tensor))

    # ---- other batches of the same rows ----

    def part(self, segment: slice) -> "PackedRows":
        """Returns a slice of the rows as a batch of their own with the same number of columns."""
        start, stop = (sum(self.lengths[:row]) for row in (segment.start, segment.stop))
        part = copy.copy(self)
        part.lengths, part.spans = self.lengths[segment], self.spans[segment]
        part.longest = max(part.lengths, default=0)
        part.used_columns = max(part.spans, default=0)
        part.padded_right = part.spans == part.lengths
        part.shape = torch.Size((len(part.lengths), self.shape[1]))
        part.is_token = self.is_token[segment]
        part.index = self.index[start:stop] - segment.start * self.shape[1]
        part.positions = self.positions[start:stop]
        part.first = self.first[segment] - start
        part.offsets = self.offsets[segment.start : segment.stop + 1] - start
        part.targets = None
        part.segments = slices([len(part.lengths)])
        return part

    def twice(self) -> "PackedRows":
        """Returns a batch of these rows, with the same rows once more below them."""
        rows = copy.copy(self)
        count, tokens = len(self.lengths), len(self.index)
        rows.lengths, rows.spans = self.lengths * 2, self.spans * 2
        rows.shape = torch.Size((2 * count, self.shape[1]))
        rows.is_token = self.is_token.repeat(2, 1)
        rows.index = torch.cat([self.index, self.index + self.shape.numel()])
        rows.positions = self.positions.repeat(2)
        rows.first = torch.cat([self.first, self.first + tokens])
        rows.offsets = torch.cat([self.offsets, self.offsets[1:] + tokens])
        if self.targets is not None:
            rows.targets = torch.cat([self.targets, self.targets + tokens])
        rows.segments = slices([2 * count])
        return rows

    def widened(self, columns: int) -> "PackedRows":
        """Returns the same rows with more padding on the right, up to this many columns."""
        rows = copy.copy(self)
        count, length = self.shape
        rows.shape = torch.Size((count, columns))
        rows.is_token = F.pad(self.is_token, (0, columns - length))
        rows.index = self.index + self.index // length * (columns - length)
        return rows

    # ---- tensors ----

    def pack(self, x: Tensor) -> Tensor:
        """(batch, length, …) -> (tokens, …).

        Raises:
            ValueError: x has another batch size or length than the mask.
        """
        if x.shape[:2] != self.shape:
            raise ValueError(
                f"attention_mask is {tuple(self.shape)}, the batch is {tuple(x.shape[:2])}: ids, "
                "mask and all else that is given for each token, such as labels, have one shape"
            )
        # Its backward pass adds in place. That of x[index] is five times slower on a CPU.
        return x.flatten(0, 1).index_select(0, self.index)

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(tokens, …) -> (batch, length, …), with `fill` at padding."""
        padded = x.new_full((self.shape[0] * self.shape[1], *x.shape[1:]), fill)
        return padded.index_copy_(0, self.index, x).unflatten(0, self.shape)

    def hide_padding(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Returns x, (tokens, …), as it is: packed tokens have no padding among them."""
        return x

    def show(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x padded, and x packed from that, so that autograd's graph runs through both."""
        padded = self.pad(x)
        return padded, self.pack(padded)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    heads: int,
    dropout_p: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Computes softmax(q kᵀ / √d) v within each row, over `heads` slices of the hidden dimension.

    Args:
        query: (tokens, hidden), or (batch, hidden) for one query per row, which with `causal` is
            that of the first token.
        key, value: (tokens, hidden).
        rows: which tokens form a row.
        heads: number of heads; divides hidden.
        dropout_p: dropout on the attention probabilities.
        causal: whether a token attends only to itself and those before it in its row.

    Returns:
        The same shape as `query`.
    """
    if causal and len(query) != len(key):  # each row's first token, which attends only to itself
        key, value = (x.index_select(0, rows.first) for x in (key, value))
        rows = PackedRows.from_lengths([1] * len(query)).to(query.device)
    settings = heads, dropout_p, causal
    if flash.suits(query, key, value, heads):
        return flash.attend(query, key, value, rows.offsets, rows.longest, *settings)
    if suits_cpu(query, key, value, dropout_p=dropout_p):
        return attend_rows(query, key, value, rows.lengths, *settings)
    if query.is_cuda or torch.compiler.is_compiling() or padding_is_cheap(rows, heads):
        # A graph that is compiled for any number of tokens cannot loop over rows.
        return _attend_padded(query, key, value, rows, *settings)
    return _attend_one_by_one(query, key, value, rows, *settings)


def padding_is_cheap(rows: PackedRows, heads: int, calls: int = GROUP_OVERHEAD) -> bool:
    """Returns whether attention on padded rows costs no more than row by row, on a CPU.

    Args:
        rows: the batch's rows.
        heads: number of heads.
        calls: the cost of one row's calls, as the number of scores computed in the same time.
    """
    count, longest = rows.shape
    wasted = heads * (count * longest**2 - sum(length**2 for length in rows.lengths))
    return wasted <= calls * count  # of no rows, there is nothing to concatenate


def _attend_one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    heads: int,
    dropout_p: float,
    causal: bool = False,
) -> Tensor:
    """Computes one row after the other, without padding."""
    lengths = rows.lengths if len(query) == len(key) else [1] * len(rows.lengths)
    parts = (query.split(lengths), key.split(rows.lengths), value.split(rows.lengths))
    attended = []
    for row in zip(*parts, strict=True):
        q, k, v = (_by_head(part[None], heads) for part in row)
        attended.append(F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal))
    return torch.cat([row[0].transpose(0, 1).flatten(1) for row in attended])


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    heads: int,
    dropout_p: float,
    causal: bool = False,
) -> Tensor:
    """Computes all rows at once, on the padded batch."""
    if causal and not rows.padded_right:  # so that no token attends to padding before it
        rows = PackedRows.from_lengths(rows.lengths).to(query.device)
    one_query = len(query) != len(key)
    query = query[:, None] if one_query else rows.pad(query)
    q, k, v = (_by_head(part, heads) for part in (query, rows.pad(key), rows.pad(value)))
    # With padding on the right, causal attention never reaches it.
    mask = None if causal else rows.is_token[:, None, None, :]
    attended = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal)
    attended = attended.transpose(1, 2).flatten(2)
    return attended[:, 0] if one_query else rows.pack(attended)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(batch, length, hidden) -> (batch, heads, length, dim)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
