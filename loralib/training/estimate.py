"""Estimates what training takes before it begins: memory by kind, arithmetic, time.

The loop's own step runs on PyTorch's fake tensors, which have a shape, a dtype and a device, but no
memory. What it would hold and multiply is counted on the way, so the figures follow the code:

    weights, without memory --.
                              +--> forward, backward, update --> most bytes held at once: memory
    a batch of token ids -----'                              --> matrix products: arithmetic

Batches are real, and so are tensors made from them alone, because models decide by lengths and
masks what to compute. Only tensors are counted: what libraries need besides, for packed matrices or
caches, is not known until they use it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..io.command_line import check_bounds
from ..io.console import in_words, table
from ..text import counted
from .product_choices import choose_products, frozen_weights

if TYPE_CHECKING:  # otherwise imported where it is used: it takes a second, and few runs use it
    from torch._subclasses.fake_tensor import FakeTensorMode

logger = logging.getLogger(__name__)

_Batch = TypeVar("_Batch")

# How many layers a rate is measured with. All layers are alike, and the head is computed as well.
LAYERS_TIMED = 2
# For how many seconds steps are timed.
_TIMED = 2.0


@dataclass(frozen=True)
class Training(Generic[_Batch]):
    """A training loop's parts.

    Args:
        model: what is trained, with frozen weights in the precision in which they are held.
        optimizer: of its trained parameters.
        add_gradients: runs a batch's forward and backward pass.
        update: applies the gradients and drops them.
    """

    model: nn.Module
    optimizer: Optimizer
    add_gradients: Callable[[_Batch], None]
    update: Callable[[], None]


@dataclass(frozen=True)
class Memory:
    """Bytes on a device.

    Args:
        weights: parameters and buffers, in the precision in which they are held.
        gradients: those of the trained parameters.
        optimizer: its state.
        activations: what the forward and backward pass hold besides, at the peak.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Cost:
    """What computing a batch takes.

    Args:
        parameters, trained: how many parameters the model has, and how many of them are trained.
        memory: what is held while the batch is computed.
        operations: multiplications and additions of its matrix products, forward and backward.
    """

    parameters: int
    trained: int
    memory: Memory
    operations: int


# ---- counting ----


