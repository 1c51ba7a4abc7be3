"""Recognizes tensors that are not plain: sharded, without values, quantized, sparse or nested."""

import torch
from torch import Tensor

from .wrappers import package_and_name

# PyTorch's classes of tensors that compute as plain ones do, including sharded tensors, those with
# a shape but no values, and lazy ones, which get a shape in the first forward.
_ORDINARY = {"Tensor", "TensorBase", "Parameter", "Buffer", "DTensor", "FakeTensor"}
_ORDINARY |= {"UninitializedParameter", "UninitializedBuffer"}
# The methods by which a class of tensors computes PyTorch's operations itself.
_OWN_WAYS = {"__torch_dispatch__", "__torch_function__"}
_PACKED = {("bitsandbytes", "Params4bit"), ("bitsandbytes", "Int8Params")}


def is_sharded(tensor: object) -> bool:
    """Returns whether a tensor may be spread over processes, as by FSDP2 or tensor parallelism."""
    return hasattr(tensor, "full_tensor")


def is_fake(tensor: object) -> bool:
    """Returns whether a tensor has no values although its device has memory (`FakeTensorMode`)."""
    return type(tensor).__name__ == "FakeTensor"


def quantized(tensor: Tensor) -> str | None:
    """Returns, in words, how a tensor is quantized, or computes in its own way; None if neither."""
    kind = type(tensor)
    if any(_OWN_WAYS & vars(each).keys() for each in kind.__mro__ if not _is_ordinary(each)):
        return f"quantized (a {kind.__module__}.{kind.__qualname__})"
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return f"quantized ({tensor.dtype})"
    return None


def unreadable(tensor: Tensor) -> str | None:
    """Returns what `quantized` does, but accepts integers, such as a mask's, as plain values.

    Those that bitsandbytes has packed are not plain.
    """
    return quantized(tensor) if tensor.is_floating_point() or is_packed(tensor) else None


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor is neither sparse nor nested, nor in oneDNN's own layout."""
    return tensor.layout is torch.strided and not tensor.is_nested


def has_own_dispatch(tensor: Tensor) -> bool:
    """Returns whether a tensor's class computes PyTorch's operations itself, as torchao's do."""
    kind = type(tensor)
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not _is_ordinary(kind)


def is_packed(tensor: Tensor) -> bool:
    """Returns whether this is a weight of bitsandbytes, whose numbers are packed into others."""
    return package_and_name(type(tensor)) in _PACKED


def _is_ordinary(kind: type) -> bool:
    package, name = package_and_name(kind)
    return package == "torch" and name in _ORDINARY
