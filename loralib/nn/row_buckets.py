"""Fills matrices up to row counts that recur, for products on a CPU.

The number of packed tokens, or of targets, differs in nearly every batch. oneDNN compiles kernels
for each number of rows that it multiplies with a weight, and keeps them, with their scratch memory,
for the last thousand such products.

- In half precision, on a processor with AMX, compiling takes longer than the product. The kernels
  of each row count keep megabytes; for a head as wide as a vocabulary, tens of megabytes.
- In float32, a kernel compiles in a millisecond. But the memory of training GPT-2 small grew from
  1.2 to 2.14 GiB in 160 steps (to 1.70 with only 64 kernels kept). 0.9 GiB of it was free but not
  reused, probably because kernels lie between a step's tensors. With row counts that recur, it was
  1.22 GiB.

So rows that are never read are added below the others: 1,105 tokens become 1,152 in half precision,
and 1,120 in float32. They are copies of the first row, because a norm would divide a row of zeros
by a variance of 0. They change no other row's result, and have no gradient.
"""

import torch
from torch import Tensor

from .fast_paths import are_eager_paths_on
from .packing import PackedRows
from .products import product_dtype
from .routing import in_effect

# Row counts are rounded up to multiples of a power of two: at most an eighth of the count, and at
# most this. To about 1,000 rows, this adds 3 % on average in half precision, and 0.7 % in float32.
_LARGEST_STEP = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}


def bucketed(count: int, like: Tensor) -> int:
    """Returns `count`, or the next larger number that recurs, if filling up helps.

    Args:
        count: rows that are multiplied with weights.
        like: a tensor on the rows' device and, outside of autocast, in their dtype.
    """
    largest_step = _largest_step(like)
    # A bank of adapters assigns rows by their number, so none are added.
    if not largest_step or in_effect() is not None:
        return count
    return round_up(count, largest_step)


def round_up(count: int, largest_step: int, smallest_step: int = 1) -> int:
    """Returns the next of the numbers that recur, which is `count` itself or larger.

    They are multiples of a step: the largest power of two that is at most an eighth of `count`, but
    within limits. CUDA graphs take such sizes as well, see training/cuda_graphs.py.

    Args:
        count: the number.
        largest_step, smallest_step: limits of the step; the first one prevails.
    """
    step = min(max(2 ** max(count.bit_length() - 4, 0), smallest_step), largest_step)
    return count + -count % step


def with_filler_rows(rows: PackedRows, like: Tensor) -> PackedRows:
    """Returns the rows with more rows below, so that the number of tokens is one that recurs.

    Args:
        rows: those of a batch.
        like: as in `bucketed`.

    Returns:
        `rows` itself if filling up does not help. Else `targets` are kept, but `pack` and `pad` fit
        only the enlarged batch, not the given one.
    """
    if not rows.padded_right:  # lengths do not tell the tokens' columns
        return rows
    added = bucketed(len(rows.index), like) - len(rows.index)
    if not added:
        return rows
    longest = rows.longest
    lengths = [*rows.lengths, *[longest] * (added // longest), added % longest]
    filled = PackedRows.from_lengths([length for length in lengths if length])
    filled.targets = rows.targets
    return filled


def fill(x: Tensor, count: int) -> Tensor:
    """(rows, …) -> (count, …), with copies of the first row below."""
    added = count - x.shape[0]  # unlike `len`, not fixed in a graph that is being recorded
    return torch.cat([x, x[:1].detach().expand(added, *x.shape[1:])]) if added else x


def _largest_step(x: Tensor) -> int:
    """Returns the largest step of row counts for x's products; 0 if they are not filled up."""
    if x.device.type != "cpu" or not are_eager_paths_on():
        return 0
    return _LARGEST_STEP.get(product_dtype(x), 0)
