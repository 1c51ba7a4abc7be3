"""Rows of packed tokens for products by row: rows of about one length in groups, padded.

    a b c d e f g h i j k l                                   a b c . .     j k l . .
    rows of 3, 5 and 1 tokens, and of 40       --->           d e f g h
                                                              i . . . .

A group's rows are multiplied by one call. A short row's calls take longer than its arithmetic, and
than that of its padding; long rows share a group where they have about the same length.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ONE_GROUPS_CALLS = 20_000
"""Attention's probabilities that take a CPU as long as the calls for one group: about 0.2 ms of
calls, 10 ns a probability, forward and backward."""
_LARGEST = 2**18
"""Probabilities of a group, at most, unless one row has more: a MiB in float32, which stays in a
processor's cache from one operation to the next."""


class GroupedTokens:
    """How packed tokens become groups of rows, by head, and the results packed tokens again.

    Args:
        lengths: the rows' tokens, at least 1 each.
        groups: numbers of the rows in each group.
        heads: number of heads; divides hidden.
        step: a group's rows are padded to a multiple of so many tokens.

    Attributes:
        shapes: (heads, rows, length) of each group.
    """

    def __init__(
        self, lengths: Sequence[int], groups: Sequence[Sequence[int]], heads: int, step: int
    ):
        self.heads, self.step = heads, step
        firsts = np.cumsum([0, *lengths[:-1]])
        self._groups: list[_Group] = []
        self._slots = np.empty(sum(lengths), dtype=np.int64)
        done = 0
        for rows in groups:
            group = _Group(firsts[list(rows)], np.array([lengths[row] for row in rows]), step)
            self._slots[group.tokens] = done + group.slots
            self._groups.append(group)
            done += group.count * group.written
        self.shapes = [(heads, group.count, group.length) for group in self._groups]
        # The tokens alone, one after the other: `done` counts padding, too.
        self._in_order = done == len(self._slots) and bool((self._slots == np.arange(done)).all())

    def read(self, x: Tensor) -> Iterator[Tensor]:
        """(tokens, hidden) -> of each group (heads, rows, length, d).

        Padding is finite where x is, and nothing else is promised of it.
        """
        for group in self._groups:
            yield group.read(x, self.heads)

    def hidden(self) -> Iterator[Tensor | None]:
        """Of each group (rows, 1, length), -∞ where it is padding, else 0; None without padding.

        It is added to scores, in float32 or wider; to fill them by a mask takes ten times as long.
        """
        return (None if g.hidden is None else torch.from_numpy(g.hidden) for g in self._groups)

    def clear_padding(self, groups: Iterable[Tensor]) -> Iterator[Tensor]:
        """What `read` gave, with zeros in its padding, in place."""
        for group, x in zip(self._groups, groups, strict=True):
            if group.places.size:
                x.flatten(1, 2).index_fill_(1, torch.from_numpy(group.places), 0)
            yield x

    def empty(self, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Memory for results, and the part of it for each group, (heads, rows, written, d).

        Args:
            like: (tokens, hidden).
        """
        memory = like.new_empty(sum(g.count * g.written for g in self._groups), like.shape[1])
        slots = memory.split([g.count * g.written for g in self._groups])
        pairs = zip(slots, self._groups, strict=True)
        return memory, [self._by_head(x.unflatten(0, (g.count, g.written))) for x, g in pairs]

    def pack(self, memory: Tensor) -> Tensor:
        """What was written to the parts of `empty`'s memory, as (tokens, hidden)."""
        return memory if self._in_order else memory.index_select(0, torch.from_numpy(self._slots))

    def _by_head(self, rows: Tensor) -> Tensor:
        """(rows, length, hidden) -> (heads, rows, length, d)."""
        return rows.unflatten(2, (self.heads, -1)).permute(2, 0, 1, 3)


class _Group:
    """Some rows.

    Args:
        firsts: of each row, its first token's number.
        lengths: of each row.
        step: `length` is a multiple of it.

    Attributes:
        count: of rows.
        length: with padding.
        written: tokens a row that are kept of a result: all of them, or those of a row alone.
        hidden: (count, 1, length), -∞ where it is padding, else 0; None without padding.
        places: (padding,), where padding is among count · length, if `read` leaves anything there.
        tokens: (tokens,), the numbers of the rows' tokens.
        slots: (tokens,), where these are among count · written.
    """

    def __init__(self, firsts: np.ndarray, lengths: np.ndarray, step: int):
        self.count = len(lengths)
        self.length = -(-int(lengths.max()) // step) * step
        self.written = self.length if self.count > 1 else int(lengths[0])
        columns = np.arange(self.length)
        padding = columns >= lengths[:, None]
        # Where there is no token stands the row's first one.
        numbers = firsts[:, None] + np.where(padding, 0, columns)
        self.tokens = numbers[~padding]
        self.slots = np.flatnonzero(~padding[:, : self.written])
        self.places = np.flatnonzero(padding) if self.count > 1 else np.empty(0, dtype=np.int64)
        self.hidden = (
            np.where(padding, np.float32(-np.inf), np.float32(0))[:, None]
            if padding.any()
            else None
        )
        self._source = numbers.ravel()

    def read(self, x: Tensor, heads: int) -> Tensor:
        """(tokens of all rows, hidden) -> (heads, count, length, d), contiguous."""
        if self.count == 1:
            first = int(self._source[0])
            row = x[first : first + self.written].unflatten(1, (heads, -1)).transpose(0, 1)
            fill = self.length - self.written
            return (F.pad(row, (0, 0, 0, fill)) if fill else row.contiguous())[:, None]
        rows = x.index_select(0, torch.from_numpy(self._source))
        return rows.view(self.count, self.length, heads, -1).permute(2, 0, 1, 3).contiguous()


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
