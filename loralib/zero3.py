"""Recognizes DeepSpeed's ZeRO by the attributes that it sets on parameters, without importing it.

Under ZeRO 3, each process holds a part of each parameter. Hooks on modules gather a parameter for a
call, as `deepspeed.zero.GatheredParameters` does for a block. Otherwise it is empty, of shape (0,).
"""

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def is_of_zero3(tensor: object) -> bool:
    """Returns whether ZeRO 3 gives a parameter its values for each call."""
    return hasattr(tensor, "ds_id")


def is_partitioned(tensor: Any) -> bool:
    """Returns whether a parameter is empty now, with its values spread over processes."""
    return is_of_zero3(tensor) and tensor.ds_status.name != "AVAILABLE"


@contextmanager
def with_shapes(model: nn.Module) -> Iterator[None]:
    """Gives partitioned parameters their shapes within this block, as zeros without memory."""
    parameters: Iterable[Any] = model.parameters()
    empty = [(each, each.data) for each in parameters if is_partitioned(each)]
    for each, data in empty:
        each.data = data.new_zeros(()).expand(each.ds_shape)
    try:
        yield
    finally:
        for each, data in empty:
            each.data = data


def check_gathered(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Checks that no tensor is partitioned, so that each has its values.

    Args:
        tensors: names and tensors.
        what: what the values are needed for, such as "LoRA is merged".

    Raises:
        ValueError: one is partitioned.
    """
    for name, tensor in tensors:
        if is_partitioned(tensor):
            raise ValueError(
                f"{name} is partitioned by DeepSpeed's ZeRO 3: before {what}, gather it, in all "
                "processes (with deepspeed.zero.GatheredParameters(list(model.parameters()), "
                "modifier_rank=0):)"
            )


def check_not_copied(model: nn.Module, so: str, written: Container[str] | None = None) -> None:
    """Checks that no DeepSpeed optimizer (of ZeRO 1, 2 or 3) trains copies of parameters.

    Args:
        model: the model.
        so: the message's next words: what such a copy leads to, and what to do before
            deepspeed.initialize.
        written: names of the parameters whose copies matter, because they are about to be written
            to; None for all.

    Raises:
        ValueError: an optimizer trains such a copy.
    """
    for name, tensor in model.named_parameters(remove_duplicate=False):
        way_out = _way_out_of_copies(tensor)
        if way_out and (written is None or name in written):
            raise ValueError(
                f"DeepSpeed's optimizer holds a copy of {name}, {so}; to do so now, {way_out}"
            )


def _way_out_of_copies(tensor: Any) -> str | None:
    """Returns how to get rid of the optimizer that trains a copy of a parameter, if one does."""
    if getattr(tensor, "_hp_mapping", None) is not None:  # set by ZeRO 1 and 2 on what they train
        return "call engine.destroy() first"
    # ZeRO 3 sets this on frozen parameters as well, and leaves it there when it is destroyed.
    if tensor.requires_grad and getattr(tensor, "_z3_optimizer", None) is not None:
        return "build the model again"
    return None
