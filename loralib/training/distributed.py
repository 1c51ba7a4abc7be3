"""Joins the processes of a run, also after a restart, and exchanges values between them.

A launcher starts all processes and, when one of them has died, starts all of them again. Each such
start is an attempt. The launcher's agents keep one key-value store for all attempts, and a later
one would read what PyTorch wrote in an earlier one. Every attempt therefore has a prefix of its own
for its keys, on which its processes agree first; see `_agree_on_attempt`. Before that, the first
process removes what PyTorch writes without the prefix.
"""

import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from ..errors import TrainingError
from ..text import first_line
from .launcher_env import launched_address, process_place
from .process import warnings_so_far
from .watch import start_watching

logger = logging.getLogger(__name__)

# By default, a process counts as hanging after this many seconds without a sign of life.
TIMEOUT = 1800.0
# Collectives wait longer, by this factor: unlike them, the watch knows which process is missing.
_COLLECTIVES = 1.5

# Seconds beyond the timeout in which PyTorch may report by itself why there is no connection.
_LATE = 5.0

# The key under which NCCL's watchdog records an error in the store, without the prefixes. A group
# that finds it there ends its processes eight minutes later.
_NCCL_ERROR = "exception_dump"

_SIOCGIFADDR = 0x8915  # Linux: asks for an interface's address


def join(device: torch.device, timeout: float = TIMEOUT) -> None:
    """Joins the other processes of this attempt, and starts to watch them.

    The launcher sets in the environment which process this is, of how many, and where the first one
    is: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Args:
        device: where this process computes; the group uses NCCL on a GPU, and gloo on a CPU.
        timeout: seconds after which joining is given up, and later a process counts as hanging.

    Raises:
        TrainingError: not all processes were there in time.
        ValueError: the environment is incomplete or wrong, or `timeout` is not positive.
    """
    if not 0 < timeout < 1e9:
        raise ValueError(f"the timeout has to be a positive number of seconds, not {timeout:g}")
    place = process_place(local_rank=0)  # any: the device is already chosen
    rank, world_size, address = place.rank, place.world_size, launched_address()
    prefix, store = _attempt_store(address, rank, world_size, timeout)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        _choose_interface(address[0])
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore(f"{prefix}/group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_COLLECTIVES * timeout),
            device_id=device if on_gpu else None,
        )
    except RuntimeError as error:
        raise TrainingError(
            f"the {world_size} processes of the run could not join ({first_line(error)})"
        ) from error
    if world_size > 1:
        # A connection of its own: a request that waits for a key blocks all others of a connection.
        own = PrefixStore(prefix, _connect(address, False, timeout))
        start_watching(own, rank, world_size, timeout)


def barrier(world_size: int) -> None:
    """Waits until all processes have called it."""
    if world_size > 1:
        dist.barrier()


def gather_objects(value: Any, world_size: int) -> list[Any]:
    """Returns every process's `value` (anything that pickles), by rank, on every process."""
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def gather_on_first(value: Any, rank: int, world_size: int) -> list[Any]:
    """Returns every process's `value`, by rank, on the first process, and [] on the others.

    Args:
        value: anything that pickles.
        rank, world_size: this process's number, and how many there are.
    """
    if world_size == 1:
        return [value]
    values = [None] * world_size if rank == 0 else None
    dist.gather_object(value, values)
    return values or []


def share_warnings(rank: int, world_size: int) -> None:
    """Has the main process show the warnings that others have logged, and it has not.

    All processes have to call it, at a point where they meet anyway. See `process.set_up_logging`.
    """
    shares = gather_on_first(warnings_so_far(), rank, world_size)
    known = set(warnings_so_far())
    for number, share in enumerate(shares[1:], start=1):
        for text in share:
            line = f"process {number}: {text}"
            if text not in known and line not in known:
                logger.warning("%s", line)
            known.add(text)  # even if it was shown in an earlier call


def sum_over_processes(value: Tensor, world_size: int) -> Tensor:
    """Returns the sum of every process's `value`, on every process, as a new detached tensor.

    Args:
        value: of the same shape on all processes; with NCCL, on this process's GPU.
        world_size: how many processes there are.
    """
    total = value.detach().clone()
    if world_size > 1:
        dist.all_reduce(total)
    return total


