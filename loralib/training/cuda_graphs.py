"""Runs a training step's forward and backward pass as one CUDA graph.

A GPU computes the kernels of a small step in a few milliseconds, but a processor takes ten times as
long to launch them one by one: a step of RoBERTa-base has hundreds. A CUDA graph records them once,
and launches all of them with one call.

A graph is for one size of batch, and sizes differ in nearly every batch. So `fill_up` adds a row of
tokens without a target, which brings a batch to a size that recurs. `GraphedStep` records a graph
for each size.

Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import gc
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import TrainingError
from ..nn.packing import PackedRows
from ..nn.row_buckets import round_up
from ..text import first_line

logger = logging.getLogger(__name__)

Batch = Mapping[str, Any]

# The limits of the steps in which numbers of tokens and of targets are rounded up.
_SMALLEST_STEP, _LARGEST_STEP = 8, 64
# Columns are rounded up to a multiple of this. Kernels of attention skip what no row has.
_COLUMNS = 64
# Batches of further sizes are not recorded.
_MOST_GRAPHS = 256

# Shown at the beginning of a run that uses graphs or could use them: a name and a value in a table.
IN_USE = ("CUDA graphs", "used; --no_cuda_graphs turns them off")
HINT = ("faster with", "--cuda_graphs")

# How much more memory a run takes with graphs, as measured (benchmarks/README.md).
MORE_MEMORY = "up to about a quarter more"
# Added to the error that memory is used up.
_OUT_OF_MEMORY = f"(CUDA graphs take {MORE_MEMORY}: --no_cuda_graphs turns them off)"


def why_no_graphs(device: torch.device, torch_compile: bool) -> str | None:
    """Returns why a run cannot use CUDA graphs, or None if it can.

    Args:
        device: where the run computes.
        torch_compile: whether layers are compiled.
    """
    if device.type != "cuda":
        return "--cuda_graphs needs a GPU: leave it out"
    if torch_compile:
        return "--cuda_graphs and --torch_compile do not go together: leave one out"
    return None


def are_default(processes: int) -> bool:
    """Returns whether scripts use CUDA graphs by default, where they can.

    They have not yet been run on several GPUs, nor on AMD's.

    Args:
        processes: the number of processes that train together.
    """
    return processes == 1 and torch.version.hip is None


def uses_graphs(
    asked: bool | None, before: bool | None, reason: str | None, by_default: bool
) -> bool:
    """Returns whether a run uses CUDA graphs.

    Args:
        asked: what --cuda_graphs says; None if it is not given.
        before: whether the run that is resumed has used them; None for a new run.
        reason: why the run cannot use them; None if it can.
        by_default: whether a new run uses them without being asked, if it can.

    Raises:
        ValueError: they are asked for, and the run cannot use them.
    """
    if asked and reason is not None:
        raise ValueError(reason)
    if asked is not None:
        return asked
    return reason is None and (by_default if before is None else before)


def goes_on_without(where: str | os.PathLike, before: bool, now: bool, is_main: bool) -> bool:
    """Returns whether a resumed run goes on without the CUDA graphs that it began with, and warns.

    It may, because graphs can turn out to take too much memory.

    Args:
        where: the file or folder from which it resumes.
        before, now: whether it has used graphs, and whether it does now.
        is_main: whether this is the process that warns.
    """
    if before and not now and is_main:
        logger.warning(
            "%s: resumes, but not bit-exactly: the run began with CUDA graphs, and goes on without",
            where,
        )
    return before and not now


# ------------------------------------------------------------------------------------------------
# Batches of sizes that recur
# ------------------------------------------------------------------------------------------------


def fill_up(batch: Batch, ignored: Mapping[str, int], longest: int | None = None) -> Batch:
    """Adds a row of tokens without targets, so that the batch's size is one that recurs.

    The other rows' results change by rounding alone.

    Args:
        batch: tensors by name, with ``packed_rows`` as its collator makes them on the CPU.
        ignored: what labels, (batch,) or (batch, length), hold where the loss ignores them, by
            name. Other tensors of (batch, length) are filled with 0.
        longest: the most columns that the model takes.

    Returns:
        The filled batch, whose rows say so by `is_filled`; the same batch if it cannot be filled.
    """
    rows = batch.get("packed_rows")
    if not isinstance(rows, PackedRows) or not rows.padded_right or rows.starts_padded:
        return batch
    if longest is not None and rows.shape[1] > longest:
        return batch
    filled = _filled_rows(rows, longest)
    wider = filled.shape[1] - rows.shape[1]
    parts: dict[str, Any] = {"packed_rows": filled}
    for name, part in batch.items():
        if name == "packed_rows":
            continue
        if not isinstance(part, Tensor):
            return batch
        if part.shape == rows.shape:
            parts[name] = F.pad(part, (0, wider, 0, 1), value=ignored.get(name, 0))
        elif name in ignored and part.shape == rows.shape[:1]:
            parts[name] = F.pad(part, (0, 1), value=ignored[name])
        else:
            return batch
    return parts


@dataclass(frozen=True)
class FillingCollator:
    """Makes batches as another collator does, and fills them up; see `fill_up`.

    Args:
        collator: makes a batch, with ``packed_rows``, of a list of examples.
        ignored, longest: as in `fill_up`.
    """

    collator: Callable[[Any], Batch]
    ignored: Mapping[str, int]
    longest: int | None

    def __call__(self, examples: Any) -> Batch:
        """Returns the filled batch."""
        return fill_up(self.collator(examples), self.ignored, self.longest)


def _filled_rows(rows: PackedRows, longest: int | None) -> PackedRows:
    """Returns rows of a size that recurs: these, and one more of as many tokens as are missing."""
    columns = rows.shape[1] + -rows.shape[1] % _COLUMNS
    if longest is not None:
        columns = min(columns, longest)
    tokens = len(rows.index)
    # One more, because the added row needs at least one token. It has no more than fit in.
    added = round_up(tokens + 1, min(_LARGEST_STEP, columns), _SMALLEST_STEP) - tokens
    filled = PackedRows.from_lengths([*rows.lengths, added], columns)
    filled.longest = filled.used_columns = columns
    filled.is_filled = True
    if rows.targets is not None:
        targets = len(rows.targets)
        missing = round_up(targets, _LARGEST_STEP, _SMALLEST_STEP) - targets
        filled.targets = F.pad(rows.targets, (0, missing), value=tokens)  # the added row's first
    return filled


# ------------------------------------------------------------------------------------------------
# Steps
# ------------------------------------------------------------------------------------------------


class _AnyLength(Sequence[int]):
    """The lengths of rows in a graph: their number is known, and they differ from batch to batch.

    Reading one is an error, because a graph would keep it for all batches.
    """

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> NoReturn:
        raise RuntimeError("a CUDA graph is for rows of any length, so none can be read")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AnyLength)

    __hash__ = None  # type: ignore[assignment]


class _Recorded(NamedTuple):
    """A graph, the tensors that it reads and its loss, and the parameters that it trains."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Tensor
    trained: list[nn.Parameter]


