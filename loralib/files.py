"""Files of tensors: written whole or not at all, read weights-only.

Torch files and safetensors are told apart by their content.
"""

import errno
import io
import json
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not fit.

    The message is one line, even where a name that it quotes is not.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


class DiskFullError(OSError):
    """A file that does not fit on its disk. The message is one line.

    Args:
        path: the file.
        needed: how many bytes it takes, in words.
        is_quota: whether it is the user's quota that is used up, not the disk.
    """

    def __init__(self, path: Path, needed: str, is_quota: bool = False):
        self.path, self.needed, self.is_quota = path, needed, is_quota
        full = "the user's quota is used up" if is_quota else "the disk is full"
        free = shutil.disk_usage(path.parent).free
        super().__init__(
            f"{path}: {full}: the file takes {needed} bytes, the disk has {free:,} free; make room "
            "and start again"
        )


class _NoSpaceError(OSError):
    """A write that failed for want of space, of a file of which more is known: how large it is."""

    def __init__(self, error: OSError, needed: str):
        super().__init__(error.errno, error.strerror)
        self.needed = needed


_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def write_whole(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path, whose file takes the place of `path` when the block ends well.

    A regular file is replaced atomically, by one beside it, and keeps its permissions. The file is
    synced before the rename, so that after a crash `path` holds either its old content or its new
    one. A symbolic link stays, and what it points to is replaced. Pipes, devices and open files
    such as /dev/stdout are written through. When the block raises, `path` is untouched and the
    temporary file is removed.

    Raises:
        DiskFullError: there is no room.
        OSError: `path` cannot be written, for another reason.
    """
    path = Path(path)
    if _open_file(path) is not None or _is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder, path.name)
            with _errors_of(path, temporary):
                yield temporary
            _write_through(path, temporary)
        return
    target = _check_replaceable(path)
    try:
        handle, name = tempfile.mkstemp(
            prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent
        )
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    os.close(handle)
    temporary = Path(name)
    try:
        with _errors_of(path, temporary):
            yield temporary
            _sync(temporary)
        # mkstemp makes files for their owner alone.
        exists = target.exists()
        temporary.chmod(target.stat().st_mode & 0o777 if exists else 0o666 & ~_umask())
        temporary.replace(target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike) -> None:
    """Checks, before something takes long, that `write_whole` may write `path`.

    Raises:
        OSError: it may not.
    """
    path = Path(path)
    if _open_file(path) is None and not _is_stream(path):
        _check_replaceable(path)


def _is_stream(path: Path) -> bool:
    """Whether there is something at `path` that bytes go into and that stays: a pipe, a device."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _open_file(path: Path) -> int | None:
    """The number of the open file of this process that a path such as /dev/stdout stands for."""
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
            # Its own position counts, behind what was printed before.
            sys.stdout.flush()
            file = os.fdopen(os.dup(number), "wb")
        with open(content, "rb") as source, file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _check_replaceable(path: Path) -> Path:
    """The regular file, there or not yet, that `path` names directly or through links.

    Raises:
        OSError: there is a folder, a file that must not be written, or no folder to write in.
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
    return target


@contextmanager
def _errors_of(path: Path, temporary: Path) -> Iterator[None]:
    """Makes the errors of writing `temporary` name `path`, and say what room is missing."""
    try:
        yield
    except DiskFullError as error:
        # Of a file within a temporary folder.
        if temporary not in error.path.parents:
            raise
        _remove_any(temporary)
        raise DiskFullError(path, error.needed, error.is_quota) from error
    except OSError as error:
        of_others = error.filename not in (None, str(temporary))
        if of_others or error.errno not in (*_FULL, errno.EFBIG, errno.EIO):
            raise
        if error.errno not in _FULL:
            raise OSError(error.errno, error.strerror, str(path)) from error
        written = temporary.stat().st_size if temporary.is_file() else 0
        _remove_any(temporary)
        needed = getattr(error, "needed", f"more than {written:,}")
        raise DiskFullError(path, needed, error.errno == errno.EDQUOT) from error


def _remove_any(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def write_whole_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; renames it onto `path` when the block ends well.

    Raises:
        CheckpointError: there is something at `path` already, other than an empty folder.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path}: exists already; give the name of a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with _errors_of(path, temporary):
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            sync_folder(temporary)
        temporary.chmod(0o777 & ~_umask())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def remove_leftovers(folder: str | os.PathLike, name: str) -> None:
    """Removes what `write_whole` leaves of files called `name` (a pattern) when it is killed."""
    for path in Path(folder).glob(f".{name}.*"):
        path.unlink(missing_ok=True)


def sync_folder(folder: str | os.PathLike) -> None:
    """Makes the renames within `folder` survive a power cut, where the system has a way to."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_tensors(
    path: str | os.PathLike,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes `tensors` as safetensors (with `metadata`) or as a torch file, by `path`'s suffix.

    The same tensors and metadata give the same bytes.
    """
    own = _copies(tensors)
    if Path(path).suffix != ".safetensors":
        write_torch(path, own)
        return
    with write_whole(path) as temporary:
        try:
            save_file(own, temporary, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:
            size = sum(tensor.nbytes for tensor in own.values())
            raise _error_of_disk(path, error, size) from error
        _sort_metadata(temporary)


def _error_of_disk(path: str | os.PathLike, error: SafetensorError, size: int) -> OSError:
    """What safetensors reports of the system, as Python does; `size` is that of the tensors."""
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        return OSError(f"{path}: cannot be written ({first_line(error)})")
    code = int(number[1])
    error = OSError(code, os.strerror(code))
    return _NoSpaceError(error, f"more than {size:,}") if code in _FULL else error


def _sort_metadata(path: Path) -> None:
    """Brings the metadata of a safetensors file into the order of its names.

    The library's own order is that of a hash map, which changes from process to process, and it has
    no option for it. The length of the header stays, and with it all that follows.
    """
    with open(path, "rb+") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > length:
            raise OSError(f"{path}: the header of safetensors is not compact JSON")
        file.seek(8)
        file.write(text.ljust(length))


def write_torch(path: str | os.PathLike, value: Any) -> None:
    """Writes a torch file; the same value gives the same bytes, whatever the file is called."""
    with write_whole(path) as temporary:
        with open(temporary, "wb", buffering=0) as file:
            # Given a name, torch would write it into the archive.
            sink = _Sink(file)
            torch.save(value, sink)
        if sink.error is not None:
            raise (
                sink.error
                if sink.error.errno not in _FULL
                else _NoSpaceError(sink.error, f"{sink.size:,}")
            )


class _Sink:
    """A file for torch.save; after an error it writes nothing more, and counts on.

    torch's own error of a full disk says neither that nor how much room is needed.
    """

    def __init__(self, file: io.RawIOBase):
        self.file, self.size = file, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of `data`; returns its bytes."""
        view = memoryview(data).cast("B")
        self.size += view.nbytes
        rest = view
        try:
            while rest and self.error is None:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            self.error = error
        return view.nbytes

    def flush(self) -> None:
        """Does nothing: nothing is held back."""


def write_wrapped_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a torch file as the release's GPT-2 scripts do: tensors under ``model_state_dict``.

    The metadata, a second entry beside it, is what safetensors would carry.
    """
    write_torch(path, {"model_state_dict": _copies(tensors), "metadata": dict(metadata)})


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, because a view would take the whole storage that it looks at into the file."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def read_tensors(
    path: str | os.PathLike, verify: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors or torch file, on the CPU, and the file's metadata.

    The tensors are mapped from the file, not copied: memory is taken as they are touched. Those of
    a torch file may be wrapped, as `write_wrapped_tensors` does it.

    Args:
        path: the file.
        verify: compare the checksums of a torch archive, which reads all of it.

    Raises:
        CheckpointError: the file is missing, damaged, or holds something else than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file")
    try:
        if is_safetensors(path):
            with safe_open(path, framework="pt", device="cpu") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        # Only torch's zip format can be mapped; the older one is a plain pickle.
        is_archive = zipfile.is_zipfile(path)
        if verify and is_archive:
            _verify_archive(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: damaged, or holds more than tensors, which is not loaded for safety"
        ) from error
    except Exception as error:
        # A damaged pickle makes torch raise errors of any kind.
        message = f"{path}: damaged or not a checkpoint ({first_line(error)})"
        raise CheckpointError(message) from error
    metadata = {}
    if isinstance(tensors, Mapping) and isinstance(tensors.get("model_state_dict"), Mapping):
        metadata = tensors.get("metadata", {})
        tensors = tensors["model_state_dict"]
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and _is_held(tensor)
        for name, tensor in tensors.items()
    ):
        raise CheckpointError(f"{path}: holds something else than named tensors")
    if not isinstance(metadata, Mapping):
        raise CheckpointError(f"{path}: its metadata is damaged (not a mapping)")
    return dict(tensors), dict(metadata)


def _verify_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong")


def _is_held(tensor: Tensor) -> bool:
    """Whether each of a tensor's values is in the file: none is repeated, sparse or absent."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one dtype and shape, and equal."""
    return one.dtype == other.dtype and torch.equal(one, other)


def is_safetensors(path: Path) -> bool:
    """Whether the file starts as safetensors do: eight bytes of header length, then ``{``."""
    with open(path, "rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def check_like(value: Any, example: Any, name: str = "it") -> None:
    """Checks that `value`, which was read from a file, is built as `example` is.

    Mappings have at least the same keys, sequences the same length (an empty one stands for any),
    tensors dtype and shape, other values the type; a float may be a whole number, and where the
    example is None, anything goes.

    Args:
        value, example: what to compare.
        name: of the value, for the message.

    Raises:
        ValueError: it is not; the message says where.
    """
    if isinstance(example, Mapping):
        _check_type(value, Mapping, name)
        for key, part in example.items():
            if key not in value:
                raise ValueError(f"{name} has no '{key}'")
            check_like(value[key], part, f"'{key}'")
    elif isinstance(example, Tensor):
        _check_type(value, Tensor, name)
        found, wanted = ((tensor.dtype, tuple(tensor.shape)) for tensor in (value, example))
        if found != wanted:
            raise ValueError(f"{name} is a tensor of {found}, not {wanted}")
    elif isinstance(example, list | tuple):
        _check_type(value, list | tuple, name)
        if example and len(value) != len(example):
            raise ValueError(f"{name} has {len(value)} entries, not {len(example)}")
        for part, like in zip(value, example, strict=False):
            check_like(part, like, f"an entry of {name}")
    elif example is not None:
        _check_type(value, float | int if isinstance(example, float) else type(example), name)


def _check_type(value: Any, kind: Any, name: str) -> None:
    # Python counts True among the numbers.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = getattr(kind, "__name__", str(kind))
        raise ValueError(f"{name} is of the type {type(value).__name__}, not {wanted}")


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
