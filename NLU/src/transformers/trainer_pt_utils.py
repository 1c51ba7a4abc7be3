"""What the Trainer needs of PyTorch.

The order of the data, the parts of what a model returns, and gathering from all processes.
"""

import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from loralib.errors import TrainingError
from loralib.training.distributed import gather_objects

from .data.data_collator import IGNORED_LABEL


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
        skip: steps to leave out at its beginning, for a run that resumes in its middle.
    """

    # Steps within which examples are sorted, so that grouping leaves enough randomness.
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
            # A process without an example in the last step computes some other one, because
            # the others wait for its part in the sum of gradients. `weight` makes that part zero.
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
        lengths: the examples' lengths; where given, they come from the longest to the shortest, so
            that a batch has examples of about one length. What does not fit into memory then shows
            in the first batch.

    Attributes:
        indices: of this process's examples, in the order of its batches.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        world_size: int = 1,
        rank: int = 0,
        lengths: Sequence[int] | None = None,
    ):
        order = list(range(count))
        if lengths is not None:
            order.sort(key=lambda index: -lengths[index])
        self.indices = order[rank::world_size]
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield self.indices[start : start + self.batch_size]


def takes_packed_rows(model: nn.Module) -> bool:
    """Whether a model's forward asks for a batch's `PackedRows`."""
    return "packed_rows" in inspect.signature(model.forward).parameters


def overrides(instance: Any, owner: type, names: Iterable[str]) -> bool:
    """Whether an instance of `owner` has another method of one of these names."""
    methods = ((getattr(instance, name), getattr(owner, name)) for name in names)
    return any(getattr(own, "__func__", own) is not plain for own, plain in methods)


def loss_of(outputs: Any) -> Tensor:
    """The loss in what a model returned: a dict's entry of that name, or a tuple's first item.

    Raises:
        TrainingError: there is none, or it is not one number.
    """
    loss = None
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TrainingError(
            "the model returned no loss: with labels, its forward has to give one number, as "
            "'loss' in a dict or as a tuple's first item"
        )
    return loss.reshape(())


def predictions_of(outputs: Any, with_loss: bool) -> tuple[Tensor, ...]:
    """The tensors in what a model returned, without the loss; half precision as float32.

    What has no rows (a number, a tuple of hidden states) is left out.

    Args:
        outputs: a dict, a tuple or one tensor.
        with_loss: whether a tuple begins with the loss.
    """
    if isinstance(outputs, Mapping):
        parts = [value for name, value in outputs.items() if name != "loss"]
    elif isinstance(outputs, tuple | list):
        parts = list(outputs[1:] if with_loss else outputs)
    else:
        parts = [outputs]
    rows = [part for part in parts if isinstance(part, Tensor) and part.dim() > 0]
    in_half = (torch.float16, torch.bfloat16)
    return tuple(part.float() if part.dtype in in_half else part for part in rows)


def smoothed_loss(
    model: nn.Module, inputs: Mapping[str, Any], name: str, smoothing: float
) -> tuple[Tensor, Any]:
    """The cross-entropy of smoothed class labels, and what the model returned without them.

    Args:
        model: returns logits first of all when it is called without labels.
        inputs: a batch.
        name: of its labels.
        smoothing: the share of each label that is spread over all classes.

    Raises:
        TrainingError: the labels are numbers, or there are no logits for them.
    """
    labels = inputs[name]
    if labels.is_floating_point():
        raise TrainingError("--label_smoothing_factor needs class labels, not numbers")
    outputs = model(**{key: value for key, value in inputs.items() if key != name})
    logits = next(iter(predictions_of(outputs, with_loss=False)), None)
    if logits is None or logits.shape[:-1].numel() != labels.numel():
        raise TrainingError(
            f"--label_smoothing_factor needs a model that, called without {name}, first of all "
            f"returns logits: {name} have the shape {tuple(labels.shape)}, and what it returns "
            f"has {'no rows' if logits is None else tuple(logits.shape)}"
        )
    logits, labels = logits.float().flatten(0, -2), labels.flatten()
    return F.cross_entropy(logits, labels, label_smoothing=smoothing), outputs


def check_rows(batch: tuple[Tensor, ...], count: int) -> None:
    """Checks that predictions can be told apart by example.

    Raises:
        TrainingError: a tensor has not `count` rows.
    """
    for part in batch:
        if len(part) != count:
            raise TrainingError(
                f"the model returned {len(part)} rows for {count} examples, in a tensor of the "
                f"shape {tuple(part.shape)}: predictions need a row for each example"
            )


def one_or_all(arrays: tuple[np.ndarray, ...]) -> np.ndarray | tuple[np.ndarray, ...] | None:
    """A single array by itself, several as they are, and None for none."""
    return arrays[0] if len(arrays) == 1 else arrays or None


def lengths_of(dataset: Dataset) -> list[int]:
    """The tokens of every example.

    Raises:
        KeyError: the examples have no ``input_ids``.
    """
    if _is_table(dataset):
        from pyarrow.compute import list_value_length  # the table is one of its

        return list_value_length(dataset.with_format("arrow")["input_ids"][:]).to_pylist()
    return [len(dataset[row]["input_ids"]) for row in range(len(dataset))]


def lengths_at_hand(dataset: Dataset, label_names: Iterable[str]) -> list[int] | None:
    """The tokens of every example, where an evaluation may choose its order by them.

    That is where they are known without reading example by example, which may be slow or random,
    and where an example has one label at most: the mean loss then is that of the examples, whatever
    batches they are in.

    Args:
        dataset: its examples are dicts.
        label_names: the entries that are labels.

    Returns:
        None where not.
    """
    if _is_table(dataset):
        if "input_ids" not in dataset.column_names:
            return None
        first = dataset.with_format(None)[0]
    elif isinstance(dataset, list | tuple) and all(
        isinstance(row, Mapping) and "input_ids" in row for row in dataset
    ):
        first = dataset[0]
    else:
        return None
    has_several = any(np.ndim(first[name]) > 0 for name in label_names if name in first)
    return None if has_several else lengths_of(dataset)


def _is_table(dataset: Dataset) -> bool:
    """Whether a set is one of the `datasets` library's."""
    return hasattr(dataset, "column_names") and hasattr(dataset, "with_format")


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (rows, …), one below the other; -100 fills up what is shorter than the longest."""
    sizes = {part.shape[1:] for part in parts}
    if len(sizes) > 1:
        longest = [max(size) for size in zip(*sizes, strict=True)]
        parts = [_filled_up(part, longest) for part in parts]
    return torch.cat(list(parts))


def _filled_up(part: Tensor, sizes: Sequence[int]) -> Tensor:
    filled = part.new_full((len(part), *sizes), IGNORED_LABEL)
    filled[(slice(None), *map(slice, part.shape[1:]))] = part
    return filled


class Collector:
    """One process's tensors of an evaluation, batch after batch.

    Args:
        steps: batches after which what is there moves to the CPU; only at the end where None.
    """

    def __init__(self, steps: int | None = None):
        self.steps = steps
        self._on_device: list[tuple[Tensor, ...]] = []
        self._on_cpu: list[tuple[Tensor, ...]] = []

    def add(self, batch: tuple[Tensor, ...]) -> None:
        """Takes a batch's tensors, (rows, …) each, as many as every batch has."""
        self._on_device.append(batch)
        if self.steps is not None and len(self._on_device) >= self.steps:
            self._move()

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All rows of each, as `join_rows` joins them."""
        self._move()
        return tuple(join_rows(parts).numpy() for parts in zip(*self._on_cpu, strict=True))

    def _move(self) -> None:
        if self._on_device:
            joined = (join_rows(parts) for parts in zip(*self._on_device, strict=True))
            self._on_cpu.append(tuple(part.cpu() for part in joined))
            self._on_device = []


def gather_in_order(
    indices: list[int], arrays: tuple[np.ndarray, ...], world_size: int
) -> tuple[np.ndarray, ...]:
    """Each array with the rows of all processes, row i being the one with index i.

    They are the same on every process. Rows of several lengths are filled up as in `join_rows`.
    """
    shares = [share for share in gather_objects((indices, arrays), world_size) if share[1]]
    order = np.argsort([index for share in shares for index in share[0]])
    whole = zip(*(share[1] for share in shares), strict=True)
    return tuple(
        join_rows([torch.from_numpy(part) for part in parts]).numpy()[order] for parts in whole
    )


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