class GraphedStep:
    """Adds a batch's gradients to those of the parameters, and returns the loss, by CUDA graphs.

    Hooks of the model and of its parameters run only while a step is recorded.

    Everything that the step does besides reading the batch has to be the same for each batch of a
    size: which parameters are trained, dropout's probability. Parameters may change in place; if
    they move in memory, are frozen, or a module changes its mode, graphs are recorded anew.

    Args:
        step: batch, constants -> the detached loss, after a backward pass. Must not wait for the
            device, nor read `PackedRows.lengths`. Moves batches that have no graph to the device.
        model: the model; on a GPU.
    """

    def __init__(self, step: Callable[..., Tensor], model: nn.Module):
        self._step = step
        self._modules = list(model.modules())
        self._parts = self._parts_now()
        self._tensors = [*model.parameters(), *model.buffers()]
        self._device = self._tensors[0].device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._warnings: set[str] = set()
        # Streams of its own. A graph is destroyed with what cuBLAS keeps for its stream, which the
        # stream's other graphs read as well; so they are destroyed together. And cuBLAS keeps
        # memory for each stream, so each recording takes the same two.
        self._warm_up_stream, self._stream = (torch.cuda.Stream(self._device) for _ in range(2))
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, *constants: Hashable) -> Tensor:
        """Runs the step on a batch; without a graph if `fill_up` could not fill it.

        Args:
            batch: tensors and ``packed_rows``, on the device or in pinned memory; copying them from
                other memory waits for the device.
            constants: further arguments of the step.

        Raises:
            TrainingError: PyTorch cannot record the step, or the model has other parts by now.
            torch.OutOfMemoryError: there is too little memory to record it.
        """
        rows = batch.get("packed_rows")
        if not (isinstance(rows, PackedRows) and rows.is_filled):
            self._warn_once(
                "CUDA graphs take batches that are padded on the right, with a token in each row: "
                "others are computed without"
            )
            return self._step(batch, *constants)
        self._check_model()
        tensors = _tensors_of(batch)
        key = self._key(batch, tensors, constants)
        recorded = self._recorded.get(key)
        if recorded is None:
            if len(self._recorded) == _MOST_GRAPHS:
                self._warn_once(
                    f"there are CUDA graphs for {_MOST_GRAPHS} sizes of batch, the most that are "
                    "recorded: batches of other sizes are computed without"
                )
                return self._step(batch, *constants)
            try:
                recorded = self._recorded[key] = self._record(batch, constants)
            except torch.OutOfMemoryError as error:
                # Of the error's class, for programs that try again with a smaller batch.
                raise torch.OutOfMemoryError(f"{error} {_OUT_OF_MEMORY}") from error
        return self._replay(recorded, tensors)

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings:
            logger.warning(message)
        self._warnings.add(message)

    def _key(
        self, batch: Batch, tensors: list[Tensor], constants: tuple[Hashable, ...]
    ) -> Hashable:
        """Returns what has to be the same for a graph to be used again."""
        parts = tuple((part.shape, part.dtype) for part in tensors)
        model = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors)
        modes = tuple(module.training for module in self._modules)
        return tuple(batch), parts, model, modes, constants

    def _record(self, batch: Batch, constants: tuple[Hashable, ...]) -> _Recorded:
        if not self._recorded:
            # A graph of autograd that nothing needs any more would join the recording.
            gc.collect()
        batch = {name: _copied(part, self._device) for name, part in batch.items()}
        parameters = [x for x in self._tensors if isinstance(x, nn.Parameter)]
        pending = [parameter.grad for parameter in parameters]
        state = torch.cuda.get_rng_state(self._device)

        def run() -> Tensor:
            return self._step(batch, *constants)

        _set_gradients(parameters, [None] * len(parameters))
        _warm_up(run, self._warm_up_stream)
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        _set_gradients(trained, [self._sum_of(parameter) for parameter in trained])
        torch.cuda.set_rng_state(state, self._device)
        graph, loss = _capture(run, self._stream, self._pool)
        _set_gradients(parameters, pending)
        return _Recorded(graph, _tensors_of(batch), loss, trained)

    def _check_model(self) -> None:
        """Checks that the model still has the modules and tensors that graphs are recorded with.

        Raises:
            TrainingError: it has others.
        """
        now = self._parts_now()
        if len(now) != len(self._parts) or not all(map(is_, now, self._parts)):
            raise TrainingError(
                "modules or tensors of the model were replaced during training, which CUDA graphs "
                "do not support: train with --no_cuda_graphs"
            )

    def _parts_now(self) -> list[nn.Module | Tensor | None]:
        """Returns what the modules hold; cheaply, because each step compares it."""
        return [
            part
            for module in self._modules
            for held in (module._parameters, module._buffers, module._modules)
            for part in held.values()
        ]

    def _replay(self, recorded: _Recorded, tensors: list[Tensor]) -> Tensor:
        for held, given in zip(recorded.inputs, tensors, strict=True):
            held.copy_(given, non_blocking=True)
        self._prepare_sums(recorded.trained)
        recorded.graph.replay()
        return recorded.loss.clone()

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        """Returns the memory in which graphs add up a parameter's gradients."""
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter)
        return self._sums[parameter]

    def _prepare_sums(self, trained: list[nn.Parameter]) -> None:
        """Makes sums the parameters' gradients: of 0 if they have none, else of those they have."""
        begun = []
        for parameter in trained:
            pending, total = parameter.grad, self._sum_of(parameter)
            if pending is None:
                begun.append(total)
            elif pending is not total:  # of a batch without a graph
                total.copy_(pending)
            parameter.grad = total
        if begun:
            torch._foreach_zero_(begun)


