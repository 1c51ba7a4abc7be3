"""What all processes of a run have to have alike: compared before they compute together.

Each process reads flags, data and weights for itself, on several machines each its own. Where these
differ, gradients are averages over other runs, and scores are of several models.
"""

import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TrainingError
from .distributed import gather_objects


def check_alike(settings: Mapping[str, Any], world_size: int) -> None:
    """Checks that all processes have the same settings; to be called by all of them.

    Args:
        settings: by name, such as flags and digests, as plain values.
        world_size: how many processes there are.

    Raises:
        TrainingError: one differs; the message names it, and the processes.
    """
    if world_size == 1:
        return
    (first_host, first), *others = gather_objects(
        (socket.gethostname(), dict(settings)), world_size
    )
    for number, (host, other) in enumerate(others, start=1):
        for name in [*first, *(name for name in other if name not in first)]:
            ours, theirs = first.get(name), other.get(name)
            # Not a number is no other than itself here.
            if ours != theirs and not (ours != ours and theirs != theirs):
                raise TrainingError(
                    f"process {number} on {host} has {name} {theirs}, process 0 on {first_host} "
                    f"has {ours}: give all processes of a run the same"
                )


def check_same_weights(model: nn.Module, world_size: int) -> None:
    """Checks that all processes have a model with the same bits; to be called by all of them.

    Args:
        model: as it was read: what is computed of weights may have other bits on other processors.
        world_size: how many processes there are.

    Raises:
        TrainingError: a tensor differs; the message names it, and the processes.
    """
    if world_size > 1:
        sums = _sums_of_bits(model)
        check_alike({f"weights of {name} (sum of bits)": s for name, s in sums.items()}, world_size)


def _sums_of_bits(model: nn.Module) -> dict[str, int]:
    """A number for each of a model's tensors, which other weights hardly have: exact everywhere.

    It is the sum of its bits, read as whole numbers; the order in which they are added does not
    matter, as it would to sums of the values. On a GPU all are read at once.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not tensors:
        return {}
    sums = torch.stack([_sum_of_bits(tensor.detach()) for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype is not torch.bool:
        tensor = tensor.contiguous().view(_WHOLE[tensor.element_size()])
    return tensor.sum(dtype=torch.int64)
