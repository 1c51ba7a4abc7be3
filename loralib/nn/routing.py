"""Routes the rows of a batch to their adapters, if one batch has several.

Adjacent rows that share an adapter form a segment. To linear layers, a segment is a slice of the
batch or, in models that lay tokens end to end (packing.py), a slice of the tokens:

    batch       adapter        packed tokens
    a b c .     rte            a b c d e f g h i
    d e . .     rte            '-------' '-----'
    f g h i     mnli              rte      mnli

`AdapterBank.use` (bank.py) puts a `Routing` into effect for its own thread, and the bank's hooks
follow it. Without a routing, the functions here do nothing.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..text import counted


class Inputs(NamedTuple):
    """What a head of the model was called with.

    Args:
        args: the positional arguments.
        kwargs: the others.
        outer: the inputs of the call of the same head around this one, if any.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outer: "Inputs | None"


class _Block:
    """A `routed` block. Contexts that were copied within it, such as a task's, may outlive it.

    Args:
        outer: the routing of the block around it, if any.
    """

    def __init__(self, outer: "Routing | None" = None):
        self.outer, self.is_open = outer, True


@dataclass(frozen=True)
class Routing:
    """The segments of a batch.

    Args:
        key: identifies whose adapters these are; hooks with another key do nothing.
        adapters: each segment's adapter.
        rows: each segment's rows; None if one adapter has all rows, however many there are.
        tokens: each segment's tokens among the packed ones, once a model has packed them.
        positions: whether layers are given embeddings of positions instead of a batch. Every
            segment then has a copy of them, and an output of its own; see `for_each_segment`.
        inputs: what the model's heads that are being computed were called with, by their names.
        block: the `routed` block in which this is in effect.
    """

    key: object
    adapters: tuple[Any, ...]
    rows: tuple[slice, ...] | None = None
    tokens: tuple[slice, ...] | None = None
    positions: bool = False
    inputs: Mapping[str, Inputs] = field(default_factory=dict, compare=False)
    block: _Block = field(default_factory=_Block, compare=False)

    def parts(self, x: Tensor) -> Sequence[slice]:
        """Returns each segment's slice of the first dimension of a layer's input.

        Args:
            x: (tokens, in) of packed tokens; (batch, in), one token per row; (batch, …, in); with
                `positions`, (segments, …, in). Any shape if one adapter has all rows.

        Raises:
            ValueError: x has none of these shapes.
        """
        if self.rows is None:
            return [slice(None)]
        if self.positions:
            return slices([1] * len(self.adapters))
        if self.tokens is not None and x.dim() == 2 and len(x) == self.tokens[-1].stop:
            return self.tokens
        if x.dim() >= 2 and len(x) == self.rows[-1].stop:
            return self.rows
        known = counted(self.rows[-1].stop, "row")
        if self.tokens is not None:
            known += f" of {counted(self.tokens[-1].stop, 'token')}"
        raise ValueError(
            f"adapters are given for {known}, but a layer received {tuple(x.shape)}: give one "
            "adapter per row"
        )


_in_effect: ContextVar[Routing | None] = ContextVar("routing", default=None)
# The number of open `routed` blocks in all threads. While it is 0, the context variable, which
# torch.compile cannot trace, is not read.
_blocks = 0
# One thread may take it twice: a block ends wherever its generator is collected.
_blocks_lock = threading.RLock()


def in_effect() -> Routing | None:
    """Returns the routing of this thread's innermost `routed` block; None outside of one."""
    routing = _in_effect.get() if _blocks else None
    while routing is not None and not routing.block.is_open:
        routing = routing.block.outer
    return routing


def _count_blocks(change: int) -> None:
    global _blocks
    with _blocks_lock:
        _blocks += change


def is_by_row() -> bool:
    """Returns whether rows have different adapters in this thread, so that their order matters."""
    return (routing := in_effect()) is not None and routing.rows is not None


_INTERRUPTED = (
    "a bank.use(…) block was left in another order, thread or task than it was entered, so some "
    "results may be those of other adapters or none: in a generator, leave it before each yield"
)


@contextmanager
def routed(routing: Routing) -> Iterator[None]:
    """Puts `routing` into effect within the block; of nested blocks, the innermost one's counts.

    Raises:
        ValueError: the block is within one of another key, which would have no effect inside it.
        RuntimeError: at its end, the block is not the innermost one. So another one's adapters, or
            none, have been in effect while it seemed to be.
    """
    outer = in_effect()
    if outer is not None and outer.key is not routing.key:
        raise ValueError("another bank's adapters are in use: leave that block first")
    block = _Block(outer)
    _count_blocks(1)
    _in_effect.set(replace(routing, block=block))
    try:
        yield
    finally:
        innermost, block.is_open = in_effect(), False
        _count_blocks(-1)
        if innermost is None or innermost.block is not block:
            raise RuntimeError(_INTERRUPTED)
        _in_effect.set(outer)


def slices(lengths: Sequence[int]) -> tuple[slice, ...]:
    """Returns consecutive slices of these lengths: ``[2, 3]`` -> 0 … 2, 2 … 5."""
    return tuple(slice(start, stop) for start, stop in pairwise([0, *accumulate(lengths)]))


def note_tokens(lengths: Sequence[int]) -> tuple[slice, ...]:
    """Tells the routing in effect where the rows of a batch are among its packed tokens.

    Args:
        lengths: the number of tokens in each row.

    Returns:
        The segments of rows; one of all rows if there is no routing, or one adapter has them all.

    Raises:
        ValueError: adapters are named for a different number of rows.
    """
    routing = in_effect()
    if routing is None or routing.rows is None:
        return slices([len(lengths)])
    named = routing.rows[-1].stop
    if len(lengths) != named:
        has = counted(len(lengths), "row")
        raise ValueError(f"the batch has {has}, but adapters are given for {named}")
    ends = [0, *accumulate(lengths)]
    tokens = tuple(slice(ends[rows.start], ends[rows.stop]) for rows in routing.rows)
    # At its end, the `routed` block restores the routing before it, whatever is set here.
    _in_effect.set(replace(routing, tokens=tokens))
    return routing.rows


def note_inputs(routing: Routing, head: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tells the routing in effect that a head of the model is called; see `forget_inputs`.

    The routing itself never changes: threads may share it, if they were given a copy of the context
    that a block is in, as by `asyncio.to_thread`.
    """
    noted = Inputs(args, kwargs, routing.inputs.get(head))
    _in_effect.set(replace(routing, inputs={**routing.inputs, head: noted}))


def forget_inputs(routing: Routing, head: str) -> None:
    """Tells the routing in effect that a call of a head has ended, or has failed."""
    noted = routing.inputs.get(head)
    if noted is not None:
        inputs = {name: each for name, each in routing.inputs.items() if name != head}
        if noted.outer is not None:
            inputs[head] = noted.outer
        _in_effect.set(replace(routing, inputs=inputs))


def for_each_segment(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns a linear layer's output for positions, which all rows share, in every segment.

    The layer's own product is computed once.

    Args:
        layer: (…, in) -> (…, out), with or without updates.
        x: (n, in), embeddings of positions.

    Returns:
        One (n, out) per segment; a single one if there is no routing, or one adapter has all rows.
    """
    routing = in_effect()
    if routing is None:
        return [layer(x)]
    with routed(replace(routing, positions=True)):
        out = layer(x)
    # A layer that none of these adapters updates has one output for all segments.
    return list(out) if out.dim() > x.dim() else [out] * len(routing.adapters)
