"""The data as the Trainer goes through it: which examples, in which order, on which process."""

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Sampler

from loralib.errors import TrainingError
from loralib.training.determinism import rng_state, set_rng_state

from .trainer_pt_utils import sorted_by_length


class TrainingBatches:
    """Batches of indices for one process, in an order that all processes agree on.

    A pass over the data is a permutation, cut into steps of batch_size × world_size examples; a
    process takes every world_size-th example of a step. So N processes of batch size b take the
    steps of one process of batch size N·b, whatever the number of examples.

    Args:
        count: examples in the set.
        batch_size: examples per step on each process.
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
        self.batch_size, self.world_size, self.rank = batch_size, world_size, rank
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

    @property
    def examples(self) -> int:
        """Examples of this process in a pass."""
        return (self.steps - 1) * self.batch_size + max(1, self._own_of(self.steps - 1))

    def weight(self, step: int) -> float:
        """What to multiply this process's mean loss with in a step.

        The mean over processes of the losses so weighted is the mean over the step's examples.
        """
        return self._own_of(step) * self.world_size / self._size(step)

    def _size(self, step: int) -> int:
        return min(self.step_size, self.count - step * self.step_size)

    def _own_of(self, step: int) -> int:
        """How many of a step's examples are this process's."""
        return len(range(self.rank, self._size(step), self.world_size))

    def _order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        if self.lengths is None:
            return order
        size = self.step_size * max(1, min(self._STEPS_A_GROUP, self.steps // 4))
        return [i for group in sorted_by_length(order, self.lengths, size) for i in group]


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

    @property
    def examples(self) -> int:
        """Examples of this process."""
        return len(self.indices)


class Examples(Sampler[int]):
    """The examples of all batches, one after the other, for a loader that cuts them up again."""

    def __init__(self, batches: TrainingBatches | EvaluationBatches):
        self.batches = batches

    def __len__(self) -> int:
        return self.batches.examples

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the pass, which has an order of its own in training."""
        self.batches.epoch = epoch


# ------------------------------------------------------------------------------------------------
# Passes over the training set
# ------------------------------------------------------------------------------------------------


class TrainingPasses:
    """The batches of a run, pass after pass, from a loader of the Trainer's own or a user's.

    Args:
        loader: makes the batches of a pass each time it is iterated over. Where they are
            `TrainingBatches`, see `_batches_of`, a pass can be entered anywhere; of any other, the
            batches that a resumed run has seen are read again.
        seed: of what a loader's workers do at random.
        device: where the run computes.

    Attributes:
        length: batches a pass; None where nobody knows.
    """

    def __init__(self, loader: Any, seed: int, device: torch.device):
        self.loader, self.seed, self.device = loader, seed, device
        self.batches = _batches_of(loader)
        self.length = length_of(loader)
        if self.length == 0:
            raise ValueError("the training set is empty")

    @property
    def examples(self) -> int:
        """How many the training set has; 0 where nobody knows."""
        return length_of(getattr(self.loader, "dataset", None)) or 0

    def example(self) -> Any:
        """Some batch; two of the loader's own examples are enough.

        For a batch of one, torch.compile would make graphs that no other batch has. (For two of one
        length, it does so with DeBERTa-v2, whose layers have no mask then.)
        """
        if self.batches is None:
            return next(iter(self.loader))
        data = self.loader.dataset
        return self.loader.collate_fn([data[index] for index in range(min(2, len(data)))])

    def weight(self, index: int) -> float:
        """What to multiply this process's mean loss with in a batch; see `TrainingBatches`."""
        return 1.0 if self.batches is None else self.batches.weight(index)

    def begin(
        self, epoch: int, skip: int, step: int, rng: dict[str, Any] | None
    ) -> tuple[Iterator[Any], dict[str, Any] | None]:
        """The batches of a pass, from the one after the first `skip` on.

        Args:
            epoch: the pass.
            skip: batches that a resumed run has seen.
            step: steps so far.
            rng: the state of the random generators at the beginning of this pass, where `skip` is
                positive and it is known.

        Returns:
            The batches, and that state, which a run has to know to resume within this pass; None
            where it does not.
        """
        if self.batches is not None:
            self.batches.epoch, self.batches.skip = epoch, skip
            # By default the loader uses dropout's generator, once a pass and at every resume.
            self.loader.generator.manual_seed(self.seed + step)
            return iter(self.loader), None
        for part in (getattr(self.loader, name, None) for name in ("sampler", "dataset")):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        now = rng_state(self.device)
        begun = now if skip == 0 or rng is None else rng
        set_rng_state(begun, self.device)
        batches = iter(self.loader)
        if skip > 0:
            for _ in itertools.islice(batches, skip):
                pass
            set_rng_state(now, self.device)
        return batches, begun

    def check_one_update(self, batches: int) -> None:
        """To be called where a pass of so many batches has made no update.

        Raises:
            TrainingError: that would go on for ever, as nobody knows how long a pass is.
        """
        if self.length is None:
            raise TrainingError(
                f"the training set gave {batches} batches in a pass, fewer than an update takes: "
                "give a larger set, or a lower --gradient_accumulation_steps"
            )


