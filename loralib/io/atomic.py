"""Writes files atomically: a reader finds the old content or the new, never a part."""

import errno
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, DiskFullError

if os.name == "posix":
    import fcntl


class NoSpaceError(OSError):
    """A write that failed for lack of space, with the bytes that the file takes at least."""

    def __init__(self, error: OSError, needed: int):
        super().__init__(error.errno, error.strerror)
        self.needed = needed


# The system's error numbers for a full disk and for an exhausted quota.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

# The errors of file systems that cannot sync a folder, such as some network file systems.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOTTY)

# Follows a file's name in the name of its temporary file, which identifies the latter as ours.
_HALF = ".half-"
# The other name is that of the temporary file of safetensors, which it renames to ours.
_HALF_WRITTEN = re.compile(rf"\..+{re.escape(_HALF)}[a-z0-9_]{{8}}(\.\w+)?|\.tmp[a-zA-Z0-9]{{6}}")


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path, whose file replaces `path` when the block ends without an error.

    A regular file is replaced atomically, by a temporary file next to it, and keeps its
    permissions. That file is synced before the rename, so that after a crash `path` holds either
    its old content or its new one. A symbolic link stays, and what it points to is replaced. Pipes,
    devices and open files such as /dev/stdout are written through. When the block raises, `path` is
    untouched and the temporary file is removed.

    Raises:
        DiskFullError: the disk is full.
        OSError: `path` cannot be written, for another reason.
    """
    path = Path(path)
    if _is_written_through(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder, path.name)
            with errors_of(path, temporary):
                yield temporary
            _write_through(path, temporary)
        return
    target = _check_replaceable(path)
    temporary, is_new = _half_of(target, target.suffix), not target.exists()
    try:
        temporary.touch(0o666 if is_new else 0o600, exist_ok=False)
    except OSError as error:
        raise _not_created(path, error) from error
    try:
        mode = (temporary if is_new else target).stat().st_mode & 0o777
        with errors_of(path, temporary):
            yield temporary
            sync_file(temporary)
        # The writer may have replaced the file by its own, as safetensors does. The file systems of
        # many USB sticks and network folders have no permissions, and refuse.
        with suppress(OSError):
            temporary.chmod(mode)
        _take_place(temporary, target, path)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: str | os.PathLike, text: str) -> None:
    """Writes text in UTF-8 as the new content of `path`; raises the errors of `atomic_write`."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _half_of(path: Path, suffix: str = "") -> Path:
    """Returns a new name for the temporary file or folder that is to become `path`."""
    return path.parent / f".{path.name}{_HALF}{os.urandom(4).hex()}{suffix}"


