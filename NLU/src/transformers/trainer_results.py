"""The results of an evaluation: losses, predictions and labels, gathered from all processes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loralib.errors import TrainingError
from loralib.training.distributed import gather_objects, sum_over_processes

from .trainer_data import ExampleSampler, length_of
from .trainer_pt_utils import has_targets, join_rows


class Evaluation:
    """The results of one evaluation: this process's batches, and at the end those of all processes.

    Args:
        loader: makes the batches. If its sampler has `EvaluationBatches`, the results are in the
            set's order. Otherwise they are in the loader's order, process by process, and are cut
            to the set's length, because samplers fill up the last process's share.
        device: the device of the losses.
        world_size, rank: the number of processes, and this one's rank.
        accumulation_steps: see `Collector`.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        world_size: int,
        rank: int,
        accumulation_steps: int | None = None,
    ):
        sampler = getattr(loader, "sampler", None)
        self._share = sampler.batches if isinstance(sampler, ExampleSampler) else None
        # Not the share's own: a subclass's loader may make other batches of the same order.
        self._batch_size = getattr(loader, "batch_size", None)
        self._set_length = length_of(getattr(loader, "dataset", None))
        self._device, self._world_size, self._rank = device, world_size, rank
        self._collectors = [Collector(accumulation_steps), Collector(accumulation_steps)]
        self._rows: list[int] = []
        self._losses: list[Tensor | None] = []
        self._have_targets: list[bool | Tensor] = []

    def add(
        self,
        inputs: Any,
        loss: Tensor | None,
        predictions: Tensor | Sequence[Tensor] | None,
        labels: Tensor | Sequence[Tensor] | None,
    ) -> None:
        """Adds a batch and what `Trainer.prediction_step` returned for it.

        Raises:
            TrainingError: predictions or labels do not have one row for each example.
        """
        rows = rows_of(inputs) if self._share is None else self._rows_in_share()
        self._rows.append(rows)
        self._losses.append(None if loss is None else loss.detach().mean())
        self._have_targets.append(has_targets(inputs))
        for collector, parts in zip(self._collectors, (predictions, labels), strict=True):
            batch = as_tensors(parts)
            check_rows(batch, rows)
            collector.add(batch)

    def _rows_in_share(self) -> int:
        done = len(self._rows) * self._batch_size
        return min(self._batch_size, self._share.examples - done)

    def results(self) -> tuple[float | None, Any, Any, int]:
        """Returns the mean loss, the predictions, the labels and the number of examples.

        They are the same on every process. Results that no batch had are None.
        """
        counts = gather_objects(sum(self._rows), self._world_size)
        own, total = counts[self._rank], sum(counts)
        limit = total if self._set_length is None else self._set_length
        if self._share is not None:
            indices = self._share.indices[:own]  # a loader may leave out a last batch
        else:
            start = sum(counts[: self._rank])
            indices = range(start, start + own)
        gathered = [
            gather_in_order(indices, collector.arrays(), self._world_size)
            for collector in self._collectors
        ]
        predictions, labels = (one_or_all([part[:limit] for part in parts]) for parts in gathered)
        return self._mean_loss(indices, limit), predictions, labels, min(total, limit)

    def _mean_loss(self, indices: Sequence[int], limit: int) -> float | None:
        """Returns the mean over the examples with an index below `limit` in batches with targets.

        If all labels of a batch are ignored, its loss (0, or of PyTorch's functions nan) has no
        meaning and does not count.
        Returns nan if no batch has targets, and None if no batch has a loss.
        """
        counts, losses, done = [], [], 0
        batches = zip(self._rows, self._losses, self._have_targets, strict=True)
        for rows, loss, has_target in batches:
            if loss is not None:
                counted = indices[done : done + rows] if has_target else ()
                counts.append(sum(index < limit for index in counted))
                losses.append(loss.double())
            done += rows
        values = torch.stack(losses).tolist() if losses else []
        pairs = zip(counts, values, strict=True)
        own = math.fsum(count * value for count, value in pairs if count)
        sums = [own, sum(counts), len(losses)]
        sums = torch.tensor(sums, dtype=torch.float64, device=self._device)
        total, count, had_loss = sum_over_processes(sums, self._world_size).tolist()
        if not had_loss:
            return None
        return total / count if count else math.nan


