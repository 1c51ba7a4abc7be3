"""Puts rows of packed tokens into padded groups of similar length, for products by row.

    a b c d e f g h i j k l                                   a b c . .     j k l . .
    rows of 3, 5 and 1 tokens, and of 40       --->           d e f g h
                                                              i . . . .

One call multiplies all rows of a group. For short rows, calls take longer than the arithmetic, even
with that of padding, so they share groups. Long rows share one only if their lengths are similar.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

GROUP_OVERHEAD = 20_000
"""How many attention probabilities cost a CPU as much time as the function calls for one group: the
calls take about 0.2 ms, a probability takes 10 ns, forward and backward."""
_LARGEST = 2**18
"""The most attention probabilities in a group, unless a single row has more. They take 1 MiB in
float32, which stays in the processor's cache from one operation to the next."""
_PADDING = -1  # stands for a token's number


class GroupedTokens:
    """A layout of packed tokens in groups of rows, by head, and the way back to packed tokens.

    All groups lie one after the other in one tensor, (slots, d). A group is ordered by head, then
    by row, and a row is its tokens followed by padding. One gather fills all groups, and another
    packs them.

    Args:
        lengths: the number of tokens in each row, at least 1.
        groups: the numbers of the rows in each group.
        heads: number of heads; divides hidden.
        step: a group's rows are padded to a multiple of this many tokens.

    Attributes:
        shapes: (heads · rows, length) of each group.
    """

    def __init__(
        self, lengths: Sequence[int], groups: Sequence[Sequence[int]], heads: int, step: int
    ):
        self.heads, self.step = heads, step
        counts = np.array(lengths, dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        tables = [_table(firsts[list(rows)], counts[list(rows)], step) for rows in groups]
        self.shapes = [(heads * len(table), table.shape[1]) for table in tables]
        self._hidden = [_hidden(table == _PADDING, heads) for table in tables]
        tokens = _joined([np.tile(table.ravel(), heads) for table in tables])
        stand_ins = _joined([np.tile(np.repeat(t[:, 0], t.shape[1]), heads) for t in tables])
        # The token's number for each slot. Padding has that of its row's first token.
        self._tokens = np.where(tokens == _PADDING, stand_ins, tokens)
        self._heads = _joined([np.repeat(np.arange(heads), table.size) for table in tables])
        self._padding = np.flatnonzero(tokens == _PADDING)
        filled = np.flatnonzero(tokens != _PADDING)
        self._slots = np.empty_like(filled)
        self._slots[(self._tokens * heads + self._heads)[filled]] = filled
        # Arrays, because this object is cached: tensors made in a FakeTensorMode would stay fake.
        self._parts: dict[int, np.ndarray] = {}

    def read(self, x: Tensor) -> Tensor:
        """(tokens, hidden) -> (slots, d).

        Padding is finite if its row is, and otherwise unspecified.
        """
        if not len(x):
            return self.empty(like=x)
        width = x.shape[1] // self.heads
        if x.stride(1) != 1 or x.stride(0) % width:
            x = x.contiguous()
        # A slice of a wider tensor, such as queries beside keys and values, is read without a copy.
        stride = x.stride(0) // width
        parts = x.as_strided(((len(x) - 1) * stride + self.heads, width), (width, 1))
        return parts.index_select(0, torch.from_numpy(self._parts_of(stride)))

    def split(self, slots: Tensor) -> list[Tensor]:
        """(slots, d) -> (heads · rows, length, d) for each group, as views."""
        parts = slots.split([math.prod(shape) for shape in self.shapes])
        return [part.view(*shape, -1) for part, shape in zip(parts, self.shapes, strict=True)]

    def hidden(self) -> Iterator[Tensor | None]:
        """Yields each group's (heads · rows, 1, length), -∞ at padding, else 0; None without any.

        It is to be added to scores in float32 or wider. Filling them by a mask takes ten times as
        long.
        """
        return (None if hidden is None else torch.from_numpy(hidden) for hidden in self._hidden)

    def clear_padding(self, slots: Tensor) -> Tensor:
        """Sets padding to zero in (slots, d), in place."""
        if not self._padding.size:
            return slots
        return slots.index_fill_(0, torch.from_numpy(self._padding), 0)

    def empty(self, like: Tensor) -> Tensor:
        """Returns new memory, (slots, d), in the dtype of `like`, (tokens, hidden)."""
        return like.new_empty(len(self._tokens), like.shape[1] // self.heads)

    def pack(self, slots: Tensor) -> Tensor:
        """(slots, d) -> (tokens, hidden)."""
        packed = slots.index_select(0, torch.from_numpy(self._slots))
        return packed.view(-1, self.heads * slots.shape[1])

    def _parts_of(self, stride: int) -> np.ndarray:
        """Returns (slots,), each slot's part number; a token has `stride` parts of size d."""
        if stride not in self._parts:  # computed once for all layers
            self._parts[stride] = self._tokens * stride + self._heads
        return self._parts[stride]


def _table(firsts: np.ndarray, counts: np.ndarray, step: int) -> np.ndarray:
    """Returns (rows, length), the numbers of a group's tokens, with _PADDING after each row.

    Args:
        firsts: (rows,), the number of each row's first token.
        counts: (rows,), how many tokens each row has.
        step: `length` is a multiple of it.
    """
    columns = np.arange(-(-int(counts.max()) // step) * step)
    is_token = columns < counts[:, None]
    return np.where(is_token, firsts[:, None] + columns, _PADDING)


def _hidden(is_padding: np.ndarray, heads: int) -> np.ndarray | None:
    """(rows, length) -> (heads · rows, 1, length), as `GroupedTokens.hidden` yields it."""
    if not is_padding.any():
        return None
    of_a_head = np.where(is_padding, np.float32(-np.inf), np.float32(0))
    return np.tile(of_a_head, (heads, 1))[:, None]


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])


@functools.lru_cache(maxsize=8)  # all layers have the same rows
def group_rows(
    lengths: tuple[int, ...], heads: int, one_query: bool, step: int
) -> tuple[GroupedTokens, GroupedTokens]:
    """Returns the layouts of the rows' queries and of their keys, in the same groups.

    Args:
        lengths: the number of tokens in each row, at least 1.
        heads: number of heads.
        one_query: whether a row has one query instead of one per token.
        step: rows are padded to multiples of this many tokens.
    """
    groups = _divide([-(-length // step) * step for length in lengths], heads)
    keys = GroupedTokens(lengths, groups, heads, step)
    if not one_query:
        return keys, keys
    return GroupedTokens([1] * len(lengths), groups, heads, step), keys


def _divide(lengths: Sequence[int], heads: int) -> list[list[int]]:
    """Returns the groups of rows with the lowest cost of calls and probabilities, by first row.

    This is a dynamic program. Rows are sorted by length, so that each group is a run of them. For
    the first 1, 2, 3, … rows in turn, it finds the best last group among all that `_LARGEST`
    allows; the best groups before that are known by then.
    """
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    least = np.zeros(len(lengths) + 1)  # the lowest cost of the first n rows, at index n
    begins = []  # where the last group begins that ends with this row
    for last, row in enumerate(ascending):
        size = heads * lengths[row] ** 2
        earliest = max(last + 1 - max(_LARGEST // size, 1), 0)
        starts = np.arange(earliest, last + 1)
        costs = least[starts] + (last + 1 - starts) * size
        best = int(np.argmin(costs))
        begins.append(earliest + best)
        least[last + 1] = costs[best] + GROUP_OVERHEAD
    groups = []
    stop = len(ascending)
    while stop:
        begin = begins[stop - 1]
        groups.append(sorted(ascending[begin:stop]))
        stop = begin
    return sorted(groups)
