"""Numbers of rows that recur, for products in half precision on a CPU.

oneDNN compiles kernels for each number of rows that it multiplies with a weight, and keeps them
with their scratch memory, for the last thousand such products. Compiling takes a processor with AMX
longer than the product. Each number keeps megabytes; with a head as wide as a vocabulary, tens of
megabytes. And packed tokens, or targets, are another number in nearly every batch.

So rows that nobody reads are added below the others: 1,105 tokens become 1,152. They are copies of
the first, as zeros have no variance for a norm to divide by. They change no other row's result, and
have no gradient.
"""

import torch
from torch import Tensor

from .packing import PackedRows
from .plain import is_plain
from .routing import in_effect

# Numbers become multiples of a power of two that is an eighth of them at most, and no larger: of
# some thousand rows, 3 % are added on average.
_FEWEST, _LARGEST_STEP = 16, 64


def recurring(count: int, like: Tensor) -> int:
    """`count`, or the next larger number that recurs, where something is to be gained.

    Args:
        count: rows that are multiplied with weights.
        like: on whose device they are, and in its dtype, outside of autocast.
    """
    # A bank of adapters has counted the rows.
    if not _compiles_kernels(like) or in_effect() is not None or count < _FEWEST:
        return count
    return count + -count % min(2 ** (count.bit_length() - 4), _LARGEST_STEP)


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


def _compiles_kernels(x: Tensor) -> bool:
    is_eager = not (is_plain() or torch.compiler.is_compiling() or torch.jit.is_tracing())
    if x.device.type != "cpu" or not is_eager:
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype in (torch.bfloat16, torch.float16)
