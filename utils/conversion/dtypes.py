"""The dtypes of tensors: their names, and whether values are within their range."""

from collections.abc import Mapping

import torch
from torch import Tensor

from loralib.adapters.adapter import Adapter
from loralib.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")


def check_range(tensors: Mapping[str, Tensor], name: object, dtype: torch.dtype) -> None:
    """Checks that tensors, once rounded to `dtype`, are finite; errors call them `name`.

    Raises:
        CheckpointError: one is not.
    """
    for tensor, values in tensors.items():
        if not torch.isfinite(values).all():
            raise CheckpointError(
                f"{name}: {tensor} has values beyond the range of {name_of(dtype)}; give another "
                "--dtype"
            )


def dtypes_of(adapter: Adapter) -> list[str]:
    """The names of the dtypes of an adapter's tensors, but for counters and masks."""
    tensors = adapter.tensors.values()
    return sorted({name_of(tensor.dtype) for tensor in tensors if tensor.is_floating_point()})


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype as --dtype takes it: "float32"."""
    return str(dtype).removeprefix("torch.")
