"""The processes of a run: how they find each other, also after a restart, and how a hang ends.

A launcher starts the processes and, after one of them died, starts all of them again: an attempt.
Its agents keep one key-value store over all attempts, in which a later one would read what PyTorch
wrote in an earlier one. So every attempt has a prefix of its own there, on which its
processes agree first; see `_agree_on_attempt`.

A process that dies closes its connections, and the others end at once. One that hangs does not, so
each process tells the store that it is alive and how far it is; see `Watch`.
"""

import json
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore

from ..errors import TrainingError
from ..io.atomic import atomic_write
from .process import end_at_once, rng_state, set_rng_state, started

logger = logging.getLogger(__name__)

# Seconds without a sign of life after which a process counts as hanging, unless a flag says other.
TIMEOUT = 1800.0
# Collectives wait longer than that: whoever watches knows which process is missing, they do not.
_COLLECTIVES = 1.5

_SIOCGIFADDR = 0x8915  # Linux: asks for an interface's address

_watch: "Watch | None" = None  # this process's, while it belongs to a group


def join(timeout: float = TIMEOUT, device: torch.device | None = None) -> None:
    """Joins the other processes of this attempt, and starts to watch them.

    Which process this is, of how many, and where the first one is, the launcher says in the
    environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Args:
        timeout: seconds after which joining is given up, and a process counts as hanging.
        device: this process's GPU, for NCCL; without one, gloo.

    Raises:
        TrainingError: not all processes were there in time.
        ValueError: the environment is incomplete, or `timeout` is not positive.
    """
    if not 0 < timeout < 1e9:
        raise ValueError(f"--ddp_timeout has to be a positive number of seconds, not {timeout:g}")
    number, world_size = (int(_environment(name)) for name in ("RANK", "WORLD_SIZE"))
    address = _environment("MASTER_ADDR"), int(_environment("MASTER_PORT"))
    prefix, store = _attempts_store(address, number, world_size, timeout)
    backend, given = "gloo", dict[str, Any]()
    if device is not None:
        backend, given = "nccl", {"device_id": device}
    else:
        _choose_interface(address[0])
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"{prefix}/group", store),
            rank=number,
            world_size=world_size,
            timeout=timedelta(seconds=_COLLECTIVES * timeout),
            **given,
        )
    except (RuntimeError, TimeoutError) as error:
        raise TrainingError(
            f"the {world_size} processes of the run could not join ({_first(error)})"
        ) from error
    if world_size == 1:
        return
    global _watch
    # A connection of its own: one that waits for a key keeps all others of it waiting. A store can
    # be cloned only from PyTorch 2.8 on.
    own = PrefixStore(prefix, _connect(address, False, timeout))
    _watch = Watch(own, number, world_size, timeout)
    _watch.start()


def beat() -> None:
    """Tells the other processes, if there are any, that this one has come further."""
    if _watch is not None:
        _watch.progress += 1


def stop_watching() -> None:
    """Ends watching the other processes: from here on they may end."""
    if _watch is not None:
        _watch.stopped.set()


def _choose_interface(host: str) -> None:
    """Has gloo talk through the network interface by which `host` is reached.

    By itself it takes that of this host's own name, which is often the loopback's: no other host
    reaches that. A choice of the user's (GLOO_SOCKET_IFNAME) stays.
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
        logger.warning("no interface found by which %s is reached (%s)", host, _first(error))


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """An interface's IPv4 address, if it has one."""
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def _environment(name: str) -> str:
    """What the launcher says: a number or, for MASTER_ADDR, a host."""
    value = os.environ.get(name, "")
    if not value or not (value.isdecimal() or name == "MASTER_ADDR"):
        raise ValueError(
            f"{name} is {value!r} in the environment: start processes with torchrun or "
            "torch.distributed.launch, which set it, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT; for a single one leave --local_rank out"
        )
    return value


def _attempts_store(
    address: tuple[str, int], number: int, world_size: int, timeout: float
) -> tuple[str, Store]:
    """The prefix that all keys of this attempt have, and their store, at a host and port."""
    # Where a launcher's agent has no store for its processes, the first of them has one.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _connect(address, not of_agent and number == 0, timeout)
        name = _agree_on_attempt(PrefixStore("attempts", store), number, world_size, timeout)
    except (RuntimeError, TimeoutError) as error:
        raise TrainingError(
            f"the first process of the run, at {address[0]}:{address[1]}, could not be reached "
            f"within {timeout:g} s ({_first(error)})"
        ) from error
    return name, store


