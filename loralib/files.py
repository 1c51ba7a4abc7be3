"""Files of tensors: written whole or not at all, read weights-only.

Torch files and safetensors are told apart by their content.
"""

import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def write_whole(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it onto `path` when the block ends well.

    The file is synced before the rename, so that after a crash `path` holds either its old content
    or its new one. When the block raises, `path` is untouched and the temporary file is removed.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _sync(temporary)
        # mkstemp makes files for their owner alone; give this one the mode any new file gets.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


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
    """Writes `tensors` as safetensors (with `metadata`) or as a torch file, by `path`'s suffix."""
    own = _copies(tensors)
    with write_whole(path) as temporary, _errors_of_the_disk(path):
        if Path(path).suffix == ".safetensors":
            save_file(own, temporary, metadata={"format": "pt", **(metadata or {})})
        else:
            torch.save(own, temporary)


def write_wrapped_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a torch file as the release's GPT-2 scripts do: tensors under ``model_state_dict``.

    The metadata, a second entry beside it, is what safetensors would carry.
    """
    wrapped = {"model_state_dict": _copies(tensors), "metadata": dict(metadata)}
    with write_whole(path) as temporary, _errors_of_the_disk(path):
        torch.save(wrapped, temporary)


@contextmanager
def _errors_of_the_disk(path: str | os.PathLike) -> Iterator[None]:
    """Makes what the libraries raise where a disk is full an OSError, as Python's own are."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise OSError(f"{path}: cannot be written ({first_line(error)})") from error


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


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