def _warm_up(run: Callable[[], Tensor], stream: torch.cuda.Stream) -> None:
    """Runs a step without recording it, so that libraries set themselves up."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)


def _capture(
    run: Callable[[], Tensor], stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Records a step, and returns the graph and its loss, which has no value yet.

    Raises:
        TrainingError: PyTorch cannot record it.
    """
    graph, first = torch.cuda.CUDAGraph(), None
    try:
        # Not "global": threads that prepare batches may pin memory meanwhile.
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            try:
                loss = run()
            except BaseException as error:
                first = error
                raise
    except RuntimeError as error:
        # To end a recording that has failed is an error as well, which hides the first one.
        cause = first or error
        if isinstance(cause, torch.OutOfMemoryError) or not isinstance(cause, RuntimeError):
            raise cause from cause.__cause__
        raise TrainingError(
            f"this step cannot be recorded as a CUDA graph ({first_line(cause)}): train with "
            "--no_cuda_graphs"
        ) from cause
    return graph, loss


def _tensors_of(batch: Batch) -> list[Tensor]:
    """Returns a batch's tensors, those of its rows included, in a fixed order."""
    tensors: list[Tensor] = []
    for name in sorted(batch):
        part = batch[name]
        tensors += part.tensors() if isinstance(part, PackedRows) else [part]
    return tensors


def _copied(part: Tensor | PackedRows, device: torch.device) -> Tensor | PackedRows:
    """Returns a part of a batch in memory of its own on the device, without the rows' lengths."""
    if isinstance(part, Tensor):
        return part.to(device, copy=True)
    rows = part.copied(device)
    rows.lengths = rows.spans = _AnyLength(len(part.lengths))  # type: ignore[assignment]
    return rows


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
