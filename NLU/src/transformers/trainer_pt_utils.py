"""PyTorch helpers of the Trainer, under transformers' names, for users' own training loops.

They handle nested tensors, gathering from all processes, the order of examples, losses, predictions
and readable metrics.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler

from loralib.errors import TrainingError

from .modeling_losses import IGNORED_LABEL
from .trainer_utils import is_main_process

logger = logging.getLogger(__name__)

# ---- tensors in lists and tuples ----


def _nested(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Applies `function` to tensors or arrays, or to those at each place of nested lists."""
    if isinstance(first, list | tuple):
        return type(first)(_nested(function, *parts) for parts in zip(first, *others, strict=True))
    return function(first, *others)


def nested_detach(tensors: Any) -> Any:
    """Detaches tensors from their graph."""
    return _nested(lambda tensor: tensor.detach(), tensors)


def nested_numpify(tensors: Any) -> Any:
    """Converts tensors to arrays; bfloat16, which NumPy lacks, becomes float32."""

    def as_array(tensor: Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()

    return _nested(as_array, tensors)


def nested_truncate(tensors: Any, limit: int) -> Any:
    """Returns the first `limit` rows."""
    return _nested(lambda tensor: tensor[:limit], tensors)


def nested_concat(tensors: Any, new_tensors: Any, padding_index: int = IGNORED_LABEL) -> Any:
    """Concatenates the rows of `tensors` and `new_tensors`, and pads the shorter ones.

    Args:
        tensors, new_tensors: tensors or arrays (rows, …), or lists or tuples of them, both of the
            same type.
        padding_index: the value of the padding.

    Raises:
        TypeError: their types differ.
    """
    if type(tensors) is not type(new_tensors):
        raise TypeError(
            f"a {type(tensors).__name__} and a {type(new_tensors).__name__} cannot be concatenated"
        )

    def join(first: Any, second: Any) -> Any:
        if isinstance(first, Tensor):
            return join_rows([first, second], padding_index)
        parts = [torch.from_numpy(np.asarray(part)) for part in (first, second)]
        return join_rows(parts, padding_index).numpy()

    return _nested(join, tensors, new_tensors)


def nested_new_like(arrays: Any, num_samples: int, padding_index: int = IGNORED_LABEL) -> Any:
    """Returns arrays like `arrays` with `num_samples` rows, filled with padding."""
    return _nested(
        lambda array: np.full_like(array, padding_index, shape=(num_samples, *array.shape[1:])),
        arrays,
    )


def nested_expand_like(arrays: Any, new_seq_length: int, padding_index: int = IGNORED_LABEL) -> Any:
    """Pads the rows of arrays (rows, length, …) to `new_seq_length`."""

    def expand(array: np.ndarray) -> np.ndarray:
        shape = (len(array), new_seq_length, *array.shape[2:])
        wide = np.full_like(array, padding_index, shape=shape)
        wide[:, : array.shape[1]] = array
        return wide

    return _nested(expand, arrays)


def join_rows(parts: Sequence[Tensor], padding_index: int = IGNORED_LABEL) -> Tensor:
    """Concatenates tensors (rows, …), and pads shorter rows with `padding_index`."""
    sizes = {part.shape[1:] for part in parts}
    if len(sizes) > 1:
        longest = [max(size) for size in zip(*sizes, strict=True)]
        parts = [_filled_up(part, longest, padding_index) for part in parts]
    return torch.cat(list(parts))


def _filled_up(part: Tensor, sizes: Sequence[int], padding_index: int) -> Tensor:
    filled = part.new_full((len(part), *sizes), padding_index)
    filled[(slice(None), *map(slice, part.shape[1:]))] = part
    return filled


# ---- several processes ----


@contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Makes a machine's first process run the block before the others.

    Args:
        local_rank: this process's rank on its machine; -1 if it is the only one.
    """
    if not is_main_process(local_rank):
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def distributed_concat(tensor: Any, num_total_examples: int | None = None) -> Any:
    """Gathers the rows of all processes, in the order of their ranks, on every process.

    Args:
        tensor: (rows, …), of the same shape on all processes, or a list or tuple of such tensors.
        num_total_examples: the number of rows to keep. Later ones only fill up the last process's
            share.
    """

    def gather(part: Tensor) -> Tensor:
        shares = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, part.contiguous())
        return torch.cat(shares)[:num_total_examples]

    return _nested(gather, tensor)


def distributed_broadcast_scalars(
    scalars: list[int | float], num_total_examples: int | None = None
) -> Tensor:
    """Gathers the numbers of all processes on every process; see `distributed_concat`."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return distributed_concat(torch.tensor(scalars, device=device), num_total_examples)


class DistributedTensorGatherer:
    """Joins, on the CPU, the results of processes that use `SequentialDistributedSampler`.

    Args:
        world_size: the number of processes.
        num_samples: the number of examples in the set.
        make_multiple_of: every process's share is a multiple of this, such as the batch size.
        padding_index: the value of the padding.
    """

    def __init__(
        self,
        world_size: int,
        num_samples: int,
        make_multiple_of: int | None = None,
        padding_index: int = IGNORED_LABEL,
    ):
        self.world_size, self.num_samples = world_size, num_samples
        self.padding_index = padding_index
        unit = world_size * (make_multiple_of or 1)
        self.total_samples = math.ceil(num_samples / unit) * unit
        self._steps: list[Any] = []

    def add_arrays(self, arrays: Any) -> None:
        """Adds a step's arrays, with equally many rows of every process, ordered by rank."""
        if arrays is not None:
            self._steps.append(arrays)

    def finalize(self) -> Any:
        """Returns all rows in the set's order, or None if no array was added.

        Raises:
            TrainingError: there are more rows than the processes' shares have, or fewer than the
                set has.
        """
        if not self._steps:
            return None
        return _nested(self._whole, *self._steps)

    def _whole(self, *steps: np.ndarray) -> np.ndarray:
        shares = [np.split(step, self.world_size) for step in steps]
        by_process = [torch.from_numpy(part) for rank in zip(*shares, strict=True) for part in rank]
        rows = join_rows(by_process, self.padding_index).numpy()
        if not self.num_samples <= len(rows) <= self.total_samples:
            raise TrainingError(
                f"{len(rows)} rows were added, but {self.num_samples} examples make "
                f"{self.total_samples} rows on {self.world_size} processes"
            )
        return rows[: self.num_samples]


# ---- the order of examples ----


def _rank_and_size(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns the number of processes and this one's rank; by default those of the group."""
    replicas = dist.get_world_size() if num_replicas is None else num_replicas
    return replicas, dist.get_rank() if rank is None else rank


class SequentialDistributedSampler(Sampler[int]):
    """Samples a process's share of a set: consecutive examples, equally many on every process.

    The last share is filled up with the set's first examples.

    Args:
        dataset: a set with a length.
        num_replicas, rank: the number of processes, and this one's rank; by default the group's.
        batch_size: if given, shares are multiples of it.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        batch_size: int | None = None,
    ):
        self.dataset, self.batch_size = dataset, batch_size
        self.num_replicas, self.rank = _rank_and_size(num_replicas, rank)
        unit = batch_size or 1
        self.num_samples = math.ceil(len(dataset) / (self.num_replicas * unit)) * unit
        self.total_size = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        count, start = len(self.dataset), self.rank * self.num_samples
        return (index % count for index in range(start, start + self.num_samples))


def sorted_by_length(order: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Cuts an order into groups of `size`, each sorted from its longest example to its shortest."""
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return [sorted(group, key=lambda index: -lengths[index]) for group in groups]


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Returns a random order in which neighboring examples have about the same length.

    The longest example of all comes first: if it does not fit into memory, the run fails at once.

    Args:
        lengths: the examples' lengths.
        batch_size: the examples per batch.
        mega_batch_mult: examples are sorted within groups of this many batches; by default 50, but
            at most a quarter of all batches.
        generator: the order's random generator.
    """
    if mega_batch_mult is None:
        mega_batch_mult = max(1, min(len(lengths) // (batch_size * 4), 50))
    order = torch.randperm(len(lengths), generator=generator).tolist()
    groups = sorted_by_length(order, lengths, mega_batch_mult * batch_size)
    if groups:
        longest = max(groups, key=lambda group: lengths[group[0]])
        groups[0][0], longest[0] = longest[0], groups[0][0]
    return [index for group in groups for index in group]


def _lengths(dataset: Dataset | None, lengths: Sequence[int] | None) -> list[int]:
    """Returns the given lengths, or those of the examples' ``input_ids``."""
    if lengths is not None:
        return list(lengths)
    examples = (dataset[index] for index in range(len(dataset)))
    try:
        return [len(example["input_ids"]) for example in examples]
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError("the examples have no 'input_ids': give their lengths") from error


class LengthGroupedSampler(Sampler[int]):
    """Samples in the order of `get_length_grouped_indices`, with a new order in each epoch.

    Args:
        dataset: its examples need ``input_ids``, unless `lengths` are given.
        batch_size: the examples per batch.
        lengths: the examples' lengths.
    """

    def __init__(
        self, dataset: Dataset | None, batch_size: int, lengths: Sequence[int] | None = None
    ):
        self.batch_size, self.lengths = batch_size, _lengths(dataset, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size))


class DistributedLengthGroupedSampler(Sampler[int]):
    """Samples a process's share: every num_replicas-th of `get_length_grouped_indices`' examples.

    All shares have the same size. Shorter ones are filled up with the first examples or, with
    `drop_last`, the last examples are left out.

    Args:
        dataset, batch_size, lengths: as for `LengthGroupedSampler`.
        num_replicas, rank: the number of processes, and this one's rank; by default the group's.
        seed: with the epoch, the seed of the order.
        drop_last: see above.
    """

    def __init__(
        self,
        dataset: Dataset | None,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
    ):
        self.num_replicas, self.rank = _rank_and_size(num_replicas, rank)
        self.batch_size, self.lengths = batch_size, _lengths(dataset, lengths)
        self.seed, self.drop_last, self.epoch = seed, drop_last, 0
        share = len(self.lengths) / self.num_replicas
        self.num_samples = math.floor(share) if drop_last else math.ceil(share)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        total = self.num_samples * self.num_replicas
        order = [order[place % len(order)] for place in range(total)] if order else []
        return iter(order[self.rank :: self.num_replicas])


class IterableDatasetShard(IterableDataset):
    """Yields a process's share of a set that can only be iterated over.

    Of every batch_size × num_processes examples, the process of rank 0 takes the first batch_size,
    and so on. With `drop_last`, an incomplete last step is left out. Otherwise it is filled up with
    the set's first examples, unless there is a single process.

    Args:
        dataset: a set in the same order on all processes. If it has a ``set_epoch``, that is called
            with the epoch. Otherwise its ``generator``, if any, is seeded for the epoch.
        batch_size: the examples per batch on each process.
        drop_last: see above.
        num_processes, process_index: the number of processes, and this one's rank.
        seed: with the epoch, the generator's seed.

    Attributes:
        num_examples: the number of examples that the last epoch has read.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
    ):
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index = num_processes, process_index
        self.seed, self.epoch, self.num_examples = seed, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which may determine the order."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        if self.num_processes == 1 and not self.drop_last:
            return len(self.dataset)
        steps = len(self.dataset) / (self.batch_size * self.num_processes)
        return (math.floor(steps) if self.drop_last else math.ceil(steps)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.seed + self.epoch)
        start = self.process_index * self.batch_size
        own = slice(start, start + self.batch_size)
        step: list[Any] = []
        first: list[Any] = []  # the examples of the first step
        self.num_examples = 0
        for example in self.dataset:
            self.num_examples += 1
            step.append(example)
            if len(step) == self.batch_size * self.num_processes:
                yield from step[own]
                first, step = first or step, []
        if step and not self.drop_last:
            if self.num_processes > 1:
                filling, missing = first or step, self.batch_size * self.num_processes - len(step)
                step += filling * math.ceil(missing / len(filling))
            yield from step[own]


# ---- losses, predictions and parameters ----


def has_targets(inputs: Any) -> bool | Tensor:
    """Returns whether a batch has a label that is not ignored; True unless labels are per token.

    For labels per token, the result is a tensor on their device, and reading it waits for the
    device.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return True
    return (labels != IGNORED_LABEL).any()


def loss_of(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Returns the loss among a model's outputs: that named "loss", or a tuple's first item.

    Args:
        outputs: the model's outputs.
        inputs: the batch, whose tensors' names are in the error.

    Raises:
        TrainingError: there is no loss, or it is not one number.
    """
    loss, outputs = None, _by_name(outputs)
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        names = ", ".join(name for name, value in inputs.items() if isinstance(value, Tensor))
        raise TrainingError(
            f"the model returned no loss for a batch of {names}: with labels, its forward has to "
            "give one number, as 'loss' in a dict or as a tuple's first item"
        )
    return loss.reshape(())


def _by_name(outputs: Any) -> Any:
    """Returns a dataclass's fields as a dict, and any other outputs as they are."""
    if isinstance(outputs, Mapping) or not is_dataclass(outputs):
        return outputs
    return {field.name: getattr(outputs, field.name) for field in fields(outputs)}


def predictions_of(outputs: Any, with_loss: bool, but: Sequence[str] = ()) -> tuple[Tensor, ...]:
    """Returns the tensors among a model's outputs, without the loss; half precision as float32.

    Scalars are left out. So is anything else, such as a tuple of hidden states, with a warning.

    Args:
        outputs: the model's outputs: a dict, a dataclass, a tuple or one tensor.
        with_loss: whether a tuple begins with the loss.
        but: a dict's entries to leave out.
    """
    outputs = _by_name(outputs)
    if isinstance(outputs, Mapping):
        parts = [value for name, value in outputs.items() if name not in ("loss", *but)]
    elif isinstance(outputs, tuple | list):
        parts = list(outputs[1:] if with_loss else outputs)
    else:
        parts = [outputs]
    others = {type(p).__name__ for p in parts if not isinstance(p, Tensor | int | float | None)}
    if others:
        _warn_of_others(", ".join(sorted(others)))
    rows = [part for part in parts if isinstance(part, Tensor) and part.dim() > 0]
    in_half = (torch.float16, torch.bfloat16)
    return tuple(part.float() if part.dtype in in_half else part for part in rows)


@cache
def _warn_of_others(kinds: str) -> None:
    logger.warning(
        "some of the model's outputs, such as hidden states, are not tensors (%s): they are left "
        "out of the predictions; call the model itself for them",
        kinds,
    )


@dataclass
class LabelSmoother:
    """Computes the cross-entropy with smoothed labels.

    Args:
        epsilon: the share of each label that is spread over all classes.
        ignore_index: the label of positions that do not count.
    """

    epsilon: float = 0.1
    ignore_index: int = IGNORED_LABEL

    def __call__(self, model_output: Any, labels: Tensor) -> Tensor:
        """Returns the mean over the labels that count, or zero if there are none.

        Args:
            model_output: the logits (…, classes), or a dict or tuple without a loss: they are a
                dict's "logits", else the first entry.
            labels: (…).

        Raises:
            TrainingError: the labels are not class indices, or there are no logits for them.
        """
        if labels.is_floating_point():
            raise TrainingError("label smoothing needs class labels, not numbers")
        outputs = _by_name(model_output)
        if isinstance(outputs, Mapping):
            outputs = outputs.get("logits", outputs)
        logits = next(iter(predictions_of(outputs, with_loss=False)), None)
        if logits is None or logits.shape[:-1].numel() != labels.numel():
            raise TrainingError(
                "label smoothing needs a model that, called without labels, returns the logits "
                f"first or as 'logits': the labels have the shape {tuple(labels.shape)}, but that "
                f"output has {'no rows' if logits is None else tuple(logits.shape)}"
            )
        labels = labels.flatten()
        total = F.cross_entropy(
            logits.float().flatten(0, -2),
            labels,
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
            reduction="sum",
        )
        return total / (labels != self.ignore_index).sum().clamp(min=1)


def get_parameter_names(model: nn.Module, forbidden_layer_types: Sequence[type]) -> list[str]:
    """Returns the names of a model's parameters, except those in layers of these types."""
    names = []
    for name, child in model.named_children():
        if not isinstance(child, tuple(forbidden_layer_types)):
            inner = get_parameter_names(child, forbidden_layer_types)
            names += [f"{name}.{parameter}" for parameter in inner]
    return [*names, *model._parameters]


# ---- metrics for people ----


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Formats metrics for the log: memory in MiB, times as h:mm:ss, operations in units of 2³⁰."""
    return {name: _readable(name, value) for name, value in metrics.items()}


def _readable(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{value / 2**20:,.1f} MiB"
    if name.endswith("_runtime"):
        seconds, hundredths = divmod(int(value * 100), 100)
        return f"{timedelta(seconds=seconds)}.{hundredths:02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
