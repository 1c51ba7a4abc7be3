"""Estimates what a run takes before it begins: memory by kind, arithmetic, time.

Memory and arithmetic of a step are counted, see step_cost.py. The time follows from a rate, in
operations per second, which is given, or measured in a few steps of a model of two layers.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, NamedTuple

import numpy as np
import torch

from ..io.command_line import check_bounds
from ..io.console import in_words, table
from ..text import counted
from .cuda_graphs import MORE_MEMORY
from .product_choices import choose_products, frozen_weights
from .step_cost import Batch, Cost, Memory, Training, cost_of_batch

logger = logging.getLogger(__name__)

# How many layers a rate is measured with. All layers are alike, and the head is computed as well.
LAYERS_TIMED = 2
# For how many seconds steps are timed.
_TIMED = 2.0
# How many epochs are searched for the largest batches; a run by steps may have any number.
_EPOCHS = 100
# Units and their sizes, from the largest.
_BYTES = (("GiB", 2**30), ("MiB", 2**20))
_OPERATIONS = (("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9))

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
    build: Callable[[], Training[Batch]], batch: Batch, device: torch.device, dtype: torch.dtype
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
    while seconds < _TIMED:
        step()
        steps, seconds = steps + 1, time.perf_counter() - begun
    return operations * steps / seconds


class Rows(NamedTuple):
    """The rows of a batch, by their numbers, and how many tokens they have in total."""

    numbers: Sequence[int]
    tokens: int


def notable_batches(
    epochs: Iterable[Iterable[Sequence[int]]], lengths: Sequence[int]
) -> tuple[Rows, Rows, Rows]:
    """Finds the batches that stand for all of a run: `Plan`'s typical, largest and most_pairs.

    Args:
        epochs: the batches of each epoch, on all devices, as the numbers of their rows; none is
            empty. At most 100 epochs are looked at. The typical batch is of the first, because the
            mean hardly differs from epoch to epoch.
        lengths: the number of tokens in each row.
    """
    of_rows = np.asarray(lengths, np.int64)

    def of_epoch(batches: Iterable[Sequence[int]]) -> tuple[Rows, Rows, Rows]:
        each = list(batches)
        sizes = np.array([len(batch) for batch in each])
        tokens_of_rows = of_rows[np.fromiter(chain.from_iterable(each), np.int64, sizes.sum())]
        starts = sizes.cumsum() - sizes
        tokens = np.add.reduceat(tokens_of_rows, starts)
        pairs = np.add.reduceat(tokens_of_rows**2, starts)
        places = abs(tokens - tokens.mean()).argmin(), tokens.argmax(), pairs.argmax()
        typical, largest, most_pairs = (Rows(each[place], int(tokens[place])) for place in places)
        return typical, largest, most_pairs

    # Only three batches of each epoch are kept: a run of MNLI has 12 million rows.
    found = [of_epoch(batches) for batches in islice(epochs, _EPOCHS)]
    _, largest, most_pairs = of_epoch([rows.numbers for each in found for rows in each[1:]])
    return found[0][0], largest, most_pairs


@dataclass(frozen=True)
class Plan(Generic[Batch]):
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
        total: how many batches the run has on each device, also those that make no step; None if
            unknown.
        device: where a process computes.
        dtype: the precision of products.
        devices: how many devices there are.
        rate: operations per second of each device; None to measure this one's.
    """

    build: Callable[[int | None], Training[Batch]]
    batch_of: Callable[[Sequence[int]], Batch]
    typical: Rows
    largest: Rows
    most_pairs: Rows
    batches: int
    steps: int | None
    total: int | None
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
        unit, size = _unit_of(memory.total, _BYTES)
        kinds = ("weights", "gradients", "optimizer", "activations", "total")
        named = [(f"  {kind}", f"{getattr(memory, kind) / size:10.3f} {unit}") for kind in kinds]
        if self.plan.device.type == "cuda":
            named.append(("  with CUDA graphs", MORE_MEMORY))
        return [("memory a device", ""), *named]

    def _of_time(self) -> list[tuple[str, str]]:
        plan, operations = self.plan, self.operations * self.plan.batches
        source = "measured here" if plan.rate is None else "given"
        rows = [
            ("rate of a device", f"{self.rate / 1e9:,.0f} GFLOP/s ({source})"),
            ("arithmetic of a step", _arithmetic(operations * plan.devices)),
            ("time of a step", in_words(operations / self.rate)),
        ]
        if plan.steps is None or plan.total is None:
            return rows
        every = self.operations * plan.total
        return [
            *rows,
            ("optimizer steps", f"{plan.steps:,}"),
            ("arithmetic of the run", _arithmetic(every * plan.devices)),
            ("time of the run", in_words(every / self.rate)),
        ]


def _unit_of(quantity: int, units: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Returns the largest unit that is not larger than the quantity, or else the smallest."""
    return next((unit for unit in units if quantity >= unit[1]), units[-1])


def _arithmetic(operations: int) -> str:
    unit, size = _unit_of(operations, _OPERATIONS)
    return f"{operations / size:,.3f} {unit}"


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
