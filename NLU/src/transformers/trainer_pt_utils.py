"""PyTorch helpers of the Trainer under upstream's names, for the loops that users write themselves.

Tensors in lists and tuples, gathering them from all processes, the order of examples, label
smoothing, metrics for people to read.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from .data.data_collator import IGNORED_LABEL
from .trainer_utils import is_main_process

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------
# Tensors in lists and tuples
# ------------------------------------------------------------------------------------------------


def _nested(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """`function` of tensors or arrays, or of those at each place of lists and tuples of them."""
    if isinstance(first, list | tuple):
        return type(first)(_nested(function, *parts) for parts in zip(first, *others, strict=True))
    return function(first, *others)


def nested_detach(tensors: Any) -> Any:
    """Tensors without their graph."""
    return _nested(lambda tensor: tensor.detach(), tensors)


def nested_numpify(tensors: Any) -> Any:
    """Tensors as arrays; those in bfloat16, which NumPy does not know, in float32."""

    def as_array(tensor: Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()

    return _nested(as_array, tensors)


def nested_truncate(tensors: Any, limit: int) -> Any:
    """The first `limit` rows."""
    return _nested(lambda tensor: tensor[:limit], tensors)


def nested_concat(tensors: Any, new_tensors: Any, padding_index: int = IGNORED_LABEL) -> Any:
    """Rows of `new_tensors` below those of `tensors`; what is shorter is filled up.

    Args:
        tensors, new_tensors: tensors or arrays (rows, …), or lists or tuples of them, of one kind.
        padding_index: what rows are filled up with.

    Raises:
        TypeError: they differ in kind.
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
    """Arrays of `num_samples` rows that hold the padding alone, otherwise as `arrays`."""
    return _nested(
        lambda array: np.full_like(array, padding_index, shape=(num_samples, *array.shape[1:])),
        arrays,
    )


def nested_expand_like(arrays: Any, new_seq_length: int, padding_index: int = IGNORED_LABEL) -> Any:
    """Arrays (rows, length, …) with rows filled up to `new_seq_length`."""

    def expand(array: np.ndarray) -> np.ndarray:
        shape = (len(array), new_seq_length, *array.shape[2:])
        wide = np.full_like(array, padding_index, shape=shape)
        wide[:, : array.shape[1]] = array
        return wide

    return _nested(expand, arrays)


def join_rows(parts: Sequence[Tensor], padding_index: int = IGNORED_LABEL) -> Tensor:
    """Tensors (rows, …), one below the other; `padding_index` fills up what is shorter."""
    sizes = {part.shape[1:] for part in parts}
    if len(sizes) > 1:
        longest = [max(size) for size in zip(*sizes, strict=True)]
        parts = [_filled_up(part, longest, padding_index) for part in parts]
    return torch.cat(list(parts))


def _filled_up(part: Tensor, sizes: Sequence[int], padding_index: int) -> Tensor:
    filled = part.new_full((len(part), *sizes), padding_index)
    filled[(slice(None), *map(slice, part.shape[1:]))] = part
    return filled


# ------------------------------------------------------------------------------------------------
# Several processes
# ------------------------------------------------------------------------------------------------


@contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """The machine's first process does what is in the block before the others.

    Args:
        local_rank: this process's number on its machine; -1 where it is the only one.
    """
    if not is_main_process(local_rank):
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def distributed_concat(tensor: Any, num_total_examples: int | None = None) -> Any:
    """Every process's rows, by rank, on every process.

    Args:
        tensor: (rows, …), of one shape on all processes, or a list or tuple of such.
        num_total_examples: leave out rows after these, which fill up the last process's share.
    """

    def gather(part: Tensor) -> Tensor:
        shares = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, part.contiguous())
        return torch.cat(shares)[:num_total_examples]

    return _nested(gather, tensor)


def distributed_broadcast_scalars(
    scalars: list[int | float], num_total_examples: int | None = None
) -> Tensor:
    """Every process's numbers, by rank, on every process; see `distributed_concat`."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return distributed_concat(torch.tensor(scalars, device=device), num_total_examples)


class DistributedTensorGatherer:
    """Puts together on the CPU what `SequentialDistributedSampler`'s processes computed.

    Args:
        world_size: how many processes there are.
        num_samples: examples in the set.
        make_multiple_of: of which every process's share is a multiple, such as a batch.
        padding_index: what rows are filled up with.
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
        """Takes a step's arrays: as many rows of the first process, then of the second, …"""
        if arrays is not None:
            self._steps.append(arrays)

    def finalize(self) -> Any:
        """All rows in the set's order; None where no array was added.

        Raises:
            TrainingError: there are more or fewer rows than the processes' shares have.
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
                f"{len(rows)} rows were added; {self.num_samples} examples make "
                f"{self.total_samples} on {self.world_size} processes"
            )
        return rows[: self.num_samples]


def _rank_and_size(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """How many processes there are and which this is, as far as that is not given."""
    replicas = dist.get_world_size() if num_replicas is None else num_replicas
    return replicas, dist.get_rank() if rank is None else rank


# ------------------------------------------------------------------------------------------------
# The order of examples
# ------------------------------------------------------------------------------------------------


class SequentialDistributedSampler(Sampler[int]):
    """A process's share of a set: a run of examples that follow one another, as long as all others.

    The last share is filled up with the set's first examples.

    Args:
        dataset: has a length.
        num_replicas, rank: number of processes, and this one's; by default the group's.
        batch_size: where given, shares are multiples of it.
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
    """An order cut into groups of `size`, each from its longest example to its shortest."""
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return [sorted(group, key=lambda index: -lengths[index]) for group in groups]


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """A random order in which examples that follow one another are of about one length.

    The longest example of all is the first: what does not fit into memory then shows at once.

    Args:
        lengths: of the examples.
        batch_size: examples a batch.
        mega_batch_mult: batches within which examples are sorted; at most 50, and a quarter of all,
            where not given.
        generator: of the order.
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
    """The lengths that were given, or those of the examples' ``input_ids``."""
    if lengths is not None:
        return list(lengths)
    examples = (dataset[index] for index in range(len(dataset)))
    try:
        return [len(example["input_ids"]) for example in examples]
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError("the examples have no 'input_ids': give their lengths") from error


