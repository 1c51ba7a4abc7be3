"""Makes, locks and cleans a run's output folder, and checks that all hosts share it."""

import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from ..errors import TrainingError
from ..io.atomic import check_folder_writable, remove_leftovers
from .distributed import barrier, gather_objects
from .locks import sole_use
from .process import error_in_words

logger = logging.getLogger(__name__)

_PROBE = ".shared"  # the prefix of a file's name that all processes have to see
_LATE = 10.0  # seconds by which a network file system may show a file too late


@contextmanager
def output_folder(
    folder: str | os.PathLike, rank: int, world_size: int, folders: Iterable[str] = ()
) -> Iterator[None]:
    """Makes a run's output folder, and keeps other runs out of it within the block.

    All processes of a run have to call it, before any of them looks into the folder. The main one
    takes the lock, and all of them raise an error if it fails. If the folder is new and still empty
    at the end, it is removed.

    Args:
        folder: the same on all processes.
        rank, world_size: this process's number, and how many there are.
        folders: patterns for temporary folders in which the run prepares others. Those left by a
            run that was killed are removed, as are the files that it left half-written.

    Raises:
        OSError: the folder cannot be made or written to.
        TrainingError: another run writes there, or not all processes see the same folder.
    """
    with ExitStack() as stack:
        problem = None
        if rank == 0:
            try:
                _make(Path(folder), stack)
                stack.enter_context(sole_use(folder))
                _clear(Path(folder), folders)
            except (OSError, TrainingError) as error:
                problem = error
        message = gather_objects(problem and error_in_words(problem), world_size)[0]
        if message is not None:
            raise problem or TrainingError(message)
        check_shared(folder, world_size)
        yield


def _make(folder: Path, stack: ExitStack) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file")
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(
                f"{path} is a link to {os.readlink(path)}, which does not exist: make that "
                "folder, or remove the link"
            )
    if not folder.exists():
        folder.mkdir(parents=True)
        stack.callback(_remove_if_empty, folder)
    check_folder_writable(folder)


def _clear(folder: Path, folders: Iterable[str]) -> None:
    remove_leftovers(folder)
    for pattern in folders:
        for path in folder.glob(pattern):
            if path.is_dir():
                remove_folder(path)
    for probe in folder.glob(f"{_PROBE}.{'[0-9a-f]' * 8}"):
        if probe.is_file():
            probe.unlink()


def remove_folder(folder: Path) -> None:
    """Removes a folder that a run no longer needs, or a link to one, or warns.

    It may hold another user's files, or, on a network file system, some that are still open.
    """
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder, error.strerror)


def _remove_if_empty(folder: Path) -> None:
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def check_shared(folder: str | os.PathLike, world_size: int) -> None:
    """Checks that all processes, perhaps on several hosts, see the first one's folder.

    Raises:
        TrainingError: some do not see it.
    """
    if world_size == 1:
        return
    probe = Path(folder, f"{_PROBE}.{gather_objects(secrets.token_hex(4), world_size)[0]}")
    try:
        if dist.get_rank() == 0:
            probe.touch()
        barrier(world_size)
        seen = gather_objects((appears(probe), socket.gethostname()), world_size)
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


def appears(path: Path) -> bool:
    """Returns whether a file is there, or appears in time: network file systems may be late."""
    end = time.monotonic() + _LATE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
