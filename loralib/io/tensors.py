"""Reads and writes files of tensors: writing is atomic, reading is weights-only.

Torch files and safetensors are told apart by their content.
"""

import io
import json
import os
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError
from ..text import first_line
from .atomic import DISK_FULL, NoSpaceError, atomic_write

# The beginning of the texts that Git LFS puts in place of large files.
_OF_GIT_LFS = b"version https://git-lfs.github.com/spec/"


def write_tensors(
    path: str | os.PathLike,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes `tensors` as safetensors (with `metadata`) or as a torch file, by `path`'s suffix.

    The same tensors and metadata give the same bytes.
    """
    own = _with_own_storage(tensors)
    if Path(path).suffix != ".safetensors":
        write_torch(path, own)
        return
    with atomic_write(path) as temporary:
        try:
            save_file(own, temporary, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:
            size = sum(tensor.nbytes for tensor in own.values())
            raise _error_of_disk(path, error, size) from error
        _sort_metadata(temporary)


def write_wrapped_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a torch file as the release's GPT-2 scripts do: tensors under ``model_state_dict``.

    The metadata, which a safetensors file would have in its header, are a second entry.
    """
    write_torch(path, {"model_state_dict": _with_own_storage(tensors), "metadata": {**metadata}})


def write_torch(path: str | os.PathLike, value: Any) -> None:
    """Writes a torch file. The same value gives the same bytes, whatever the file's name."""
    with atomic_write(path) as temporary:
        with open(temporary, "wb", buffering=0) as file:
            # torch gets no name, because it would write that into the archive.
            sink = _Sink(file)
            try:
                torch.save(value, cast(IO[bytes], sink))
            except RuntimeError as error:
                # Ctrl-C within a write: torch then ends its archive, which fails.
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise error.__context__ from None
                raise
        if sink.error is not None:
            is_full = sink.error.errno in DISK_FULL
            raise NoSpaceError(sink.error, sink.size) if is_full else sink.error


def _with_own_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors on the CPU, those copied that have no storage of their own.

    A view would be saved with all of its storage, and a shared one not as several tensors.
    """
    on_cpu = {
        name: tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        for name, tensor in tensors.items()
    }
    storages = {name: tensor.untyped_storage() for name, tensor in on_cpu.items()}
    users = Counter(storage.data_ptr() for storage in storages.values())
    is_own = {
        name: storages[name].nbytes() == tensor.nbytes and users[storages[name].data_ptr()] == 1
        for name, tensor in on_cpu.items()
    }
    return {name: tensor if is_own[name] else tensor.clone() for name, tensor in on_cpu.items()}


def _error_of_disk(path: str | os.PathLike, error: SafetensorError, size: int) -> OSError:
    """Converts a safetensors error to an OSError. `size` is the tensors' size in bytes."""
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        return OSError(f"{path}: cannot be written ({first_line(error)})")
    code = int(number[1])
    own = OSError(code, os.strerror(code))
    return NoSpaceError(own, size) if code in DISK_FULL else own


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file by name.

    The library writes them in the order of a hash map, which differs between processes, and has no
    option for it. The header keeps its length, so that everything after it stays in place.
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


class _Sink:
    """A file for torch.save. After an error it writes nothing more, but keeps counting bytes.

    If the disk is full, torch's own error says neither that nor how much space is needed.
    """

    def __init__(self, file: io.RawIOBase):
        self.file, self.size = file, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of `data`, and returns its size in bytes."""
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
        """Does nothing, as nothing is buffered."""


def read_tensors(
    path: str | os.PathLike, verify: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of a safetensors or torch file, on the CPU, and the file's metadata.

    The tensors are mapped from the file, not copied: they take memory when they are used. Those of
    a torch file may be wrapped in a dict, as `write_wrapped_tensors` writes them.

    Args:
        path: the file.
        verify: compare the checksums of a torch archive, which reads all of it.

    Raises:
        CheckpointError: the file is missing, damaged, or holds anything other than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path}: damaged or not a checkpoint (it is empty)")
    try:
        _check_content_is_there(path)
        if is_safetensors(path):
            with safe_open(path, framework="pt", device="cpu") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        # Only torch's zip format can be mapped; the older one is a plain pickle.
        is_archive = zipfile.is_zipfile(path)
        _check_kind(path, is_archive)
        if verify:
            verify_archive(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: damaged, or holds more than tensors, which is not loaded for safety"
        ) from error
    except PermissionError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:
        # For a damaged pickle, torch may raise any exception.
        message = f"{path}: damaged or not a checkpoint ({first_line(error)})"
        raise CheckpointError(message) from error
    metadata = {}
    if isinstance(tensors, Mapping) and isinstance(tensors.get("model_state_dict"), Mapping):
        metadata = tensors.get("metadata", {})
        tensors = tensors["model_state_dict"]
    if not _are_named_tensors(tensors):
        raise CheckpointError(f"{path}: holds something other than named tensors{_where(tensors)}")
    if not isinstance(metadata, Mapping):
        raise CheckpointError(f"{path}: its metadata is damaged (not a mapping)")
    return dict(tensors), dict(metadata)


def is_safetensors(path: Path) -> bool:
    """Returns whether a file is safetensors: by its suffix, or by ``{`` after 8 bytes of length."""
    with open(path, "rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def _are_named_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) and _is_held(tensor)
        for name, tensor in value.items()
    )


def _where(value: Any) -> str:
    """Returns text for an error that names the entry of a file that does hold tensors, if any."""
    entries = value.items() if isinstance(value, Mapping) else ()
    found = next((key for key, entry in entries if _are_named_tensors(entry) and entry), None)
    return "" if found is None else f": these are in its entry {found!r}; save that alone"


def _check_content_is_there(path: Path) -> None:
    """Checks that a file is not the text that Git LFS puts in place of its content."""
    with open(path, "rb") as file:
        if file.read(len(_OF_GIT_LFS)) == _OF_GIT_LFS:
            raise ValueError("it is Git LFS's pointer to a file: git lfs pull fetches the file")


def _check_kind(path: Path, is_archive: bool) -> None:
    """Checks that a file begins and ends as torch files do, as torch's errors do not say this."""
    with open(path, "rb") as file:
        head = file.read(4)
    is_started = head == b"PK\x03\x04"
    if is_started and not is_archive:
        raise ValueError("it is cut off, as after an interrupted download")
    if not is_started and head[:1] != pickle.PROTO:
        raise ValueError("it is neither safetensors nor a torch file")


def verify_archive(path: str | os.PathLike) -> None:
    """Compares a torch archive's checksums, which torch itself does not do when it loads one.

    Files that are no archives, such as those of torch's older format, have no checksums.

    Raises:
        ValueError: a checksum is wrong.
        zipfile.BadZipFile: the archive is damaged in another way.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong, or was left out when it was saved")


def _is_held(tensor: Tensor) -> bool:
    """Returns whether each of a tensor's values is in the file: none repeated, sparse or absent.

    Of a sharded tensor (`DTensor`), the file may have only the values that one process had.
    """
    is_part = hasattr(tensor, "full_tensor")
    if is_part or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.numel() == 0 or not _has_repeated_values(tensor)


def _has_repeated_values(tensor: Tensor) -> bool:
    """Returns whether values share memory, as after `expand` or where a stride is damaged."""
    reach = 0  # from the first value of the dimensions so far to their last
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def index_of(path: str | os.PathLike) -> Path | None:
    """Returns the index next to a file that lists it as one shard of a model, if there is one.

    An index that lists no other file does not count: the model is complete in this file.
    """
    path = Path(path)
    for index in sorted(path.parent.glob("*.index.json")):
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if path.name in shards and any(shard != path.name for shard in shards):
            return index
    return None


def check_is_whole(path: str | os.PathLike) -> None:
    """Checks that a file is not one of several shards of a model.

    Raises:
        CheckpointError: it is.
    """
    index = index_of(path)
    if index is not None:
        raise CheckpointError(
            f"{path}: is one shard of a model (see {index.name}); give the folder"
        )


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and values."""
    return one.dtype == other.dtype and torch.equal(one, other)


def same_when_rounded(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are equal in the dtype of one of them."""
    one = one.to(other.device)
    return any(torch.equal(one.to(dtype), other.to(dtype)) for dtype in (one.dtype, other.dtype))


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor that has a value that is not finite, if any."""
    names, found = [], []
    for name, tensor in tensors:
        names.append(name)
        found.append(tensor.isfinite().all())
    # All results are read at once, because on a GPU each read would synchronize.
    are_finite = torch.stack(found).tolist() if found else []
    return next((name for name, sound in zip(names, are_finite, strict=True) if not sound), None)
