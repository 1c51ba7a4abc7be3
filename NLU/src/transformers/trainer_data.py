"""Decides which examples the Trainer uses, in which order and on which process."""

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
from loralib.text import counted, quoted
from loralib.training.determinism import rng_state, set_rng_state

from .trainer_pt_utils import sorted_by_length


class TrainingBatches:
    """Batches of indices for one process, in an order that all processes agree on.

    An epoch is a permutation of the data, cut into steps of batch_size × world_size examples. A
    process takes every world_size-th example of a step. So N processes of batch size b take the
    same steps as one process of batch size N·b, for any number of examples.

    Args:
        count: the number of examples in the set.
        batch_size: the examples per step on each process.
        seed: with `epoch`, the seed of the permutation.
        world_size, rank: the number of processes, and this one's rank.
        drop_last: leave out a last step that is not full.
        lengths: the examples' lengths. If given, a step has examples of about the same length.

    Attributes:
        epoch: the epoch to iterate over.
        skip: the steps to leave out at its beginning, for a run that resumes in its middle.
    """

    # Examples are sorted within groups of this many steps, which leaves enough randomness.
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
                f"a step takes {self.step_size} examples, but the training set has {count}, and "
                "--dataloader_drop_last leaves out the incomplete step"
            )
        self.epoch = 0
        self.skip = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step in range(self.skip, self.steps):
            examples = order[step * self.step_size : (step + 1) * self.step_size]
            # A process without an example in the last step computes any other one, because the
            # other processes wait for its gradients. `weight` makes those zero.
            yield examples[self.rank :: self.world_size] or examples[:1]

    @property
    def examples(self) -> int:
        """The number of this process's examples per epoch."""
        return (self.steps - 1) * self.batch_size + max(1, self._own_of(self.steps - 1))

    def weight(self, step: int) -> float:
        """Returns the factor for this process's mean loss in a step.

        The mean over processes of the weighted losses is the mean over the step's examples.
        """
        return self._own_of(step) * self.world_size / self.size(step)

    def size(self, step: int) -> int:
        """Returns the number of examples in a step, over all processes."""
        return min(self.step_size, self.count - step * self.step_size)

    def _own_of(self, step: int) -> int:
        """Returns how many of a step's examples are this process's."""
        return len(range(self.rank, self.size(step), self.world_size))

    def _order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        if self.lengths is None:
            return order
        size = self.step_size * max(1, min(self._STEPS_A_GROUP, self.steps // 4))
        return [i for group in sorted_by_length(order, self.lengths, size) for i in group]


class EvaluationBatches:
    """Batches of indices for one process's share of a set; every example is in one share.

    Args:
        count: the number of examples in the set.
        batch_size: the examples per batch.
        world_size, rank: the number of processes, and this one's rank.
        lengths: the examples' lengths. If given, examples are sorted from the longest to the
            shortest, so that a batch has examples of about the same length. If the longest do not
            fit into memory, the first batch already fails.

    Attributes:
        indices: the indices of this process's examples, in the order of its batches.
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
        """The number of this process's examples."""
        return len(self.indices)


class ExampleSampler(Sampler[int]):
    """Yields the indices of all batches one by one, for a loader that regroups them."""

    def __init__(self, batches: TrainingBatches | EvaluationBatches):
        self.batches = batches

    def __len__(self) -> int:
        return self.batches.examples

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order in training."""
        self.batches.epoch = epoch


# ---- passes over the training set ----


class EpochBatches:
    """The batches of a run, epoch by epoch, from the Trainer's own loader or a user's.

    Args:
        loader: yields the batches of an epoch each time it is iterated over. If its sampler has
            `TrainingBatches` (see `_batches_of`), an epoch can be resumed at any batch. With any
            other loader, a resumed run reads the batches that it has seen again.
        seed: the seed for the loader's workers.
        device: the device on which the run computes.
        step_size: the examples of a full batch, over all processes.

    Attributes:
        length: the number of batches per epoch; None if unknown.
    """

    def __init__(self, loader: Any, seed: int, device: torch.device, step_size: int):
        self.loader, self.seed, self.device, self.step_size = loader, seed, device, step_size
        self.batches = _batches_of(loader)
        self._generators = generators_of(loader)
        self.length = length_of(loader)
        if self.length == 0:
            raise ValueError("the training set is empty")

    @property
    def examples(self) -> int:
        """The number of examples in the training set; 0 if unknown."""
        return length_of(getattr(self.loader, "dataset", None)) or 0

    def example(self) -> Any:
        """Returns a small batch for a warm-up: two examples or, with a user's loader, its first.

        One example is too few: torch.compile would make graphs that no other batch can use. (With
        DeBERTa-v2 it does so even for two examples of equal length, as its layers then get no
        mask.)
        """
        if self.batches is None:
            return next(iter(self.loader))
        data = self.loader.dataset
        return self.loader.collate_fn([data[index] for index in range(min(2, len(data)))])

    def weight(self, index: int) -> float:
        """Returns the factor for this process's mean loss in a batch; see `TrainingBatches`."""
        return 1.0 if self.batches is None else self.batches.weight(index)

    def size(self, index: int) -> int:
        """Returns a batch's examples, over all processes; with a user's loader, a full one's."""
        return self.step_size if self.batches is None else self.batches.size(index)

    def begin(
        self, epoch: int, skip: int, step: int, rng: dict[str, Any] | None
    ) -> tuple[Iterator[Any], dict[str, Any] | None]:
        """Returns the batches of an epoch without the first `skip`.

        Args:
            epoch: the epoch.
            skip: the number of batches that a resumed run has seen.
            step: the steps so far.
            rng: the states of the random generators at the beginning of this epoch, if `skip` is
                positive and they are known.

        Returns:
            The batches, and the states that a checkpoint within this epoch has to save as `rng`.
            None for the Trainer's own batches, which do not need them.
        """
        if self.batches is not None:
            self.batches.epoch, self.batches.skip = epoch, skip
            # Without a generator of its own, the loader would draw from dropout's generator, once
            # per epoch and at every resume.
            self.loader.generator.manual_seed(self.seed + step)
            return iter(self.loader), None
        for part in (getattr(self.loader, name, None) for name in ("sampler", "dataset")):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        now = rng_state(self.device, self._generators)
        begun = now if skip == 0 or rng is None else rng
        set_rng_state(begun, self.device, self._generators)
        batches = iter(self.loader)
        if skip > 0:
            for _ in itertools.islice(batches, skip):
                pass
            # An older checkpoint lacks the loader's own, which have come to where they were, unless
            # an evaluation drew from them, too.
            own = self._generators if "others" in begun else ()
            set_rng_state(now, self.device, own)
        return batches, begun

    def check_one_update(self, batches: int) -> None:
        """Refuses to go on after an epoch without an update, if the epochs' length is unknown.

        Args:
            batches: the number of batches in that epoch.

        Raises:
            TrainingError: the length is unknown, so the run could go on forever.
        """
        if self.length is None:
            raise TrainingError(
                f"the training set yielded {counted(batches, 'batch', 'batches')} in an epoch, "
                "fewer than an update takes: give a larger set, or a lower "
                "--gradient_accumulation_steps"
            )


def _batches_of(loader: Any) -> TrainingBatches | None:
    """Returns the `TrainingBatches` of a loader's sampler, or None if the loader changes them.

    A subclass may use the Trainer's sampler in its own loader, with another batch size or without
    the generator that makes a resumed run's workers draw the same numbers.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ExampleSampler) or loader.generator is None:
        return None
    return sampler.batches if loader.batch_size == sampler.batches.batch_size else None


def generators_of(loader: Any) -> list[torch.Generator]:
    """Returns the generators that a loader and its parts draw from, each of them once.

    The parts are its samplers, its set and its collator, also one within the Trainer's own.
    """
    owners = [loader, *(getattr(loader, n, None) for n in ("sampler", "batch_sampler", "dataset"))]
    owners.append(getattr(owners[2], "sampler", None))  # of a user's batch_sampler
    collator = getattr(loader, "collate_fn", None)
    while collator is not None:
        owners.append(collator)
        collator = getattr(collator, "collator", None)
    found = (getattr(owner, "generator", None) for owner in owners)
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


# ---- what models, collators and sets have ----


def takes_packed_rows(model: nn.Module) -> bool:
    """Returns whether a model's forward takes a batch's `PackedRows`."""
    return "packed_rows" in inspect.signature(model.forward).parameters


def label_names_of(model: nn.Module) -> list[str]:
    """Returns the arguments of a model's forward that are labels, by transformers' names."""
    taken = inspect.signature(model.forward).parameters
    spans = ["start_positions", "end_positions"]
    return spans if "labels" not in taken and all(name in taken for name in spans) else ["labels"]


def overrides(instance: Any, owner: type, names: Iterable[str]) -> bool:
    """Returns whether an instance of `owner` overrides one of these methods."""
    methods = ((getattr(instance, name), getattr(owner, name)) for name in names)
    return any(getattr(own, "__func__", own) is not plain for own, plain in methods)


def collator_settings(collator: Any) -> dict[str, Any]:
    """Returns the plain values (numbers, strings, None) in the fields of a dataclass collator."""
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
    """Returns the length of a dataset or a loader, or None if it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # some PyTorch and user classes raise the second
        return None


def is_iterable_only(dataset: Any) -> bool:
    """Returns whether a dataset can be iterated over but not indexed."""
    return isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    )


_LABELS = {"label", "label_ids", "labels", "start_positions", "end_positions"}


def used_columns(dataset: Dataset, model: nn.Module, label_names: Iterable[str]) -> Dataset:
    """Drops the columns that a model's forward does not take, if the set is from `datasets`.

    Raises:
        ValueError: none is left but labels by their usual names, and forward takes others: as with
            a transform or a collator that makes the model's arguments of other columns, or if
            forward takes only ``**kwargs``.
    """
    if not hasattr(dataset, "remove_columns") or dataset.column_names is None:
        return dataset
    parameters = inspect.signature(model.forward).parameters
    taken = {*parameters, "label", "label_ids", *label_names}
    dropped = [name for name in dataset.column_names if name not in taken]
    # Not those of label_names: an autoencoder's may be its inputs.
    if dropped and {*dataset.column_names} - {*dropped} <= _LABELS and not {*parameters} <= _LABELS:
        raise ValueError(
            f"{type(model).__name__}'s forward takes none of the columns {quoted(dropped)}, so "
            "nothing would be left: make its arguments of them before, or keep them with "
            "remove_unused_columns=False"
        )
    return dataset.remove_columns(dropped)


# ---- lengths ----


def lengths_of(dataset: Dataset) -> list[int]:
    """Returns the number of tokens of every example, summed over its choices if it has several.

    Raises:
        ValueError: the examples have no ``input_ids``.
    """
    if _is_table(dataset):
        import pyarrow  # which `datasets` depends on
        from pyarrow.compute import list_value_length

        ids = _ids_of(dataset.with_format("arrow"))[:]
        if not pyarrow.types.is_nested(ids.type.value_type):
            return list_value_length(ids).to_pylist()
        return [sum(map(len, choices)) for choices in ids.to_pylist()]
    each = (_ids_of(dataset[row]) for row in range(len(dataset)))
    return [sum(map(len, ids)) if len(ids) and np.ndim(ids[0]) else len(ids) for ids in each]


def _ids_of(examples: Any) -> Any:
    """Returns the ``input_ids`` of an example or a table.

    Raises:
        ValueError: there are none.
    """
    try:
        return examples["input_ids"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            "--group_by_length needs examples with 'input_ids', whose lengths it compares: leave "
            "it out, or override get_train_dataloader"
        ) from error


def lengths_at_hand(dataset: Dataset, label_names: Iterable[str]) -> list[int] | None:
    """Returns the number of tokens of every example, if an evaluation may sort by it; else None.

    It may if two conditions hold. The lengths are known without reading the set example by example,
    which may be slow or random. And every example has at most one label, so that the mean loss is
    the mean over examples, independent of their batches.

    Args:
        dataset: a set whose examples are dicts.
        label_names: the entries that are labels.
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
    """Returns whether a set is from the `datasets` library."""
    return hasattr(dataset, "column_names") and hasattr(dataset, "with_format")
