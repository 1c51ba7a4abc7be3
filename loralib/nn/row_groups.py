"""Rows of packed tokens for products by row: rows of about one length in groups, padded.

    a b c d e f g h i j k l                                   a b c . .     j k l . .
    rows of 3, 5 and 1 tokens, and of 40       --->           d e f g h
                                                              i . . . .

A group's rows are multiplied by one call. A short row's calls take longer than its arithmetic, and
than that of its padding; long rows share a group where they have about the same length.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

ONE_GROUPS_CALLS = 20_000
"""Attention's probabilities that take a CPU as long as the calls for one group: about 0.2 ms of
calls, 10 ns a probability, forward and backward."""
_LARGEST = 2**18
"""Probabilities of a group, at most, unless one row has more: a MiB in float32, which stays in a
processor's cache from one operation to the next."""
_PADDING = -1  # in the place of a token's number


class GroupedTokens:
    """How packed tokens become groups of rows, by head, and the results packed tokens again.

    The groups lie one after the other in one tensor, (slots, d): a group is head by head, a head
    row by row, a row its tokens and then padding. One gather fills all groups, another packs them.

    Args:
        lengths: the rows' tokens, at least 1 each.
        groups: numbers of the rows in each group.
        heads: number of heads; divides hidden.
        step: a group's rows are padded to a multiple of so many tokens.

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
        # Of each slot. Where there is no token stands the row's first one.
        self._tokens = np.where(tokens == _PADDING, stand_ins, tokens)
        self._heads = _joined([np.repeat(np.arange(heads), table.size) for table in tables])
        self._padding = np.flatnonzero(tokens == _PADDING)
        filled = np.flatnonzero(tokens != _PADDING)
        self._slots = np.empty_like(filled)
        self._slots[(self._tokens * heads + self._heads)[filled]] = filled
        # As arrays: a tensor that is made under fake tensors would be one, and stay.
        self._parts: dict[int, np.ndarray] = {}

    def read(self, x: Tensor) -> Tensor:
        """(tokens, hidden) -> (slots, d).

        Padding is finite where its row is, and nothing else is promised of it.
        """
        if not len(x):
            return self.empty(like=x)
        width = x.shape[1] // self.heads
        if x.stride(1) != 1 or x.stride(0) % width:
            x = x.contiguous()
        # A slice of a wider tensor, such as queries beside keys and values, is read where it is.
        stride = x.stride(0) // width
        parts = x.as_strided(((len(x) - 1) * stride + self.heads, width), (width, 1))
        return parts.index_select(0, torch.from_numpy(self._parts_of(stride)))

    def split(self, slots: Tensor) -> list[Tensor]:
        """(slots, d) -> of each group (heads · rows, length, d), a view."""
        parts = slots.split([math.prod(shape) for shape in self.shapes])
        return [part.view(*shape, -1) for part, shape in zip(parts, self.shapes, strict=True)]

    def hidden(self) -> Iterator[Tensor | None]:
        """Of each group (heads · rows, 1, length), -∞ where it is padding, else 0; None without.

        It is added to scores, in float32 or wider; to fill them by a mask takes ten times as long.
        """
        return (None if hidden is None else torch.from_numpy(hidden) for hidden in self._hidden)

    def clear_padding(self, slots: Tensor) -> Tensor:
        """(slots, d), in place with zeros where there is no token."""
        if not self._padding.size:
            return slots
        return slots.index_fill_(0, torch.from_numpy(self._padding), 0)

    def empty(self, like: Tensor) -> Tensor:
        """(slots, d), for results of `like`'s dtype, (tokens, hidden)."""
        return like.new_empty(len(self._tokens), like.shape[1] // self.heads)

    def pack(self, slots: Tensor) -> Tensor:
        """(slots, d) -> (tokens, hidden)."""
        packed = slots.index_select(0, torch.from_numpy(self._slots))
        return packed.view(-1, self.heads * slots.shape[1])

    def _parts_of(self, stride: int) -> np.ndarray:
        """(slots,), the number of the part that is in each; a token has `stride` parts, of d."""
        if stride not in self._parts:  # which all layers ask for
            self._parts[stride] = self._tokens * stride + self._heads
        return self._parts[stride]


def _table(firsts: np.ndarray, counts: np.ndarray, step: int) -> np.ndarray:
    """(rows, length), the numbers of a group's tokens, _PADDING where there is none.

    Args:
        firsts: (rows,), the number of each row's first token.
        counts: (rows,), of its tokens.
        step: `length` is a multiple of it.
    """
    columns = np.arange(-(-int(counts.max()) // step) * step)
    is_token = columns < counts[:, None]
    return np.where(is_token, firsts[:, None] + columns, _PADDING)


def _hidden(is_padding: np.ndarray, heads: int) -> np.ndarray | None:
    """(rows, length) -> (heads · rows, 1, length), as `GroupedTokens.hidden` gives it."""
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
    """The queries and the keys of rows, in the same groups.

    Args:
        lengths: the rows' tokens, at least 1 each.
        heads: number of heads.
        one_query: a row has one query, not one for each token.
        step: rows are padded to multiples of so many tokens.
    """
    groups = _divide([-(-length // step) * step for length in lengths], heads)
    keys = GroupedTokens(lengths, groups, heads, step)
    if not one_query:
        return keys, keys
    return GroupedTokens([1] * len(lengths), groups, heads, step), keys


def _divide(lengths: Sequence[int], heads: int) -> list[list[int]]:
    """The groups of rows with the least calls and probabilities, in the order of their first rows.

    Rows are sorted by length, so that each group is a run of them. For the first 1, 2, 3, … rows in
    turn, the best last group is looked for among all that `_LARGEST` allows; the groups before it
    are known by then.
    """
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    least = np.zeros(len(lengths) + 1)  # what the first rows cost, by how many they are
    begins = []  # where the last group of the first rows begins, by its last row
    for last, row in enumerate(ascending):
        size = heads * lengths[row] ** 2
        earliest = max(last + 1 - max(_LARGEST // size, 1), 0)
        beginnings = np.arange(earliest, last + 1)
        costs = least[beginnings] + (last + 1 - beginnings) * size
        best = int(costs.argmin())
        begins.append(earliest + best)
        least[last + 1] = costs[best] + ONE_GROUPS_CALLS
    groups = []
    stop = len(ascending)
    while stop:
        begin = begins[stop - 1]
        groups.append(sorted(ascending[begin:stop]))
        stop = begin
    return sorted(groups)
