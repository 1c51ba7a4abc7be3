"""Checks that a file's content has the structure of an example: types, names and shapes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_structure(value: Any, example: Any, name: str = "it") -> None:
    """Checks that `value`, which was read from a file, has the structure of `example`.

    Mappings must have at least the same keys, sequences the same length (unless the example is
    empty), tensors the same dtype and shape, and other values the same type. In place of a float,
    an int is accepted. If the example is None, anything is accepted.

    Args:
        value, example: what to compare.
        name: the value's name in messages.

    Raises:
        ValueError: the structures differ. The message says where.
    """
    if isinstance(example, Mapping):
        _check_type(value, Mapping, name)
        for key, part in example.items():
            if key not in value:
                raise ValueError(f"{name} has no '{key}'")
            check_structure(value[key], part, f"'{key}'")
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
            check_structure(part, like, f"an entry of {name}")
    elif example is not None:
        _check_type(value, float | int if isinstance(example, float) else type(example), name)


def _check_type(value: Any, kind: Any, name: str) -> None:
    # In Python, True is an int.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = getattr(kind, "__name__", str(kind))
        raise ValueError(f"{name} is of the type {type(value).__name__}, not {wanted}")
