"""Makes batches for the language model from encoded examples.

An example's tokens are its context and its completion. The input is these tokens, the target the
same shifted by one, and the mask is 1 where the target counts:

    tokens   c1  c2  c3  d1  d2  d3          c: context, d: completion
    input    c1  c2  c3  d1  d2  d3
    target   c2  c3  d1  d2  d3   0
    mask      0   0   1   1   1   0          with the joint objective  1  1  1  1  1  0

All are cut to the sequence length. A batch is padded to its longest row, not to the sequence
length. It also holds the positions of the tokens that its loss needs: in a causal model, those up
to the last target of each row.
"""

import logging
import os
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from encoded import check_in_vocabulary, read_encoded, token_ids
from gpu import DistEnv
from loralib.io.command_line import check_bounds
from loralib.nn.packing import PackedRows
from loralib.training import launcher_env

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """One example.

    Attributes:
        tokens: int32, the token ids; one more than `length` if they are more than its positions.
        length: number of input positions.
        first: the first position whose target counts; all later targets count, too.
    """

    tokens: Tensor
    length: int
    first: int


class FT_Dataset(Dataset):
    """The examples of a file of token ids, filled up to full batches with random examples.

    Which examples fill the last batch depends only on the seed, so that all processes, and a
    resumed run, agree. All tokens are held in one tensor of 32-bit integers, including those beyond
    `max_seq_length`.

    Args:
        path: JSON lines ``{"context": [ids], "completion": [ids]}``.
        batch_size: rows in a batch.
        max_seq_length: the largest number of input positions; longer examples are cut, with a
            warning.
        joint_lm: whether the context's tokens count as targets, too.
        seed: the seed by which random examples are chosen.
        vocab_size: the vocabulary's size; ids have to be below it.

    Attributes:
        batch_size: as given.
        num_examples: number of examples in the file.
        num_batches: number of batches that they fill.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has no context or completion of token ids, its completion is empty, or
            an id is outside the vocabulary (the message names file and line); or no example has a
            target; or a size is not positive.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        batch_size: int,
        max_seq_length: int,
        *,  # the release's fourth argument is another one
        joint_lm: bool = False,
        seed: int = 0,
        vocab_size: int = 50257,
    ):
        check_bounds("batch_size", batch_size, least=1)
        check_bounds("max_seq_length", max_seq_length, least=1)
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{path}: no such file; create_datasets.sh makes those of E2E, WebNLG and DART"
            )
        self.batch_size = batch_size
        self.max_seq_length = max_seq_length
        self.joint_lm = joint_lm
        tokens, ends, contexts = _read(path, vocab_size)
        self._tokens, self._ends, self._contexts = torch.from_numpy(tokens), ends, contexts
        if not any(self._has_target(index) for index in range(len(contexts))):
            raise ValueError(
                f"{path}: no example has a token to learn within {max_seq_length} positions"
            )
        cut = (np.diff(ends) - 1 > max_seq_length).sum()  # the last token is only a target
        if cut and launcher_env.rank() == 0:
            logger.warning(
                "%s: %d of %d examples take more than %d positions and were cut; %d of them lost "
                "the whole completion",
                path,
                cut,
                len(contexts),
                max_seq_length,
                (contexts > max_seq_length).sum(),
            )
        self.num_examples = len(contexts)
        self.num_batches = -(-self.num_examples // batch_size)
        missing = len(self) - self.num_examples
        self._filling = random.Random(seed).choices(range(self.num_examples), k=missing)

    def __len__(self) -> int:
        return self.num_batches * self.batch_size

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} rows, but no row {index}")
        if index >= self.num_examples:
            index = self._filling[index - self.num_examples]
        begin = int(self._ends[index])
        tokens = self._tokens[begin : begin + self._kept(index)]
        return Row(tokens, min(len(tokens), self.max_seq_length), self._first(index))

    def shows_ends(self) -> bool:
        """Returns whether all completions end in one token that occurs nowhere else in them."""
        tokens, ends = self._tokens.numpy(), self._ends
        last = tokens[ends[1:] - 1]
        places = np.flatnonzero(tokens == last[0])
        rows = np.searchsorted(ends, places, side="right") - 1
        within = int((places >= ends[rows] + self._contexts[rows]).sum())
        return within == self.num_examples and bool((last == last[0]).all())

    def _kept(self, index: int) -> int:
        """Returns how many of an example's tokens are kept: the inputs and the last target."""
        return min(int(self._ends[index + 1] - self._ends[index]), self.max_seq_length + 1)

    def _first(self, index: int) -> int:
        """Returns the first position with a target: before the completion, or 0 if joint.

        The very first token of a row is never a target, because no position is before it.
        """
        return 0 if self.joint_lm else max(0, int(self._contexts[index]) - 1)

    def _has_target(self, index: int) -> bool:
        return self._kept(index) - 1 > self._first(index)


