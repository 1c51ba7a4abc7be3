"""Sole use of a folder: two runs that write into one folder would destroy each other's files.

The lock is the operating system's, on the file ``.lock``, which it gives up when the process that
holds it ends, however that is. Next to it, ``.lock.json`` names the holder: for people, and for
file systems without such locks, such as some network file systems, where it is the only lock.
"""

import errno
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import TrainingError
from ..io.atomic import atomic_write

LOCK_NAME = ".lock"
OWNER_NAME = ".lock.json"
# Seconds that the children of a process that was killed, such as a DataLoader's, may outlive it.
_ORPHANS = 15.0
# What file systems without locks answer.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


def started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty where that cannot be known.

    It tells a process from a later one of the same number.
    """
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


def parent_of(pid: int) -> int | None:
    """The process that has started another, or has taken its place; None where nobody knows."""
    try:
        return int(_stat(pid)[1])
    except OSError:  # not Linux, or no such process
        command = ["ps", "-o", "ppid=", "-p", str(pid)]
    try:
        said = subprocess.run(command, capture_output=True, check=True).stdout
        return int(said)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def _stat(pid: int) -> list[str]:
    """What Linux tells of a process, from its state on."""
    # The command's name, in parentheses, may hold anything, as half of a letter of UTF-8.
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return stat.rpartition(b")")[2].decode("ascii").split()


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Args:
        pid: its number on its host.
        host: the host's name.
        started: what tells it from a later process of this number; see `started`.
        since: when it took the lock, local time.
        command: what it was called with.
    """

    pid: int
    host: str
    started: str
    since: str
    command: str

    @classmethod
    def this_process(cls) -> "Owner":
        """This process, from now on."""
        pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
        return cls(pid, socket.gethostname(), started(pid), since, command)

    @classmethod
    def read(cls, path: Path) -> "Owner | None":
        """What `write` wrote; None where there is no such file, or a damaged one."""
        try:
            owner = cls(**json.loads(path.read_text(encoding="utf-8")))
            return owner if isinstance(owner.pid, int) and owner.pid > 0 else None
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Writes it, as JSON."""
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @property
    def can_be_asked_for(self) -> bool:
        """Whether this host's system tells if the process is alive."""
        # On Windows the question, signal 0, is Ctrl-C.
        return self.host == socket.gethostname() and os.name != "nt"

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended."""
        if not self.can_be_asked_for:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user's
        return started(self.pid) != self.started

    def __str__(self) -> str:
        command = " ".join(self.command.split())
        command = command if len(command) <= 160 else f"{command[:159]}…"
        return f"process {self.pid} on {self.host}, since {self.since}: {command}"


@contextmanager
def sole_use(folder: str | os.PathLike) -> Iterator[None]:
    """Keeps other runs out of a folder within the block.

    Args:
        folder: it exists.

    Raises:
        TrainingError: another run holds the folder; the message says which.
    """
    lock, owner_path = FileLock(Path(folder, LOCK_NAME)), Path(folder, OWNER_NAME)
    _acquire(lock, owner_path)
    try:
        Owner.this_process().write(owner_path)
        yield
    finally:
        owner_path.unlink(missing_ok=True)
        if os.name == "posix":
            # Before the lock is released: a process that has it open already sees it unlinked.
            # Windows removes no file that is open; there, releasing the lock does it.
            Path(folder, LOCK_NAME).unlink(missing_ok=True)
        lock.release()


def _acquire(lock: FileLock, owner_path: Path) -> None:
    """Takes the lock; waits for it only where the process that took it has ended."""
    end = time.monotonic() + _ORPHANS
    while True:
        try:
            lock.acquire(timeout=0)
            return
        except Timeout:
            owner = Owner.read(owner_path)
        except (OSError, NotImplementedError) as error:
            if not means_no_locks(error):
                raise
            owner = Owner.read(owner_path)
            if owner is None or owner.is_gone:
                return
        if (owner is not None and not owner.is_gone) or time.monotonic() > end:
            raise _held(owner_path.parent, owner)
        # Its owner has ended, or has not written its name yet.
        time.sleep(0.1)


def means_no_locks(error: Exception) -> bool:
    """Whether an error of taking a lock means that the file system has none."""
    # filelock's older versions raise the second.
    return getattr(error, "errno", None) in _NO_LOCKS or isinstance(error, NotImplementedError)


def _held(folder: Path, owner: Owner | None) -> TrainingError:
    whose = "unknown" if owner is None else str(owner)
    advice = "wait until it ends, or give another folder"
    if owner is None or not owner.can_be_asked_for:
        advice += f"; if it is gone, remove {folder / LOCK_NAME} and {OWNER_NAME}"
    return TrainingError(f"{folder}: another run is writing there ({whose}): {advice}")
