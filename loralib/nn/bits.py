"""Views a tensor's bits as integers of the same size as its values."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integer_of(dtype: torch.dtype) -> torch.dtype:
    """Returns the integer dtype of the same size."""
    return _INTEGERS[dtype.itemsize]


def bits_of(tensor: Tensor) -> Tensor:
    """Views a tensor as integers, which are equal exactly where the bits are, even for NaN.

    Args:
        tensor: of any shape and dtype; a complex value counts as two numbers.

    Returns:
        A view of the same shape, with a last dimension of 2 added if the tensor is complex.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(integer_of(real.dtype))
