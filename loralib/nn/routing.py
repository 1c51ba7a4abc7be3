"""Which rows of a batch are computed with which adapter, where one batch has several.

Adjacent rows that share an adapter are a segment. Linear layers see a segment as a slice of the
batch or, in models that lay tokens end to end (packing.py), as a slice of the tokens:

    batch       adapter        packed tokens
    a b c .     rte            a b c d e f g h i
    d e . .     rte            '-------' '-----'
    f g h i     mnli              rte      mnli

`AdapterBank.use` (bank.py) puts a `Routing` into effect, for its own thread alone; the bank's hooks
act by it. Without one, everything here does nothing.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """The segments of a batch.

    Args:
        key: tells whose adapters these are: hooks with another key do not act.
        adapters: each segment's adapter.
        rows: each segment's rows; None where one adapter has all, however many there are.
        tokens: each segment's tokens among the packed ones, once a model has packed them.
        positions: inputs are positions' embeddings, not a batch's: every segment has a copy of
            them, see `for_each_segment`.
    """

    key: object
    adapters: tuple[Any, ...]
    rows: tuple[slice, ...] | None = None
    tokens: tuple[slice, ...] | None = None
    positions: bool = False

    def parts(self, x: Tensor) -> Sequence[slice]:
        """Where each segment is in a layer's input, in its first dimension.

        Args:
            x: (tokens, in) of packed tokens; (batch, in), one token a row; (batch, …, in); with
                `positions`, (segments, …, in). Any shape where one adapter has all rows.

        Raises:
            ValueError: x is neither.
        """
        if self.rows is None:
            return [slice(None)]
        if self.positions:
            return slices([1] * len(self.adapters))
        if self.tokens is not None and x.dim() == 2 and len(x) == self.tokens[-1].stop:
            return self.tokens
        if x.dim() >= 2 and len(x) == self.rows[-1].stop:
            return self.rows
        known = f"{self.rows[-1].stop} rows"
        if self.tokens is not None:
            known += f" of {self.tokens[-1].stop} tokens"
        raise ValueError(
            f"adapters are named for {known}, a layer is given {tuple(x.shape)}: name one per row"
        )


_in_effect: ContextVar[Routing | None] = ContextVar("routing", default=None)
# The blocks of `routed` in all threads. While there is none, nobody asks the variable, into which
# torch.compile cannot see.
_blocks = 0
_blocks_lock = threading.Lock()


def in_effect() -> Routing | None:
    """The routing of the block that runs in this thread."""
    return _in_effect.get() if _blocks else None


def _count_blocks(change: int) -> None:
    global _blocks
    with _blocks_lock:
        _blocks += change


def is_by_row() -> bool:
    """Whether rows have adapters of their own in this thread: their order then matters."""
    return (routing := _in_effect.get()) is not None and routing.rows is not None


@contextmanager
def routed(routing: Routing) -> Iterator[None]:
    """Puts `routing` into effect; the innermost block's counts.

    Raises:
        ValueError: it is within a block of another key, which would end up without effect.
    """
    outer = in_effect()
    if outer is not None and outer.key is not routing.key:
        raise ValueError("another bank's adapters are in use: leave that block first")
    _count_blocks(1)
    token = _in_effect.set(routing)
    try:
        yield
    finally:
        _in_effect.reset(token)
        _count_blocks(-1)


def slices(lengths: Sequence[int]) -> tuple[slice, ...]:
    """Parts of these lengths, one after the other: ``[2, 3]`` -> 0 … 2, 2 … 5."""
    return tuple(slice(start, stop) for start, stop in pairwise([0, *accumulate(lengths)]))


def note_tokens(lengths: Sequence[int]) -> tuple[slice, ...]:
    """Tells the routing in effect where the rows of a batch are among its packed tokens.

    Args:
        lengths: tokens of each row.

    Returns:
        The segments of rows; one of all rows where there is no routing, or one adapter has them.

    Raises:
        ValueError: adapters are named for another number of rows.
    """
    routing = in_effect()
    if routing is None or routing.rows is None:
        return slices([len(lengths)])
    named = routing.rows[-1].stop
    if len(lengths) != named:
        raise ValueError(f"the batch has {len(lengths)} rows, adapters are named for {named}")
    ends = [0, *accumulate(lengths)]
    tokens = tuple(slice(ends[rows.start], ends[rows.stop]) for rows in routing.rows)
    # The block of `routed` restores the routing before it, whatever is set here.
    _in_effect.set(replace(routing, tokens=tokens))
    return routing.rows


def for_each_segment(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """A linear layer's output for positions, which all rows share, in every segment.

    The layer's own product is computed once.

    Args:
        layer: (…, in) -> (…, out), with updates or without.
        x: (n, in), embeddings of positions.

    Returns:
        For each segment (n, out); one where there is no routing, or one adapter has all rows.
    """
    routing = in_effect()
    if routing is None:
        return [layer(x)]
    with routed(replace(routing, positions=True)):
        out = layer(x)
    # A layer that none of these adapters updates has one output for all segments.
    return list(out) if out.dim() > x.dim() else [out] * len(routing.adapters)