def cost_of_batch(
    build: Callable[[], Training[_Batch]], batch: _Batch, device: torch.device, passes: int = 1
) -> Cost:
    """Counts what a batch takes in a run that has already made an update.

    Args:
        build: makes the loop's parts.
        batch: a real one.
        device: where it would be computed.
        passes: how many batches make one update. If there is more than one, gradients are held
            while the next batch is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, torch.device(device):
        training = build()
        _make_state(training.optimizer)
    parameters, trained = list(training.model.parameters()), _trained(training.optimizer)
    own = [*parameters, *training.model.buffers()]
    state = tree_leaves(list(training.optimizer.state.values()))
    count = min(passes, 2)
    counter, live = _Operations(), LiveBytes([own, state], fake)
    with counter, live:
        for _ in range(count):
            training.add_gradients(batch)
        training.update()
    weights, averages = (sum(_storages(tensors).values()) for tensors in (own, state))
    gradients = sum(p.numel() * p.element_size() for p in trained)
    memory = Memory(weights, gradients, averages, max(live.peak - gradients, 0))
    numbers = sum(p.numel() for p in parameters), sum(p.numel() for p in trained)
    return Cost(*numbers, memory=memory, operations=counter.total // count)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _make_state(optimizer: Optimizer) -> None:
    """Has the optimizer make its state, which it does at its first update."""
    for parameter in _trained(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _storages(values: Any) -> dict[int, int]:
    """Returns the storages of all tensors in some values: the bytes of each, by its address."""
    tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made within its block and still held.

    Args:
        before: tensors, in any nesting, that are already held. What shares memory with them is not
            counted.
        fake: the mode in which large tensors that depend on no other, such as random numbers, are
            made without memory. Small ones stay real, because a model may decide by their values.

    Attributes:
        held: the bytes held now.
        peak: the most bytes held so far.
    """

    _SMALL = 2**16

    def __init__(self, before: Any = (), fake: "FakeTensorMode | None" = None):
        super().__init__()
        self.fake = fake
        self.held = self.peak = 0
        self._known = {*_storages(before)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [index for given in args[1] for index in _numbers(given)])
        out = self._large(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _large(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the result without memory if it is a large tensor made from no other, or None."""
        if self.fake is None or any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
            return None
        with self.fake:
            out = func(*args, **kwargs)
        return out if isinstance(out, Tensor) and out.numel() > self._SMALL else None

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        finalize(storage, self._drop, key, storage.nbytes()).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def _numbers(index: Tensor | None) -> Sequence[Tensor | None]:
    """Converts a mask to the indices that it selects, which tell the size of the result.

    Other indices are returned as they are.
    """
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return index.nonzero().unbind(1)


class _Operations(TorchDispatchMode):
    """Counts multiplications and additions within its block, by PyTorch's formulas.

    PyTorch's own `FlopCounterMode` counts by module, and for that holds the results of checkpointed
    layers, which are not held without it.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.formulas = {**flop_registry, **_cpu_formulas()}
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self.formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def _cpu_formulas() -> dict[Any, Callable[..., int]]:
    """Returns formulas for operations for which PyTorch has none."""
    from torch.utils.flop_counter import sdpa_flop_count

    def product(_: Tensor, a: Tensor, b: Tensor, **__: Any) -> int:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q.shape, k.shape, v.shape)

    def backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> int:
        # Five products, where forward has two: the scores once more, and the gradients of queries,
        # keys, probabilities and values.
        return 5 * sdpa_flop_count(q.shape, k.shape, v.shape) // 2

    return {
        torch.ops.aten.addmm_: product,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


# ---- the rate ----


SETTINGS = {
    "estimate": "print the number of trained parameters, memory per device, arithmetic and time, "
    "and exit without training; needs no weights",
    "estimate_devices": "number of devices for the run (default: those found here)",
    "estimate_rate": "speed of a device in GFLOP/s (default: measured here, in steps of two "
    "layers)",
    "estimate_length": (
        "tokens per sequence, instead of the data's (default without data: the longest sequence "
        "that the run allows)"
    ),
}
"""The settings of a script that makes estimates: name -> help text; see `check_settings`."""


def check_settings(args: Any) -> None:
    """Checks a script's settings for an estimate.

    Args:
        args: has an attribute for each name in `SETTINGS`; None for those that are not given.

    Raises:
        ValueError: a setting is given without `estimate`, or is out of its range.
    """
    for name in SETTINGS:
        if not args.estimate and getattr(args, name) not in (None, False):
            raise ValueError(f"{name} needs estimate")
    check_bounds("estimate_devices", args.estimate_devices, least=1)
    check_bounds("estimate_length", args.estimate_length, least=1)
    rate_of(args.estimate_rate)


def rate_of(text: str | None) -> float | None:
    """Converts the setting `estimate_rate`, in GFLOP/s, to operations per second.

    Raises:
        ValueError: it is not a number above 0.
    """
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ValueError(f"estimate_rate has to be a number of GFLOP/s above 0, not {text}")
    return 1e9 * rate


def measure_rate(
    build: Callable[[], Training[_Batch]], batch: _Batch, device: torch.device, dtype: torch.dtype
) -> float:
    """Measures a training step's operations per second on this machine, which takes some seconds.

    On a CPU, large products are computed as in the run: by the fastest methods.

    Args:
        build: makes the loop's parts, for a model of `LAYERS_TIMED` layers.
        batch: a real one.
        device: where to compute.
        dtype: the precision of products.
    """
    operations = cost_of_batch(build, batch, device).operations
    with torch.device(device):
        training = build()
    if device.type == "cpu":
        choose_products(frozen_weights(training.model), dtype, world_size=1)

    def step() -> None:
        training.add_gradients(batch)
        training.update()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()  # not timed: it also makes what later steps reuse
    begun, steps, seconds = time.perf_counter(), 0, 0.0
    while steps == 0 or seconds < _TIMED:
        step()
        steps, seconds = steps + 1, time.perf_counter() - begun
    return operations * steps / seconds


# ---- the whole run ----


class Rows(NamedTuple):
    """The rows of a batch, by their numbers, and how many tokens they have in total."""

    numbers: Sequence[int]
    tokens: int


def notable_batches(
    batches: Iterable[Sequence[int]], lengths: Sequence[int]
) -> tuple[Rows, Rows, Rows]:
    """Finds the batches that stand for all of them: `Plan`'s typical, largest and most_pairs.

    Args:
        batches: the numbers of each batch's rows.
        lengths: the number of tokens in each row.
    """
    each = [Rows(batch, sum(lengths[row] for row in batch)) for batch in batches]
    mean = sum(rows.tokens for rows in each) / len(each)
    typical = min(each, key=lambda rows: abs(rows.tokens - mean))
    largest = max(each, key=lambda rows: rows.tokens)
    most_pairs = max(each, key=lambda rows: sum(lengths[row] ** 2 for row in rows.numbers))
    return typical, largest, most_pairs


@dataclass(frozen=True)
class Plan(Generic[_Batch]):
    """How a run trains.

    Args:
        build: makes the loop's parts, for a model of this many layers; None for all layers.
        batch_of: makes a batch of the rows with these numbers.
        typical: the batch whose number of tokens is closest to the mean.
        largest: the batch with the most tokens.
        most_pairs: the batch with the most pairs of tokens in the same row. On a CPU, attention
            holds a probability for each pair.
        batches: how many batches make an optimizer step on each device.
        steps: the run's number of optimizer steps; None if unknown.
        device: where a process computes.
        dtype: the precision of products.
        devices: how many devices there are.
        rate: operations per second of each device; None to measure this one's.
    """

    build: Callable[[int | None], Training[_Batch]]
    batch_of: Callable[[Sequence[int]], _Batch]
    typical: Rows
    largest: Rows
    most_pairs: Rows
    batches: int
    steps: int | None
    device: torch.device
    dtype: torch.dtype
    devices: int
    rate: float | None


@dataclass(frozen=True)
class Estimate:
    """What a run takes; `str` of it is a table.

    Args:
        plan: how the run trains.
        parameters, trained: how many parameters there are, and how many of them are trained.
        memory: what a device holds with the batch that takes most.
        operations: those of a typical batch.
        rate: operations per second of each device.
    """

    plan: Plan[Any]
    parameters: int
    trained: int
    memory: Memory
    operations: int
    rate: float

    def __str__(self) -> str:
        groups = (self._about(), self._of_memory(), self._of_time())
        return table(*groups, width=22)

    def _about(self) -> list[tuple[str, str]]:
        plan, share = self.plan, 100 * self.trained / self.parameters
        dtype = str(plan.dtype).removeprefix("torch.")
        batches = counted(plan.batches * plan.devices, "batch", "batches")
        rows = counted(len(plan.typical.numbers), "row")
        tokens = counted(plan.typical.tokens, "token")
        return [
            ("parameters", f"{self.parameters:,}"),
            ("trained", f"{self.trained:,} ({share:.2f} %)"),
            ("computed in", f"{dtype}, on {plan.device.type}"),
            ("devices", f"{plan.devices:,}"),
            ("an optimizer step", f"{batches}, {plan.batches:,} a device"),
            ("a batch", f"{rows}; {tokens}, at most {plan.largest.tokens:,}"),
        ]

    def _of_memory(self) -> list[tuple[str, str]]:
        memory = self.memory
        kinds = ("weights", "gradients", "optimizer", "activations", "total")
        named = [(f"  {kind}", f"{getattr(memory, kind) / 2**30:10.3f} GiB") for kind in kinds]
        return [("memory a device", ""), *named]

    def _of_time(self) -> list[tuple[str, str]]:
        plan, operations = self.plan, self.operations * self.plan.batches
        source = "measured here" if plan.rate is None else "given"
        rows = [
            ("rate of a device", f"{self.rate / 1e9:,.0f} GFLOP/s ({source})"),
            ("arithmetic of a step", f"{operations * plan.devices / 1e12:,.3f} TFLOP"),
            ("time of a step", in_words(operations / self.rate)),
        ]
        if plan.steps is None:
            return rows
        every = operations * plan.steps
        return [
            *rows,
            ("optimizer steps", f"{plan.steps:,}"),
            ("arithmetic of the run", f"{every * plan.devices / 1e15:,.3f} PFLOP"),
            ("time of the run", in_words(every / self.rate)),
        ]


def estimate(plan: Plan[Any]) -> Estimate:
    """Estimates memory by the batch that takes most, and arithmetic and time by a typical one.

    The time is that of training only, without evaluations, checkpoints and start-up.
    """
    typical = plan.batch_of(plan.typical.numbers)
    whole = partial(plan.build, None)
    # Logged because it takes half a minute for a large model.
    logger.info("counting the arithmetic and the memory of a step, operation by operation")

    def cost_of(rows: Rows) -> Cost:
        return cost_of_batch(whole, plan.batch_of(rows.numbers), plan.device, plan.batches)

    cost = cost_of(plan.largest)
    operations = cost.operations
    if plan.typical.tokens < plan.largest.tokens:
        operations = cost_of_batch(whole, typical, plan.device).operations
    memory = cost.memory
    if plan.most_pairs != plan.largest:
        memory = max(memory, cost_of(plan.most_pairs).memory, key=lambda taken: taken.total)
    if plan.devices > 1:
        # DDP holds gradients a second time, in the buckets in which it sums them.
        memory = replace(memory, gradients=2 * memory.gradients)
    rate = plan.rate
    if rate is None:
        logger.info("measuring the rate of this %s with %d layers", plan.device.type, LAYERS_TIMED)
        build = partial(plan.build, LAYERS_TIMED)
        rate = measure_rate(build, typical, plan.device, plan.dtype)
    return Estimate(plan, cost.parameters, cost.trained, memory, operations, rate)