def _batches_of(loader: Any) -> TrainingBatches | None:
    """What a loader's sampler has, where the loader cuts it up into the same batches.

    A subclass may give the Trainer's sampler to a loader of its own, of other batches, or without
    the generator by which a resumed run's workers draw the same numbers.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, Examples) or loader.generator is None:
        return None
    return sampler.batches if loader.batch_size == sampler.batches.batch_size else None


def takes_packed_rows(model: nn.Module) -> bool:
    """Whether a model's forward asks for a batch's `PackedRows`."""
    return "packed_rows" in inspect.signature(model.forward).parameters


def label_names_of(model: nn.Module) -> list[str]:
    """The arguments of a model's forward that are labels, by upstream's names."""
    taken = inspect.signature(model.forward).parameters
    spans = ["start_positions", "end_positions"]
    return spans if "labels" not in taken and all(name in taken for name in spans) else ["labels"]


def overrides(instance: Any, owner: type, names: Iterable[str]) -> bool:
    """Whether an instance of `owner` has another method of one of these names."""
    methods = ((getattr(instance, name), getattr(owner, name)) for name in names)
    return any(getattr(own, "__func__", own) is not plain for own, plain in methods)


def collator_settings(collator: Any) -> dict[str, Any]:
    """The plain values among a collator's fields, by name; none of one that is no dataclass."""
    if not is_dataclass(collator) or isinstance(collator, type):
        return {}
    values = {each.name: getattr(collator, each.name) for each in fields(collator)}
    plain = (bool, int, float, str, type(None))
    return {
        f"{name} (data collator)": value
        for name, value in values.items()
        if isinstance(value, plain)
    }


def length_of(data: Any) -> int | None:
    """The length of a set or a loader, None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # the second is PyTorch's and users' "no length"
        return None


def is_iterable_only(dataset: Any) -> bool:
    """Whether a set can be iterated over, and its examples cannot be asked for by index."""
    return isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    )


def used_columns(dataset: Dataset, model: nn.Module, label_names: Iterable[str]) -> Dataset:
    """A set of the `datasets` library without the columns that a model's forward does not take."""
    if not hasattr(dataset, "remove_columns") or dataset.column_names is None:
        return dataset
    taken = {*inspect.signature(model.forward).parameters, "label", "label_ids", *label_names}
    return dataset.remove_columns([name for name in dataset.column_names if name not in taken])


# ------------------------------------------------------------------------------------------------
# Lengths
# ------------------------------------------------------------------------------------------------


def lengths_of(dataset: Dataset) -> list[int]:
    """The tokens of every example; those of all its choices, where it has several rows.

    Raises:
        KeyError: the examples have no ``input_ids``.
    """
    if _is_table(dataset):
        import pyarrow  # the table is one of its
        from pyarrow.compute import list_value_length

        ids = dataset.with_format("arrow")["input_ids"][:]
        if not pyarrow.types.is_nested(ids.type.value_type):
            return list_value_length(ids).to_pylist()
        return [sum(map(len, choices)) for choices in ids.to_pylist()]
    each = (dataset[row]["input_ids"] for row in range(len(dataset)))
    return [sum(map(len, ids)) if len(ids) and np.ndim(ids[0]) else len(ids) for ids in each]


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
