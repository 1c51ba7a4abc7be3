"""Reads from the launcher's environment variables which process of a run this is."""

import os
from dataclasses import dataclass

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Place:
    """One process among those of a run.

    Attributes:
        rank: the process's number, from 0.
        world_size: how many processes there are.
        local_rank: the process's number on its machine.
    """

    rank: int
    world_size: int
    local_rank: int


def is_launched() -> bool:
    """Returns whether a launcher has set which process this is.

    A variable without the others may be left over, and is ignored if it fits a single process.
    """
    rank, world_size, local_rank = (os.environ.get(name, "").strip() for name in _PLACE)
    if rank and world_size:
        return True
    is_single = rank in ("", "0") and world_size in ("", "1") and local_rank in ("", "-1", "0")
    return not is_single


def process_place(local_rank: int | None = None, names: tuple[str, str, str] = _PLACE) -> Place:
    """Returns which process this is, according to its launcher.

    Args:
        local_rank: the local rank, if it is not to be read. Otherwise the environment has to have
            it if there are several processes and this machine has several GPUs, because each
            process uses one of its own.
        names: the launcher's variables for rank, world size and local rank.

    Raises:
        ValueError: a variable is missing, or has an impossible value.
    """
    of_rank, of_size, of_local = names
    world_size = launched_number(of_size, least=1)
    rank = launched_number(of_rank, most=world_size - 1)
    if local_rank is None:
        local_rank = _launched_local_rank(of_local, world_size)
    return Place(rank, world_size, local_rank)


def _launched_local_rank(name: str, world_size: int) -> int:
    import torch  # here, because it takes seconds, and this module is imported before all others

    is_said = os.environ.get(name, "").strip() not in ("", "-1")
    if not is_said and (world_size == 1 or torch.cuda.device_count() <= 1):
        return 0
    return launched_number(name)


def launched_address() -> tuple[str, int]:
    """Returns the host and port of the run's first process, which may be on another machine.

    Raises:
        ValueError: a variable is missing, or has an impossible value.
    """
    host = os.environ.get("MASTER_ADDR", "").strip()
    if not host:
        raise _not_launched("MASTER_ADDR")
    return host, launched_number("MASTER_PORT", least=1, most=2**16 - 1)


def launched_number(name: str, least: int = 0, most: int | None = None) -> int:
    """Reads a launcher's variable that has to be an integer from `least` to `most`.

    Raises:
        ValueError: it is missing, not an integer, or out of this range.
    """
    text = os.environ.get(name, "").strip()
    if not text.isdecimal():
        raise _not_launched(name)
    number = int(text)
    if number < least or (most is not None and number > most):
        limit = f"at least {least}" if most is None else f"a number from {least} to {most}"
        raise ValueError(f"{name} is {number} in the environment, but has to be {limit}")
    return number


def _not_launched(name: str) -> ValueError:
    value = os.environ.get(name)
    said = "not set" if value is None else repr(value)
    return ValueError(
        f"{name} is {said} in the environment: start processes with torchrun or "
        "torch.distributed.launch, which set it, or set RANK, WORLD_SIZE, LOCAL_RANK, "
        "MASTER_ADDR and MASTER_PORT; for a single process, unset them"
    )


def rank() -> int:
    """Returns this process's number in the run, for messages; 0 if no launcher has set it."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0
