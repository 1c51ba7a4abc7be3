"""Whether a file's content has the structure of an example: types, names, shapes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_like(value: Any, example: Any, name: str = "it") -> None:
    """Checks that `value`, which was read from a file, is built as `example` is.

    Mappings have at least the same keys, sequences the same length (an empty one stands for any),
    tensors dtype and shape, other values the type; a float may be an int, and where the example
    is None, anything goes.

    Args:
        value, example: what to compare.
        name: of the value, for the message.

    Raises:
        ValueError: it is not; the message says where.
    """
    if isinstance(example, Mapping):
        _check_type(value, Mapping, name)
        for key, part in example.items():
            if key not in value:
                raise ValueError(f"{name} has no '{key}'")
            check_like(value[key], part, f"'{key}'")
    elif isinstance(example, Tensor):
        _check_type(value, Tensor, name)
        found, wanted = ((tensor.dtype, tuple(tensor.shape)) for tensor in (value, example))
        if found != wanted:
            raise ValueError(f"{name} is a tensor of {found}, not {wanted}")
    elif isinstance(example, list | tuple):
        _check_type(value, list | tuple, name)
        if example and len(value) != len(example):
            raise ValueError(f"{name} has {len(value)} entries, not {len(example)}")
        for part, like in zip(value, example, strict=False):
            check_like(part, like, f"an entry of {name}")
    elif example is not None:
        _check_type(value, float | int if isinstance(example, float) else type(example), name)


def _check_type(value: Any, kind: Any, name: str) -> None:
    # Python counts True among the numbers.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = getattr(kind, "__name__", str(kind))
        raise ValueError(f"{name} is of the type {type(value).__name__}, not {wanted}")