def _connect(address: tuple[str, int], is_server: bool, timeout: float) -> TCPStore:
    return TCPStore(
        *address,
        is_master=is_server,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _agree_on_attempt(store: Store, number: int, world_size: int, timeout: float) -> str:
    """A name for this attempt that no other one has, the same on all its processes.

    Neither the launcher's count of restarts nor a count in the store is the same on all hosts, or
    right, after a host was lost. So every process but the first says hello under a name of its own,
    and takes the attempt's name from the answer to that; the first answers everybody until all of
    this attempt have confirmed: a hello of an earlier attempt is answered as well, in vain.
    """
    own, limit = secrets.token_hex(8), timedelta(seconds=timeout)
    if number != 0:
        store.set(f"hello/{number}", own)
        store.wait([f"answer/{own}"], limit)
        name = store.get(f"answer/{own}").decode()
        store.set(f"confirmed/{name}/{number}", "1")
        return name
    missing, answered, end = set(range(1, world_size)), set(), time.monotonic() + timeout
    while missing:
        for other in sorted(missing):
            if store.check([f"confirmed/{own}/{other}"]):
                missing.discard(other)
            elif store.check([f"hello/{other}"]):
                hello = store.get(f"hello/{other}").decode()
                if hello not in answered:
                    store.set(f"answer/{hello}", own)
                    answered.add(hello)
        if missing and time.monotonic() > end:
            listed = ", ".join(map(str, sorted(missing)))
            raise TrainingError(
                f"of {world_size} processes, {listed} did not join within {timeout:g} s"
            )
        time.sleep(0.01)
    return own


# ------------------------------------------------------------------------------------------------
# Hanging processes
# ------------------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """Tells the others that this process is alive and how far it is, and ends it if one hangs.

    A process hangs that has told nothing for `timeout` seconds (it is stopped, or its host is
    gone); or, if for so long no process has come further, the one that is furthest behind.

    Args:
        store: the attempt's, on a connection of its own.
        number: this process's rank.
        world_size: how many processes there are.
        timeout: in seconds.
        end: what is done with the one line that names the processes that hang; an empty one where
            another process says it.
        clock: tells the time, in seconds.

    Attributes:
        progress: how far this process is, in any unit.
        stopped: ends the thread.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        world_size: int,
        timeout: float,
        end: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name="watch", daemon=True)
        self.store, self.number, self.timeout = store, number, timeout
        self.interval = min(5.0, timeout / 10)
        self.end, self.clock = end or _end_process, clock
        self.progress = self.ticks = 0
        self.stopped = threading.Event()
        now = clock()
        self.seen = {other: ("", now) for other in range(world_size)}  # what it said, and since
        self.reached = {other: (-1, now) for other in range(world_size)}  # likewise, its progress

    def run(self) -> None:
        """Looks at the others until `stopped` is set; for the thread."""
        while not self.stopped.wait(self.interval):
            try:
                self.look()
            except (RuntimeError, TimeoutError) as error:
                if not self.stopped.is_set():
                    self.end(f"the run's first host can no longer be reached ({_first(error)})")
                return

    def look(self) -> None:
        """Says how far this process is, and sees how far the others are."""
        self.ticks += 1
        self.store.set(f"alive/{self.number}", f"{self.ticks} {self.progress}")
        now = self.clock()
        for other in self.seen:
            said = ""
            if self.store.check([f"alive/{other}"]):
                said = self.store.get(f"alive/{other}").decode()
            if said != self.seen[other][0]:
                self.seen[other] = (said, now)
            progress = int(said.split()[1]) if said else -1
            if progress != self.reached[other][0]:
                self.reached[other] = (progress, now)
        hanging = self._hanging(now)
        # One process says it; the others end a moment later, in case that is the one that hangs.
        if hanging:
            speakers = [other for other in self.seen if other not in hanging]
            if self.number in hanging or self.number == min(speakers, default=self.number):
                self.end(self._line(hanging))
            elif not self.stopped.wait(2 * self.interval):
                self.end("")

    def _hanging(self, now: float) -> list[int]:
        silent = [n for n, (_, since) in self.seen.items() if now - since > self.timeout]
        if silent:
            # With those that fell silent about then, as the processes of a lost host do.
            limit = self.timeout - 2 * self.interval
            return [n for n, (_, since) in self.seen.items() if now - since > limit]
        if all(now - since > self.timeout for _, since in self.reached.values()):
            least = min(progress for progress, _ in self.reached.values())
            return [n for n, (progress, _) in self.reached.items() if progress == least]
        return []

    def _line(self, hanging: list[int]) -> str:
        listed = ", ".join(map(str, hanging))
        verb = "hangs" if len(hanging) == 1 else "hang"
        noun = "process" if len(hanging) == 1 else "processes"
        return f"{noun} {listed} of {len(self.seen)} {verb}: nothing for {self.timeout:g} s"


