"""What the Trainer needs of PyTorch: the order of the data, and gathering from all processes."""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


class TrainingBatches:
    """Batches of indices for one process, in an order that all processes agree on.

    A pass over the data is a permutation, cut into steps of batch_size × world_size examples; a
    process takes every world_size-th example of a step. So N processes of batch size b take the
    steps of one process of batch size N·b, whatever the number of examples.

    Args:
        count: examples in the set.
        batch_size: examples a step on each process.
        seed: of the permutation, together with `epoch`.
        world_size, rank: number of processes, and this one's.
        drop_last: leave out a last step that is not full.
        lengths: the examples' lengths; where given, a step has examples of about one length.

    Attributes:
        epoch: the pass that is iterated over.
        skip: steps to leave out at its beginning, for a run that goes on in its middle.
    """

    # Steps within which examples are sorted, so that grouping leaves enough to chance.
    _STEPS_A_GROUP = 50

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int,
        world_size: int = 1,
        rank: int = 0,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
    ):
        if count < 1:
            raise ValueError("the training set is empty")
        self.count, self.seed, self.lengths = count, seed, lengths
        self.world_size, self.rank = world_size, rank
        self.step_size = batch_size * world_size
        self.steps = count // self.step_size if drop_last else math.ceil(count / self.step_size)
        if self.steps == 0:
            raise ValueError(
                f"the training set has {count} examples, a step takes {self.step_size}, and "
                "--dataloader_drop_last leaves out the only one"
            )
        self.epoch = 0
        self.skip = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step in range(self.skip, self.steps):
            examples = order[step * self.step_size : (step + 1) * self.step_size]
            # A process without an example in the last step computes one for nothing: the others
            # wait for its part in the sum of gradients. `weight` makes that part zero.
            yield examples[self.rank :: self.world_size] or examples[:1]

    def weight(self, step: int) -> float:
        """What to multiply this process's mean loss with in a step.

        The mean over processes of the losses so weighted is the mean over the step's examples.
        """
        size = min(self.step_size, self.count - step * self.step_size)
        return len(range(self.rank, size, self.world_size)) * self.world_size / size

    def _order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        if self.lengths is None:
            return order
        size = self.step_size * max(1, min(self._STEPS_A_GROUP, self.steps // 4))
        groups = [order[start : start + size] for start in range(0, self.count, size)]
        return [i for group in groups for i in sorted(group, key=lambda i: -self.lengths[i])]


class EvaluationBatches:
    """Batches of indices for one process's share of a set, each example in one share.

    Args:
        count: examples in the set.
        batch_size: examples a batch.
        world_size, rank: number of processes, and this one's.
    """

    def __init__(self, count: int, batch_size: int, world_size: int = 1, rank: int = 0):
        self.indices = list(range(rank, count, world_size))
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield self.indices[start : start + self.batch_size]


class Collector:
    """One process's tensors of an evaluation, batch after batch; nothing where a batch has none.

    Args:
        steps: batches after which what is there moves to the CPU; only at the end where None.
    """

    def __init__(self, steps: int | None = None):
        self.steps = steps
        self._on_device: list[Tensor] = []
        self._on_cpu: list[Tensor] = []

    def add(self, batch: Tensor | None) -> None:
        """Takes a batch's tensor, (rows, …)."""
        if batch is not None:
            self._on_device.append(batch)
        if self.steps is not None and len(self._on_device) >= self.steps:
            self._move()

    def array(self) -> np.ndarray | None:
        """All rows, or None where there were none."""
        self._move()
        return torch.cat(self._on_cpu).numpy() if self._on_cpu else None

    def _move(self) -> None:
        if self._on_device:
            self._on_cpu.append(torch.cat(self._on_device).cpu())
            self._on_device = []


def gather_objects(value: Any, world_size: int) -> list[Any]:
    """Every process's `value`, in the order of the processes, on every process."""
    values = [value]
    if world_size > 1:
        values = [None] * world_size
        dist.all_gather_object(values, value)
    return values


def gather_in_order(
    indices: list[int], values: np.ndarray | None, world_size: int
) -> np.ndarray | None:
    """The rows of all processes, row i being the one with index i, on every process."""
    shares = [s for s in gather_objects((indices, values), world_size) if s[1] is not None]
    if not shares:
        return None
    order = np.argsort(np.concatenate([share[0] for share in shares]))
    return np.concatenate([share[1] for share in shares])[order]


def sum_over_processes(value: Tensor, world_size: int) -> Tensor:
    """The sum of every process's `value`, on every process."""
    if world_size > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def decayed_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters that decay, and those that do not: biases and layer norms."""
    of_norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spared = name.endswith("bias") or id(parameter) in of_norms
            (others if spared else decayed).append(parameter)
    return decayed, others


def memory_metrics(split: str, device: torch.device) -> dict[str, int]:
    """Peak memory so far, in bytes: this process's on the CPU and, where used, on the GPU."""
    metrics = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        metrics[f"{split}_mem_cpu_peak"] = peak * unit
    if device.type == "cuda":
        metrics[f"{split}_mem_gpu_peak"] = torch.cuda.max_memory_allocated(device)
    return metrics