def _take_place(temporary: Path, target: Path, path: Path) -> None:
    try:
        temporary.replace(target)
    except OSError as error:
        if os.name != "nt" or not isinstance(error, PermissionError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        # Windows does not replace a file that is open or mapped. Tensors read from it map it.
        message = f"{path}: is in use, maybe by this process, which has read it; give another name"
        raise PermissionError(message) from error


def check_writable(path: str | os.PathLike) -> None:
    """Checks before long work that `atomic_write` will be allowed to write `path`.

    Raises:
        OSError: it may not.
    """
    path = Path(path)
    if not _is_written_through(path):
        _check_replaceable(path)


def check_apart(outputs: Sequence[str | os.PathLike], inputs: Sequence[str | os.PathLike]) -> None:
    """Checks before anything is written that all outputs differ from each other and from inputs.

    Pipes, devices and open files do not count: writing to one destroys nothing.

    Args:
        outputs: the files to write.
        inputs: the files to read.

    Raises:
        ValueError: an output is the same file as an input or another output.
    """
    for number, output in enumerate(outputs):
        for others, what in ((inputs, "an input"), (outputs[:number], "another output")):
            if any(_are_one_file(Path(output), Path(other)) for other in others):
                raise ValueError(f"{output}: is {what} as well; give another name to write to")


def _are_one_file(path: Path, other: Path) -> bool:
    """Returns whether two paths name the same regular file, which may not exist yet."""
    if _is_written_through(path):
        return False
    if path.exists() and other.exists():
        return path.samefile(other)  # links of both kinds, and names in upper and lower case
    return os.path.realpath(path) == os.path.realpath(other)


def check_folder_writable(folder: str | os.PathLike) -> None:
    """Checks that files can be created in an existing folder.

    Raises:
        PermissionError: they cannot.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder}: no permission to write there; give another folder")


def _is_written_through(path: Path) -> bool:
    """Returns whether `path` is an open file, a pipe or a device: these are not replaced."""
    if _open_file(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _open_file(path: Path) -> int | None:
    """Returns the descriptor of the open file that a path such as /dev/stdout names, if any."""
    folders = ("/dev/fd", "/proc/self/fd", f"/proc/{os.getpid()}/fd")
    name = os.path.abspath(path)
    for _ in range(40):  # as many links as Linux follows
        folder, number = os.path.split(name)
        if folder in folders and number.isdecimal():
            return int(number)
        if not os.path.islink(name):
            break
        name = os.path.normpath(os.path.join(folder, os.readlink(name)))
    return None


def _write_through(path: Path, content: Path) -> None:
    """Copies a file into a pipe, a device or an open file."""
    number = _open_file(path)
    try:
        if number is None:
            file = open(path, "wb")  # noqa: SIM115 - closed below
        else:
            # Writing starts at the open file's own position, after what was printed before.
            sys.stdout.flush()
            file = os.fdopen(os.dup(number), "wb")
        with open(content, "rb") as source, file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _check_replaceable(path: Path) -> Path:
    """Returns the regular file that `path` names directly or through links. It may not exist yet.

    Raises:
        OSError: `path` is a folder or a file that must not be written, or its folder is missing or
            not writable.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    name = f"{path}: is a link to {target}," if path.is_symlink() else f"{path}:"
    if target.is_dir():
        raise IsADirectoryError(f"{name} which is a folder, not a file".replace(": which", ":"))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{name} there is no folder {target.parent}")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(f"{name} is read-only; give another name")
    check_folder_writable(target.parent)
    return target


@contextmanager
def errors_of(path: Path, temporary: Path) -> Iterator[None]:
    """Makes errors of writing `temporary` name `path`, and say how much space was needed.

    If there was not enough, `temporary` is removed.
    """
    try:
        yield
    except DiskFullError as error:
        # Only an error of a file within a temporary folder is changed.
        if temporary not in error.path.parents:
            raise
        written = _size(temporary)  # which is free again once they are removed
        _remove_any(temporary)
        needed = None if error.needed is None else written + error.needed
        raise DiskFullError(path, needed, error.is_quota) from error
    except OSError as error:
        of_others = error.filename not in (None, str(temporary))
        if of_others or error.errno not in (*DISK_FULL, errno.EFBIG, errno.EIO):
            raise
        if error.errno not in DISK_FULL:
            raise OSError(error.errno, error.strerror, str(path)) from error
        written = _size(temporary)
        _remove_any(temporary)
        needed = getattr(error, "needed", written)
        raise DiskFullError(path, needed, error.errno == errno.EDQUOT) from error


def _size(path: Path) -> int:
    """Returns the size of a file in bytes, or the space that a folder's files take on the disk."""
    if path.is_file():
        return path.stat().st_size
    found = [file.stat() for file in path.rglob("*") if file.is_file()]
    # Windows does not say how many blocks of 512 bytes a file takes.
    return sum(max(each.st_size, 512 * getattr(each, "st_blocks", 0)) for each in found)


@contextmanager
def naming_file(path: str | os.PathLike) -> Iterator[None]:
    """Makes the disk's errors in writing an open file, which do not name it, name `path`.

    Raises:
        DiskFullError: the disk is full.
        OSError: of another kind.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        if error.errno in DISK_FULL:
            raise DiskFullError(Path(path), 0, error.errno == errno.EDQUOT) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _not_created(path: Path, error: OSError) -> OSError:
    """Returns the error of creating a temporary file or folder, as one of `path`."""
    if error.errno in DISK_FULL:
        return DiskFullError(path, None, error.errno == errno.EDQUOT)
    return OSError(error.errno, error.strerror, str(path))


def _remove_any(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic_write_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `path` when the block ends without an error.

    Temporary folders that killed calls left more than a minute ago are removed.

    Raises:
        CheckpointError: before or after the block, there is something at `path` other than an empty
            folder.
    """
    path = Path(path)
    if path.is_symlink():
        path = Path(os.path.realpath(path))  # a link to an empty folder stays one
    _check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_half_folders(path)
    temporary = _half_of(path)
    try:
        temporary.mkdir()
    except OSError as error:
        raise _not_created(path, error) from error
    lock = _lock(temporary)
    try:
        with errors_of(path, temporary):
            yield temporary
            for file in temporary.iterdir():
                sync_file(file)
            sync_folder(temporary)
        try:
            temporary.replace(path)
        except OSError as error:
            _check_free(path)  # another process may have written it in the meantime
            raise OSError(error.errno, error.strerror, str(path)) from error
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _check_free(path: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path}: exists already; give the name of a new folder")


def _remove_half_folders(path: Path) -> None:
    """Removes the temporary folders for `path` that `atomic_write_folder` left when killed."""
    name = re.compile(rf"\.{re.escape(path.name + _HALF)}[a-z0-9_]{{8}}")
    for folder in path.parent.glob(".*"):
        if name.fullmatch(folder.name) and _is_old(folder):
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _is_old(folder: Path) -> bool:
    """Returns whether a folder exists and was last changed more than a minute ago.

    A younger one may belong to another process that has created it and not locked it yet.
    """
    try:
        status = folder.stat()
    except OSError:
        return False  # in the meantime it was renamed to its final name, or removed
    return stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > 60


def _lock(folder: Path) -> int | None:
    """Locks a folder until the returned descriptor is closed or the process ends.

    Returns None if another process holds the lock, the folder is gone or another user's, or the
    system has no such locks.
    """
    if os.name != "posix":
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def replacing_folder(path: Path, temporary: Path) -> Iterator[None]:
    """Creates a folder `temporary`, which replaces `path` when the block ends without an error.

    The caller must sync the files in it, as `atomic_write` does. A killed call leaves a folder with
    the name of `temporary`, with its own suffix or with ``.replaced``. The next call with the same
    `temporary` removes it.

    If `path` is a link, the link is replaced, and what it points to stays.

    Args:
        path: the folder to create or replace.
        temporary: the temporary folder, next to `path`.

    Raises:
        DiskFullError: the disk is full.
    """
    _remove_any(temporary)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise _not_created(path, error) from error
    try:
        with errors_of(path, temporary):
            yield
        _replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(complete: Path, path: Path) -> None:
    replaced = complete.with_suffix(".replaced")
    _remove_any(replaced)
    if os.path.lexists(path):  # also a link into nothing
        path.rename(replaced)
    try:
        complete.rename(path)
    except OSError as error:
        if os.path.lexists(replaced):
            replaced.rename(path)  # the old folder stays
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)
    _remove_any(replaced)


def sync_file(path: str | os.PathLike) -> None:
    """Syncs a file, so that its content survives a power cut."""
    with open(path, "rb+") as file:
        _sync(file.fileno())


def _sync(handle: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None) if os.name == "posix" else None
    if full is not None:  # Apple's fsync does not wait for the disk
        try:
            fcntl.fcntl(handle, full)
            return
        except OSError as error:
            if error.errno == errno.EIO:
                raise
    os.fsync(handle)


def remove_leftovers(folder: str | os.PathLike) -> None:
    """Removes the temporary files that `atomic_write` left in a folder when it was killed."""
    for path in Path(folder).glob(".*"):
        if _HALF_WRITTEN.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def sync_folder(folder: str | os.PathLike) -> None:
    """Syncs a folder, so that renames in it survive a power cut, if the system can do that."""
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # a folder in which files may be written but not listed
    try:
        _sync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(handle)
