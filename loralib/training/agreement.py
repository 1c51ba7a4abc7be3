"""Checks that all processes of a run agree, before they compute together.

Each process reads flags, data and weights for itself, perhaps from its own machine. Where these
differ, gradients would be averaged over different runs, and scores computed with several models.
"""

import logging
import socket
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import __version__
from ..errors import TrainingError
from ..io.digests import short_digest
from ..nn.bits import bits_of
from .distributed import gather_objects, gather_on_first

logger = logging.getLogger(__name__)


class _Reported(NamedTuple):
    """What a process reports to the others."""

    host: str
    settings: dict[str, Any]


def check_alike(settings: Mapping[str, Any], world_size: int) -> None:
    """Checks that all processes have the same settings; all of them have to call it.

    Args:
        settings: plain values by name, such as flags and digests.
        world_size: how many processes there are.

    Raises:
        TrainingError: a setting differs (the message names it and the processes), or a process is
            at another step of the run.
    """
    if world_size == 1:
        return
    said = gather_objects(_Reported(socket.gethostname(), dict(settings)), world_size)
    elsewhere = [str(number) for number, each in enumerate(said) if not isinstance(each, _Reported)]
    if elsewhere:
        raise TrainingError(
            f"another step of the run was called by process {', '.join(elsewhere)}: all processes "
            "have to train, evaluate and predict in the same order"
        )
    (first_host, first), *others = said
    for number, (host, other) in enumerate(others, start=1):
        for name in first | other:
            ours, theirs = first.get(name), other.get(name)
            # NaN counts as equal to NaN.
            if ours != theirs and not (ours != ours and theirs != theirs):
                raise TrainingError(
                    f"process {number} on {host} has {name} {short_digest(theirs)}, process 0 on "
                    f"{first_host} has {short_digest(ours)}: give all processes of a run the same"
                )


def check_same_code(rank: int, world_size: int) -> None:
    """Checks that all processes run the same version of this project; all have to call it.

    Warns if versions of PyTorch differ, because results may then differ by rounding.

    Raises:
        TrainingError: a process has another version.
    """
    if world_size == 1:
        return
    check_alike({"version of loralib": __version__}, world_size)
    versions = gather_on_first(torch.__version__, rank, world_size)
    for number, version in enumerate(versions):
        if version != versions[0]:
            logger.warning(
                "process %d has PyTorch %s, process 0 has %s: results may differ in the last bits",
                *(number, version, versions[0]),
            )


def check_same_weights(
    model: nn.Module, world_size: int, names: Collection[str] | None = None
) -> None:
    """Checks that all processes have a model with the same bits; all of them have to call it.

    Args:
        model: as it was read, because what is computed from weights may have other bits on another
            processor.
        world_size: how many processes there are.
        names: the parameters and buffers to compare; None for all.

    Raises:
        TrainingError: a tensor differs; the message names it and the processes.
    """
    if world_size > 1:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if names is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if name in names}
        digests = _digests(tensors)
        check_alike(
            {f"weights of {name} (shape, digest)": each for name, each in digests.items()},
            world_size,
        )


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns each tensor's shape with a checksum that is the same on all devices.

    All checksums are read from a GPU at once.
    """
    if not tensors:
        return {}
    sums = torch.stack([_sum_of_bits(tensor.detach()) for tensor in tensors.values()]).tolist()
    return {
        name: f"{'x'.join(map(str, tensor.shape)) or 'one value'}, {number % 2**64:016x}"
        for (name, tensor), number in zip(tensors.items(), sums, strict=True)
    }


# How many values are read at a time. On a CPU, they have to stay in its cache.
_BLOCK = {"cpu": 2**16}
_LARGE_BLOCK = 2**24


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's values, their bits read as integers, times 1, 3, 5, … by place.

    It is computed modulo 2⁶⁴, so that the order of the additions does not matter, as it would for
    sums of the values. Odd factors lose no bit, so a single value that differs always shows.
    """
    blocks = bits_of(tensor).reshape(-1).split(_BLOCK.get(tensor.device.type, _LARGE_BLOCK))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = 2 * torch.arange(len(blocks[0]), device=tensor.device) + 1
    for block in blocks:
        total += (block * factors[: len(block)]).sum()
        factors += 2 * len(factors)
    return total