class LengthGroupedSampler(Sampler[int]):
    """The order of `get_length_grouped_indices`, another one in each pass.

    Args:
        dataset: its examples have ``input_ids``, where `lengths` are not given.
        batch_size: examples a batch.
        lengths: of the examples.
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
    """A process's share of `get_length_grouped_indices`' order: every num_replicas-th example.

    Shares are of one size: the first examples fill up the last ones, or, with `drop_last`, the last
    examples are left out.

    Args:
        dataset, batch_size, lengths: as for `LengthGroupedSampler`.
        num_replicas, rank: number of processes, and this one's; by default the group's.
        seed: of the order, together with the pass.
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
        """Chooses the pass, which has an order of its own."""
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
    """A process's share of a set that can only be iterated over.

    Of every batch_size × num_processes examples, the process of rank 0 takes the first batch_size,
    and so on. What is left at the end is filled up with the set's first examples, unless there is
    one process alone, or, with `drop_last`, left out.

    Args:
        dataset: is in the same order on all processes; its ``set_epoch``, or the seed of its
            ``generator`` where it has one, is set by the pass.
        batch_size: examples a batch on each process.
        drop_last: see above.
        num_processes, process_index: number of processes, and this one's.
        seed: of the generator, together with the pass.

    Attributes:
        num_examples: that the last pass has read.
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
        """Chooses the pass, which may have an order of its own."""
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


# ------------------------------------------------------------------------------------------------
# Losses and parameters
# ------------------------------------------------------------------------------------------------


def predictions_of(outputs: Any, with_loss: bool, but: Sequence[str] = ()) -> tuple[Tensor, ...]:
    """The tensors in what a model returned, without the loss; half precision as float32.

    What has no rows (a number) is left out; so are tuples of hidden states, with a warning.

    Args:
        outputs: a dict, a tuple or one tensor.
        with_loss: whether a tuple begins with the loss.
        but: a dict's entries to leave out.
    """
    if isinstance(outputs, Mapping):
        parts = [value for name, value in outputs.items() if name not in ("loss", *but)]
    elif isinstance(outputs, tuple | list):
        parts = list(outputs[1:] if with_loss else outputs)
    else:
        parts = [outputs]
    if any(isinstance(part, tuple | list) for part in parts):
        _warn_of_tuples()
    rows = [part for part in parts if isinstance(part, Tensor) and part.dim() > 0]
    in_half = (torch.float16, torch.bfloat16)
    return tuple(part.float() if part.dtype in in_half else part for part in rows)


@cache
def _warn_of_tuples() -> None:
    logger.warning(
        "the model returns tuples of tensors, such as hidden states: they are left out of the "
        "predictions; call the model itself for them"
    )


@dataclass
class LabelSmoother:
    """The cross-entropy of class labels of which a share is spread over all classes.

    Args:
        epsilon: the share.
        ignore_index: the label of what does not count.
    """

    epsilon: float = 0.1
    ignore_index: int = IGNORED_LABEL

    def __call__(self, model_output: Any, labels: Tensor) -> Tensor:
        """The mean over the labels that count; zero where none does.

        Args:
            model_output: logits (…, classes), or first of all in a dict or a tuple without a loss.
            labels: (…).

        Raises:
            TrainingError: the labels are numbers, or there are no logits for them.
        """
        if labels.is_floating_point():
            raise TrainingError("label smoothing needs class labels, not numbers")
        logits = next(iter(predictions_of(model_output, with_loss=False)), None)
        if logits is None or logits.shape[:-1].numel() != labels.numel():
            raise TrainingError(
                "label smoothing needs a model that, called without labels, first of all returns "
                f"logits: the labels have the shape {tuple(labels.shape)}, and what it returns "
                f"has {'no rows' if logits is None else tuple(logits.shape)}"
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
    """Names of a model's parameters but those within layers of these types."""
    names = []
    for name, child in model.named_children():
        if not isinstance(child, tuple(forbidden_layer_types)):
            inner = get_parameter_names(child, forbidden_layer_types)
            names += [f"{name}.{parameter}" for parameter in inner]
    return [*names, *model._parameters]


# ------------------------------------------------------------------------------------------------
# Metrics for people
# ------------------------------------------------------------------------------------------------


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as they are logged: memory in MiB, times in hours, operations in units of 2³⁰."""
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