def _end_process(line: str) -> None:
    if line:
        logger.error("%s; the run ends, and resumes from its last checkpoint", line)
    end_at_once(1)


def _first(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


# ------------------------------------------------------------------------------------------------
# Attempts
# ------------------------------------------------------------------------------------------------

_LAUNCH_NAME = ".launch.json"


@dataclass(frozen=True)
class Launch:
    """A run as a launcher sees it: one attempt, or several.

    Args:
        path: the file by which later attempts know an earlier one.
        agents: the launcher's agents, one a host, of this attempt and those before; none without
            a launcher.
        is_restart: whether there was an earlier attempt.
        note: what the first attempt wanted later ones to know.
    """

    path: Path
    agents: tuple[str, ...]
    is_restart: bool
    note: Any

    def begin(self, note: Any = None) -> None:
        """Leaves word for later attempts; for the main process, once all is checked.

        Args:
            note: anything that JSON holds; the first attempt's stays.
        """
        if self.agents:
            note = self.note if self.is_restart else note
            with atomic_write(self.path) as path:
                text = json.dumps({"agents": self.agents, "note": note})
                path.write_text(text, encoding="utf-8")


def find_launch(folder: str | os.PathLike, world_size: int) -> Launch:
    """Finds out whether a launcher has started this run before, in an earlier attempt.

    To be called by all processes, with the folder that the run writes to. An attempt that shares
    an agent with the one that left word there is a later one of the same run: of several hosts, at
    least one was not lost.
    """
    path = Path(folder, _LAUNCH_NAME)
    agents = tuple(agent for agent in gather_objects(_agent(), world_size) if agent)
    # What the first process sees holds for all.
    earlier = gather_objects(_read_launch(path, agents), world_size)[0]
    if earlier is None:
        return Launch(path, agents, False, None)
    all_agents = tuple(dict.fromkeys([*earlier["agents"], *agents]))
    return Launch(path, all_agents, True, earlier["note"])


def check_shared(folder: str | os.PathLike, world_size: int) -> None:
    """Checks that all processes, on several machines maybe, see the first one's folder.

    Raises:
        TrainingError: some do not.
    """
    if world_size == 1:
        return
    probe = Path(folder, f".shared.{gather_objects(secrets.token_hex(4), world_size)[0]}")
    try:
        if dist.get_rank() == 0:
            probe.touch()
        dist.barrier()
        seen = gather_objects((_appears(probe), socket.gethostname()), world_size)
    finally:
        if dist.get_rank() == 0:
            probe.unlink(missing_ok=True)
    blind = [number for number, (sees, _) in enumerate(seen) if not sees]
    if blind:
        hosts = ", ".join(sorted({seen[number][1] for number in blind}))
        raise TrainingError(
            f"{folder}: is not the same folder for process {', '.join(map(str, blind))} (on "
            f"{hosts}) as for the first one: give one that all machines share"
        )


def _appears(path: Path, seconds: float = 10.0) -> bool:
    """Whether a file is there; network file systems may take a while to show it."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _agent() -> str | None:
    """The launcher's agent that started this process, by a name that no other one has; or None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{socket.gethostname()} {os.getppid()} {started(os.getppid())}"


def _read_launch(path: Path, agents: Collection[str]) -> dict[str, Any] | None:
    """What the first attempt of these agents' launch left; None if this is the first."""
    try:
        launch = json.loads(path.read_text(encoding="utf-8"))
        return launch if {*launch["agents"]} & {*agents} else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        logger.warning("%s is damaged: this counts as a new run", path)
        return None


# ------------------------------------------------------------------------------------------------
# Collectives
# ------------------------------------------------------------------------------------------------


def gather_objects(value: Any, world_size: int) -> list[Any]:
    """Every process's `value` (anything that pickles), by rank, on every process."""
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def warm_up_ddp(model: nn.Module, backward: Callable[[], None]) -> None:
    """A backward pass for nothing, after which DDP does not move gradients any more.

    DDP lays them out anew after its first pass, and where they lie decides in which order the
    processes' parts are summed: with three processes or more, it shows in the last bits. A resumed
    run has to add as the one that was not interrupted does.

    Args:
        model: what DDP wraps.
        backward: computes some loss through DDP, and its gradients.
    """
    with _without_a_trace(model):
        backward()


@contextmanager
def _without_a_trace(model: nn.Module) -> Iterator[None]:
    """Puts random generators, buffers and gradients back where they were before the block."""
    state = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        set_rng_state(state)
        for buffer, before in buffers:
            buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
