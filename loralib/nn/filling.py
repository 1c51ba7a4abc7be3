"""Numbers of tokens that recur, for products in half precision on a CPU.

oneDNN compiles a kernel for each number of rows that it multiplies, which takes a processor with
AMX longer than the product; and packed tokens are another number in nearly every batch. So tokens
that nobody reads are added below the others, as rows of their own: 1,105 tokens become 1,152. They
change no other token's result, and have no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import PackedRows
from .plain import is_plain
from .routing import in_effect

# Numbers become multiples of a power of two that is an eighth of them at most, and no larger: of
# some thousand tokens, 3 % are added on average.
_FEWEST, _LARGEST_STEP = 128, 64


def filled_up(rows: PackedRows, like: Tensor) -> PackedRows:
    """The same rows, and others below them where that makes a number of tokens that recurs.

    Args:
        rows: those of a batch.
        like: on whose device tokens are multiplied with weights; in its dtype, outside of autocast.

    Returns:
        `rows` itself where nothing is to be gained. Else `targets` stay, and positions of the
        batch, by which `pack` and `pad` go, are those of another batch.
    """
    tokens = len(rows.index)
    if tokens < _FEWEST or not (_compiles_kernels(like) and _may_grow(rows)):
        return rows
    step = min(2 ** (tokens.bit_length() - 4), _LARGEST_STEP)
    added = -tokens % step
    if not added:
        return rows
    longest = rows.longest
    lengths = [*rows.lengths, *[longest] * (added // longest), added % longest]
    filled = PackedRows.from_lengths([length for length in lengths if length])
    filled.targets = rows.targets
    return filled


def fill(x: Tensor, rows: PackedRows) -> Tensor:
    """(tokens, …) with zeros below, as many as `filled_up` added to its rows."""
    added = len(rows.index) - len(x)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, added)) if added else x


def _compiles_kernels(x: Tensor) -> bool:
    is_eager = not (is_plain() or torch.compiler.is_compiling() or torch.jit.is_tracing())
    if x.device.type != "cpu" or not is_eager:
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype in (torch.bfloat16, torch.float16)


def _may_grow(rows: PackedRows) -> bool:
    """Whether rows have their tokens side by side, and no bank of adapters has counted them."""
    return rows.padded_right and in_effect() is None