@torch.no_grad()
def share_tensors(tensors: Iterable[Tensor], world_size: int) -> None:
    """Copies the first process's values to all processes, in place.

    Args:
        tensors: of the same shapes on all processes; with NCCL, on this process's GPU.
        world_size: how many processes there are.
    """
    if world_size == 1:
        return
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, 0)
        if whole.data_ptr() != tensor.data_ptr():  # the tensor is not contiguous
            tensor.copy_(whole)


# ------------------------------------------------------------------------------------------------
# Joining
# ------------------------------------------------------------------------------------------------


def _choose_interface(host: str) -> None:
    """Has gloo use the network interface through which `host` is reached.

    By default it takes the interface of this host's own name, which is often the loopback, and no
    other host reaches that. The user's choice (GLOO_SOCKET_IFNAME) is kept.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not sys.platform.startswith("linux"):
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
    except OSError as error:
        logger.warning("no interface found by which %s is reached (%s)", host, first_line(error))


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """Returns an interface's IPv4 address; None if it has none."""
    import fcntl

    request = struct.pack("256s", interface.encode())
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def _attempt_store(
    address: tuple[str, int], rank: int, world_size: int, timeout: float
) -> tuple[str, Store]:
    """Returns the prefix of all keys of this attempt, and the store at a host and port."""
    # If the launcher's agent provides no store, the first process does.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _connect(address, not of_agent and rank == 0, timeout)
        if rank == 0:  # no process has a group yet: the others wait for this one's answer
            store.delete_key(_NCCL_ERROR)
        name = _agree_on_attempt(PrefixStore("attempts", store), rank, world_size, timeout)
    except TrainingError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise TrainingError(
            f"the first process of the run, at {address[0]}:{address[1]}, could not be reached "
            f"within {timeout:g} s ({first_line(error)})"
        ) from error
    return name, store


def _connect(address: tuple[str, int], is_server: bool, timeout: float) -> TCPStore:
    """Returns a connection to the store, or the store itself.

    Once a connection is accepted, PyTorch waits forever for the first answer. So this connects in a
    daemon thread, which can be left waiting.
    """
    made: list[TCPStore | Exception] = []

    def make() -> None:
        try:
            made.append(
                TCPStore(
                    *address,
                    is_master=is_server,
                    timeout=timedelta(seconds=timeout),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
            )
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(timeout + _LATE)
    if not made:
        raise TimeoutError(
            "it accepts connections but does not answer: does MASTER_PORT belong to another "
            "program?"
        )
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _agree_on_attempt(store: Store, rank: int, world_size: int, timeout: float) -> str:
    """Returns a unique name for this attempt, the same on all its processes.

    After a host was lost, neither the launcher's count of restarts nor a count in the store is
    correct, or the same on all hosts. So every process but the first writes a hello with a random
    name of its own, and takes the attempt's name from the answer to it. The first process answers
    every hello, including those left by an earlier attempt, until all processes of this attempt
    have confirmed the name.
    """
    own, limit = secrets.token_hex(8), timedelta(seconds=timeout)
    if rank != 0:
        store.set(f"hello/{rank}", own)
        store.wait([f"answer/{own}"], limit)
        name = store.get(f"answer/{own}").decode()
        store.set(f"confirmed/{name}/{rank}", str(world_size))
        return name
    missing, end = set(range(1, world_size)), time.monotonic() + timeout
    while missing:
        if time.monotonic() > end:
            listed = ", ".join(map(str, sorted(missing)))
            raise TrainingError(
                f"of {world_size} processes, {listed} did not join within {timeout:g} s"
            )
        for other in sorted(missing):
            if store.check([f"confirmed/{own}/{other}"]):
                missing.discard(other)
                _check_same_size(other, int(store.get(f"confirmed/{own}/{other}")), world_size)
            elif store.check([f"hello/{other}"]):
                hello = store.get(f"hello/{other}").decode()
                store.set(f"answer/{hello}", own)
        time.sleep(0.01)
    return own


def _check_same_size(other: int, theirs: int, ours: int) -> None:
    if theirs != ours:
        raise TrainingError(
            f"process {other} was started with WORLD_SIZE {theirs}, process 0 with {ours}: give "
            "all processes of a run the same"
        )
