"""Numbers of rows that recur, for products on a CPU.

Packed tokens, or targets, are another number in nearly every batch. And oneDNN compiles kernels for
each number of rows that it multiplies with a weight, and keeps them with their scratch memory, for
the last thousand such products.

- In half precision, compiling takes a processor with AMX longer than the product. Each number keeps
  megabytes; with a head as wide as a vocabulary, tens of megabytes.
- In float32, a kernel takes a millisecond. But training GPT-2 small grew from 1.2 to 2.14 GiB in
  160 steps (1.70 with 64 kernels kept), of which 0.9 was free and not used again, probably because
  kernels lie between a step's tensors. With numbers that recur, it was 1.22.

So rows that nobody reads are added below the others: in half precision, 1,105 tokens become 1,152,
in float32 1,120. They are copies of the first, as zeros have no variance for a norm to divide by.
They change no other row's result, and have no gradient.
"""

import torch
from torch import Tensor

from .fast_paths import are_fast_paths_off
from .packing import PackedRows
from .products import product_dtype
from .routing import in_effect

# Numbers become multiples of a power of two that is an eighth of them at most, and no larger than
# this: to about 1,000 rows, 3 % are added on average, and 0.7 % in float32.
_LARGEST_STEP = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
_FEWEST = 16


def recurring(count: int, like: Tensor) -> int:
    """`count`, or the next larger number that recurs, where something is to be gained.

    Args:
        count: rows that are multiplied with weights.
        like: on whose device they are, and in its dtype, outside of autocast.
    """
    largest_step = _largest_step(like)
    # A bank of adapters has counted the rows.
    if not largest_step or in_effect() is not None or count < _FEWEST:
        return count
    return count + -count % min(2 ** (count.bit_length() - 4), largest_step)


def filled_up(rows: PackedRows, like: Tensor) -> PackedRows:
    """The same rows, and others below them where that makes a number of tokens that recurs.

    Args:
        rows: those of a batch.
        like: as in `recurring`.

    Returns:
        `rows` itself where nothing is to be gained. Else `targets` stay, and positions of the
        batch, by which `pack` and `pad` go, are those of another batch.
    """
    if not rows.padded_right:  # padding is among the tokens
        return rows
    added = recurring(len(rows.index), like) - len(rows.index)
    if not added:
        return rows
    longest = rows.longest
    lengths = [*rows.lengths, *[longest] * (added // longest), added % longest]
    filled = PackedRows.from_lengths([length for length in lengths if length])
    filled.targets = rows.targets
    return filled


def fill(x: Tensor, count: int) -> Tensor:
    """(rows, …) -> (count, …), with copies of the first row below."""
    added = count - len(x)
    return torch.cat([x, x[:1].detach().expand(added, *x.shape[1:])]) if added else x


def _largest_step(x: Tensor) -> int:
    """What numbers become multiples of at most, for x's products; 0 where none are filled up."""
    is_eager = not (are_fast_paths_off() or torch.compiler.is_compiling() or torch.jit.is_tracing())
    if x.device.type != "cpu" or not is_eager:
        return 0
    return _LARGEST_STEP.get(product_dtype(x), 0)
