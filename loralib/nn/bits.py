"""A tensor's bits, read as integers that are as large as its values."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integer_of(dtype: torch.dtype) -> torch.dtype:
    """The integers of a dtype's size."""
    return _INTEGERS[dtype.itemsize]


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory as integers, which equal each other where their bits do, NaN's too.

    Args:
        tensor: of any shape and dtype; a complex value counts as two numbers.

    Returns:
        The same shape, of a complex tensor with 2 added to it.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(integer_of(real.dtype))