def _read(path: str | os.PathLike, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads a file's examples into one array of tokens.

    This has to be fast, because a corpus has millions of tokens, and each run reads them. So ids
    are compared with the vocabulary only when all have been read.

    Returns:
        The tokens of all examples, (tokens,), int32; where each example begins and the last one
        ends, (examples + 1,); and how many tokens of each are context, (examples,).

    Raises:
        ValueError: see `FT_Dataset`.
    """
    tokens, ends, contexts = array("q"), array("q", [0]), array("q")
    for number, row in enumerate(read_encoded(path), start=1):
        where = f"{path}:{number}"
        context, completion = (token_ids(row, name, where) for name in ("context", "completion"))
        if not completion:
            raise ValueError(f"{where}: the completion is empty")
        try:
            tokens.fromlist(context)
            tokens.fromlist(completion)
        except OverflowError:  # an id of more than 64 bits
            check_in_vocabulary([*context, *completion], vocab_size, where)
            raise
        contexts.append(len(context))
        ends.append(len(tokens))
    all_ids, bounds = np.frombuffer(tokens, dtype=np.int64), np.frombuffer(ends, dtype=np.int64)
    outside = np.flatnonzero((all_ids < 0) | (all_ids >= vocab_size))
    if outside.size:
        number = np.searchsorted(bounds, outside[0], side="right")
        check_in_vocabulary(all_ids[outside], vocab_size, f"{path}:{number}")
    return all_ids.astype(np.int32), bounds, np.frombuffer(contexts, dtype=np.int64)


# The tensors of a batch by name, and its `PackedRows`.
Batch = Mapping[str, Any]
# Rows of one dataset -> a batch.
Collate = Callable[[Sequence[Row]], Batch]


def collate(rows: Sequence[Row]) -> Batch:
    """Collates rows of one dataset into a batch.

    Args:
        rows: at least one.

    Returns:
        `input` and `target`, int64, and `mask`, float32, each (rows, the longest row's length),
        padded with 0; and `packed_rows`, a `PackedRows` of each row's tokens up to its last target,
        or of the first token of a row that has none, with the targets.
    """
    shape = len(rows), max(row.length for row in rows)
    inputs = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape)
    for index, (tokens, length, first) in enumerate(rows):
        inputs[index, :length] = tokens[:length]
        last = len(tokens) - 1
        targets[index, :last] = tokens[1:]
        mask[index, first:last] = 1
    needed = [len(row.tokens) - 1 if row.first < len(row.tokens) - 1 else 1 for row in rows]
    packed_rows = PackedRows.from_lengths(needed, shape[1]).with_targets(mask)
    return {"input": inputs, "target": targets, "mask": mask, "packed_rows": packed_rows}


def short_batch() -> Batch:
    """Returns a small batch for which torch.compile makes the graphs that all batches use.

    torch.compile makes special graphs for a dimension of size 1, and for equal dimensions. This
    batch has neither.
    """
    rows = (torch.zeros(length + 1, dtype=torch.int32) for length in (5, 6, 8))
    return collate([Row(row, len(row) - 1, first=1) for row in rows])


def count_tokens(batch: Batch) -> int:
    """Returns the number of positions at or before their row's last target: all but padding."""
    return int(batch["mask"].flip(1).cumsum(1).count_nonzero())


def batches_per_epoch(dataset: FT_Dataset, dist_env: DistEnv) -> int:
    """Returns the number of full batches that each process gets in an epoch.

    Raises:
        ValueError: there are fewer examples than one batch for each process.
    """
    batches = -(-len(dataset) // dist_env.world_size) // dataset.batch_size
    if batches == 0:
        raise ValueError(
            f"{dataset.num_examples} training examples are too few for a batch of "
            f"{dataset.batch_size} on each of {dist_env.world_size} processes: use a smaller batch "
            "size or fewer processes"
        )
    return batches


def batches_from(
    dataset: FT_Dataset,
    dist_env: DistEnv,
    seed: int,
    step: int,
    collate: Collate = collate,
) -> Iterator[Batch]:
    """Yields this process's batches from a step on, epoch after epoch, endlessly.

    Step n of a run takes the n-th batch, so the position in the data follows from the step.

    Args:
        dataset, dist_env, seed, collate: as for `training_batches`.
        step: the number of batches that the run has had before; 0 unless it is resumed.
    """
    epoch, skip = divmod(step, batches_per_epoch(dataset, dist_env))
    while True:
        epoch += 1
        yield from training_batches(dataset, dist_env, seed, epoch, skip, collate)
        skip = 0


def training_batches(
    dataset: FT_Dataset,
    dist_env: DistEnv,
    seed: int,
    epoch: int,
    skip: int = 0,
    collate: Collate = collate,
) -> Iterator[Batch]:
    """Yields this process's batches of one epoch, shuffled, all of full size.

    Args:
        dataset, dist_env, seed, epoch: as for `training_order`.
        skip: how many batches to skip at the beginning, when a run is resumed.
        collate: makes a batch of rows.

    Raises:
        ValueError: as for `batches_per_epoch`.
    """
    order = training_order(dataset, dist_env, seed, epoch)[skip * dataset.batch_size :]
    return _batches(dataset, order, dist_env, collate)


def training_order(dataset: FT_Dataset, dist_env: DistEnv, seed: int, epoch: int) -> list[int]:
    """Returns the examples of this process's batches in one epoch.

    The order is that of `torch.utils.data.DistributedSampler`. It depends only on seed and epoch,
    not on any global random generator.

    Args:
        dataset: the examples to train on.
        dist_env: this process.
        seed: the run's seed, the same on all processes.
        epoch: the epoch's number, counted from 1.

    Raises:
        ValueError: as for `batches_per_epoch`.
    """
    sampler = DistributedSampler(
        dataset, dist_env.world_size, dist_env.rank, shuffle=True, seed=seed
    )
    sampler.set_epoch(epoch)
    return list(sampler)[: batches_per_epoch(dataset, dist_env) * dataset.batch_size]


def validation_batches(dataset: FT_Dataset, dist_env: DistEnv) -> Iterator[Batch]:
    """Yields batches of this process's share of the examples: every world_size-th, in order.

    Each example is in exactly one batch of one process. The random examples that fill up the last
    batch are left out, so the last batch may be smaller. A process may have no batch.

    Args:
        dataset: the examples to evaluate on.
        dist_env: this process.
    """
    share = range(dist_env.rank, dataset.num_examples, dist_env.world_size)
    return _batches(dataset, share, dist_env)


def _batches(
    dataset: FT_Dataset, order: Sequence[int], dist_env: DistEnv, collate: Collate = collate
) -> Iterator[Batch]:
    pin = dist_env.device.type == "cuda"  # a copy from pinned memory need not wait
    for start in range(0, len(order), dataset.batch_size):
        batch = collate([dataset[index] for index in order[start : start + dataset.batch_size]])
        yield {name: part.pin_memory() if pin else part for name, part in batch.items()}
