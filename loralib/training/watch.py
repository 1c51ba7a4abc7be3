"""Ends a run when one of its processes hangs.

A process that dies closes its connections, and the others end at once: if they communicate by
gloo, by themselves; by NCCL on one machine, when the launcher ends them. One that hangs does not,
so each process writes to the run's key-value store that it is alive and how much progress it has
made.
"""

import logging
import threading
import time
from collections.abc import Callable

from torch.distributed import Store

from ..text import first_line
from .process import end_at_once

logger = logging.getLogger(__name__)


class Watch(threading.Thread):
    """A thread that reports this process's progress to the others, and ends it if one hangs.

    A process counts as hanging if it has written nothing for `timeout` seconds (it is stopped, or
    its host is gone). If no process has made progress for that long, those that are furthest behind
    count as hanging.

    Args:
        store: the attempt's store, on a connection of its own.
        rank: this process's number.
        world_size: how many processes there are.
        timeout: in seconds.
        end: ends this process; called with a line that names the processes that hang, or with an
            empty string if another process reports it.
        clock: returns the time in seconds.

    Attributes:
        progress: how far this process is, in any unit.
        stopped: an event that ends the thread when it is set.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: float,
        end: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name="watch", daemon=True)
        self.store, self.rank, self.timeout = store, rank, timeout
        self.interval = min(5.0, timeout / 10)
        self.end, self.clock = end or _end_process, clock
        self.progress = self.ticks = 0
        self.stopped = threading.Event()
        now = clock()
        # For each process, what it wrote last and since when; its last progress and since when.
        self.seen = dict.fromkeys(range(world_size), ("", now))
        self.reached = dict.fromkeys(range(world_size), (-1, now))

    def run(self) -> None:
        """Watches the others until `stopped` is set; called by the thread."""
        while not self.stopped.wait(self.interval):
            try:
                self.look()
            except RuntimeError as error:
                if not self.stopped.is_set():
                    # The store is on the first host; without a launcher, in the first process.
                    self.end(
                        f"the run's first host can no longer be reached ({first_line(error)}); if "
                        "its process ended with an error, see its message"
                    )
                return

    def look(self) -> None:
        """Writes this process's progress, reads that of the others, and ends if one hangs."""
        self.ticks += 1
        self.store.set(f"alive/{self.rank}", f"{self.ticks} {self.progress}")
        now = self.clock()
        for other in self.seen:
            self._read(other, now)
        hanging = self._hanging(now)
        # The first process that does not hang, if there is one, reports it. The others end without
        # a message, a moment later, in case that one hangs after all.
        if hanging:
            speakers = [other for other in self.seen if other not in hanging]
            if self.rank == min(speakers or self.seen):
                self.end(self._line(hanging))
            elif not self.stopped.wait(2 * self.interval):
                self.end("")

    def _read(self, other: int, now: float) -> None:
        wrote = ""
        if self.store.check([f"alive/{other}"]):
            wrote = self.store.get(f"alive/{other}").decode()
        if wrote != self.seen[other][0]:
            self.seen[other] = (wrote, now)
        progress = int(wrote.split()[1]) if wrote else -1
        if progress != self.reached[other][0]:
            self.reached[other] = (progress, now)

    def _hanging(self, now: float) -> list[int]:
        silent = [n for n, (_, since) in self.seen.items() if now - since > self.timeout]
        if silent:
            # Include all that fell silent at about that time, as processes of a lost host do.
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


_watch: Watch | None = None  # this process's watch, once it has joined others


def start_watching(store: Store, rank: int, world_size: int, timeout: float) -> None:
    """Starts to watch the other processes; for arguments see `Watch`."""
    global _watch
    _watch = Watch(store, rank, world_size, timeout)
    _watch.start()


def beat() -> None:
    """Tells the other processes, if there are any, that this one has made progress."""
    if _watch is not None:
        _watch.progress += 1


def stop_watching() -> None:
    """Stops watching the other processes, which from here on may end."""
    if _watch is not None:
        _watch.stopped.set()
