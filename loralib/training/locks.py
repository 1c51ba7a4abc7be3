"""Locks a folder, because two runs that write into one folder would destroy each other's files.

The lock is the operating system's, on the file ``.lock``, and is released when the process that
holds it ends, in whatever way. Next to it, ``.lock.json`` names the holder, for people and for file
systems without such locks (some network file systems), where it is the only lock.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import TrainingError
from ..io.atomic import atomic_write_text

LOCK_NAME = ".lock"
OWNER_NAME = ".lock.json"
# Seconds for which a killed process's children, such as a DataLoader's, may still hold its lock.
_ORPHANS = 15.0
# The errors of file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


def started(pid: int) -> str:
    """Returns a process's start time in the kernel's ticks, or "" if it cannot be known.

    It distinguishes a process from a later one with the same number.
    """
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


def parent_of(pid: int) -> int | None:
    """Returns the parent process that started another or adopted it; None if unknown."""
    try:
        return int(_stat(pid)[1])
    except OSError:  # not Linux, or no such process
        command = ["ps", "-o", "ppid=", "-p", str(pid)]
    try:
        return int(subprocess.run(command, capture_output=True).stdout)
    except (OSError, ValueError):  # no `ps`, or no such process
        return None


def _stat(pid: int) -> list[str]:
    """Returns the fields of a process's /proc/PID/stat, from its state on."""
    # The command's name, in parentheses, may hold any bytes, such as half of a UTF-8 character.
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return stat.rpartition(b")")[2].decode("ascii").split()


def _command() -> str:
    """Returns this process's command line."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Args:
        pid: its number on its host.
        host: the host's name.
        started: when it was started, which distinguishes it from a later process with this number;
            see `started`.
        since: when it took the lock, in local time.
        command: its command line.
    """

    pid: int
    host: str
    started: str
    since: str
    command: str

    @classmethod
    def this_process(cls) -> "Owner":
        """Returns this process as an owner from now on."""
        pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(pid, socket.gethostname(), started(pid), since, _command())

    @classmethod
    def read(cls, path: Path) -> "Owner | None":
        """Reads what `write` wrote; None if the file is missing or damaged."""
        try:
            owner = cls(**json.loads(path.read_text(encoding="utf-8")))
            return owner if isinstance(owner.pid, int) and owner.pid > 0 else None
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Writes the owner as JSON."""
        atomic_write_text(path, json.dumps(asdict(self)) + "\n")

    @property
    def can_be_checked(self) -> bool:
        """Whether this host can tell if the process is alive."""
        # Asking is sending signal 0, which on Windows is Ctrl-C.
        return self.host == socket.gethostname() and os.name != "nt"

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended."""
        if not self.can_be_checked:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user's process, which exists; /proc may hide when it was started
        return started(self.pid) not in ("", self.started)

    def __str__(self) -> str:
        command = " ".join(self.command.split())
        command = command if len(command) <= 160 else f"{command[:159]}…"
        return f"process {self.pid} on {self.host}, since {self.since}: {command}"


@contextmanager
def sole_use(folder: str | os.PathLike) -> Iterator[None]:
    """Keeps other runs out of a folder within the block.

    Args:
        folder: an existing folder.

    Raises:
        TrainingError: another run holds the folder; the message says which.
    """
    lock, owner_path = FileLock(Path(folder, LOCK_NAME)), Path(folder, OWNER_NAME)
    _acquire(lock, owner_path)
    try:
        Owner.this_process().write(owner_path)
        yield
    finally:
        # On a disk that has become read-only they stay, and count as those of a killed process. The
        # error to report is the block's.
        with suppress(OSError):
            owner_path.unlink(missing_ok=True)
            if os.name == "posix":
                # Before the lock is released, so that a process that has the file open sees that it
                # is unlinked. Windows cannot remove an open file: there, releasing the lock does.
                Path(folder, LOCK_NAME).unlink()
        lock.release()


@contextmanager
def in_turn(path: Path, patience: float) -> Iterator[None]:
    """Lets one process at a time into a block, if the file system has locks.

    Args:
        path: the lock's file, in an existing folder.
        patience: seconds to wait for the others.

    Raises:
        OSError: the others took longer, or the file cannot be created.
    """
    lock = FileLock(path, timeout=patience)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        if not means_no_locks(error):
            raise
    try:
        yield
    finally:
        if os.name == "posix":
            path.unlink(missing_ok=True)  # before the release, as in `sole_use`
        lock.release()


def _acquire(lock: FileLock, owner_path: Path) -> None:
    """Takes the lock; waits for it only if its owner has ended, or is not known yet.

    Raises:
        TrainingError: another process holds it, or after the wait, the children of one that ended.
    """
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
        # The owner has ended, or has not written its name yet.
        time.sleep(0.1)


def means_no_locks(error: Exception) -> bool:
    """Returns whether an error on taking a lock means that the file system has no locks."""
    # Older versions of filelock raise NotImplementedError.
    return getattr(error, "errno", None) in _NO_LOCKS or isinstance(error, NotImplementedError)


def _held(folder: Path, owner: Owner | None) -> TrainingError:
    whose = "unknown" if owner is None else str(owner)
    advice = "wait until it ends, or give another folder"
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ  # by torchrun
    if owner is not None and owner.command == _command() and not is_launched:
        advice += "; to make both one run, start them with torchrun, not with srun or mpirun alone"
    if owner is None or not owner.can_be_checked:
        advice += f"; if it is gone, remove {folder / LOCK_NAME} and {OWNER_NAME}"
    return TrainingError(f"{folder}: another run is writing there ({whose}): {advice}")
