"""Which process of a run this is, as its launcher says it in the environment."""

import os
from dataclasses import dataclass

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Place:
    """One process among those of a run.

    Attributes:
        rank: its number, from 0.
        world_size: how many processes there are.
        local_rank: its number on its machine.
    """

    rank: int
    world_size: int
    local_rank: int


def is_launched() -> bool:
    """Whether a launcher says which process this is.

    One or two variables alone may be left over, and say nothing where they are of a single process.
    """
    rank, world_size, local_rank = (os.environ.get(name, "").strip() for name in _PLACE)
    if rank and world_size:
        return True
    is_single = rank in ("", "0") and world_size in ("", "1") and local_rank in ("", "-1", "0")
    return not is_single


def launched_place(local_rank: int | None = None, names: tuple[str, str, str] = _PLACE) -> Place:
    """Which process this is, as its launcher says.

    Args:
        local_rank: where the environment need not say it. Else it has to, where a machine has
            several GPUs: each process there has one of its own.
        names: what the launcher calls rank, world size and local rank.

    Raises:
        ValueError: a variable is missing, or says nothing that can be.
    """
    of_rank, of_size, of_local = names
    world_size = launched_number(of_size, least=1)
    rank = launched_number(of_rank, most=world_size - 1)
    if local_rank is None:
        local_rank = _launched_local_rank(of_local, world_size)
    return Place(rank, world_size, local_rank)


def _launched_local_rank(name: str, world_size: int) -> int:
    import torch  # here, because it takes seconds, and this module comes before all others

    is_said = os.environ.get(name, "").strip() not in ("", "-1")
    if not is_said and (world_size == 1 or torch.cuda.device_count() <= 1):
        return 0
    return launched_number(name)


def launched_address() -> tuple[str, int]:
    """Host and port at which the first process of the run is reached; raises a ValueError likewise.

    The first process may have another host than this one.
    """
    host = os.environ.get("MASTER_ADDR", "").strip()
    if not host:
        raise _not_launched("MASTER_ADDR")
    return host, launched_number("MASTER_PORT", least=1, most=2**16 - 1)


def launched_number(name: str, least: int = 0, most: int | None = None) -> int:
    """A variable of a launcher's that is a whole number.

    Raises:
        ValueError: it is missing, no number, or out of its range.
    """
    text = os.environ.get(name, "").strip()
    if not (text.isascii() and text.isdecimal()):
        raise _not_launched(name)
    number = int(text)
    if number < least or (most is not None and number > most):
        limit = f"at least {least}" if most is None else f"a number from {least} to {most}"
        raise ValueError(f"{name} is {number} in the environment, and has to be {limit}")
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
    """This process's number among those of the run, for messages; 0 where nobody says it."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0