class Collector:
    """Collects one process's tensors of an evaluation, batch by batch.

    Args:
        steps: the number of batches after which the tensors are moved to the CPU. If None, they are
            moved only at the end.
    """

    def __init__(self, steps: int | None = None):
        self.steps = steps
        self._dimensions: list[int] | None = None  # of each tensor
        self._on_device: list[tuple[Tensor, ...]] = []
        self._on_cpu: list[tuple[Tensor, ...]] = []

    def add(self, batch: tuple[Tensor, ...]) -> None:
        """Adds a batch's tensors, (rows, …) each.

        Raises:
            TrainingError: the batches before had another number of them, or of dimensions.
        """
        dimensions = [part.dim() for part in batch]
        if self._dimensions not in (None, dimensions):
            raise TrainingError(
                "predictions or labels have other dimensions in this batch than in those before, "
                "as after a squeeze() of a batch of one example: name the dimension to drop, as in "
                "squeeze(-1)"
            )
        self._dimensions = dimensions
        self._on_device.append(batch)
        if self.steps is not None and len(self._on_device) >= self.steps:
            self._move()

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns each tensor with the rows of all batches, concatenated by `join_rows`."""
        self._move()
        return tuple(join_rows(parts).numpy() for parts in zip(*self._on_cpu, strict=True))

    def _move(self) -> None:
        if self._on_device:
            joined = (join_rows(parts) for parts in zip(*self._on_device, strict=True))
            self._on_cpu.append(tuple(part.cpu() for part in joined))
            self._on_device = []


def gather_in_order(
    indices: Sequence[int], arrays: tuple[np.ndarray, ...], world_size: int
) -> tuple[np.ndarray, ...]:
    """Returns each array with the rows of all processes, sorted by their indices.

    The result is the same on every process. Shorter rows are padded as in `join_rows`.
    """
    shares = [share for share in gather_objects((indices, arrays), world_size) if share[1]]
    order = np.argsort([index for share in shares for index in share[0]], kind="stable")
    whole = zip(*(share[1] for share in shares), strict=True)
    return tuple(
        join_rows([torch.from_numpy(part) for part in parts]).numpy()[order] for parts in whole
    )


def rows_of(inputs: Any) -> int:
    """Returns the number of examples in a batch, which is the number of its first tensor's rows.

    Raises:
        TrainingError: the batch has no tensor with rows.
    """
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return len(value)
    raise TrainingError("a batch has no tensor with a row for each example")


def check_rows(batch: tuple[Tensor, ...], count: int) -> None:
    """Checks that a batch's tensors have one row for each of its examples.

    Raises:
        TrainingError: a tensor does not have `count` rows.
    """
    for part in batch:
        if len(part) != count:
            raise TrainingError(
                f"the model returned {len(part)} rows for {count} examples, in a tensor of the "
                f"shape {tuple(part.shape)}: predictions need a row for each example"
            )


def as_tensors(parts: Any) -> tuple[Tensor, ...]:
    """Returns tensors as a tuple; the reverse of `one_or_all`.

    Raises:
        TrainingError: `parts` holds anything else, such as nested lists.
    """
    parts = () if parts is None else (parts,) if isinstance(parts, Tensor) else parts
    if not isinstance(parts, tuple | list) or not all(isinstance(part, Tensor) for part in parts):
        raise TrainingError(
            "prediction_step has to return the loss, predictions and labels, the latter two as a "
            "tensor or a tuple of tensors each"
        )
    return tuple(parts)


def one_or_all(parts: Sequence[Any]) -> Any:
    """Returns a single tensor or array by itself, several as a tuple, and None for none."""
    return parts[0] if len(parts) == 1 else tuple(parts) or None


def plain_metrics(metrics: Any) -> dict[str, Any]:
    """Returns what `compute_metrics` returned, with arrays and tensors as numbers and lists.

    JSON, in which checkpoints and results are written, can hold neither arrays nor tensors.

    Raises:
        TrainingError: `metrics` is not a dict, such as None from a function without ``return``.
    """
    if not hasattr(metrics, "items"):  # a pandas Series has them too
        raise TrainingError(
            "compute_metrics has to return a dict with the metrics by name, but it returned "
            f"{'None' if metrics is None else type(metrics).__name__}"
        )
    return {name: _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray | Tensor):
        return value.item() if math.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    return value
