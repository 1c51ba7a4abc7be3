"""Names the dtypes of tensors, and checks that values are within a dtype's range."""

from collections.abc import Mapping

import torch
from torch import Tensor

from loralib.adapters.adapter import Adapter
from loralib.errors import CheckpointError
from loralib.io.tensors import first_not_finite

DTYPES = ("float32", "bfloat16", "float16")


def check_range(tensors: Mapping[str, Tensor], name: object, dtype: torch.dtype) -> None:
    """Checks that tensors that were converted to `dtype` are finite.

    Args:
        tensors: the converted tensors.
        name: the name of the file or model, for errors.
        dtype: their dtype, for errors.

    Raises:
        CheckpointError: a tensor is not finite.
    """
    tensor = first_not_finite(tensors.items())
    if tensor is not None:
        raise CheckpointError(
            f"{name}: {tensor} has values beyond the range of {name_of(dtype)}; give another "
            "--dtype"
        )


def dtypes_of(adapter: Adapter) -> list[str]:
    """Returns the names of the dtypes of an adapter's floating-point tensors."""
    tensors = adapter.tensors.values()
    return sorted({name_of(tensor.dtype) for tensor in tensors if tensor.is_floating_point()})


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as --dtype takes it, such as "float32"."""
    return str(dtype).removeprefix("torch.")
