"""Files of tensors: written atomically, read weights-only.

Torch files and safetensors are told apart by their content.
"""

import io
import json
import os
import pickle
import re
import zipfile
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
    with atomic_write(path) as temporary:
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
    own = OSError(code, os.strerror(code))
    return NoSpaceError(own, f"more than {size:,}") if code in DISK_FULL else own


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
    with atomic_write(path) as temporary:
        with open(temporary, "wb", buffering=0) as file:
            # Given a name, torch would write it into the archive.
            sink = _Sink(file)
            torch.save(value, cast(IO[bytes], sink))
        if sink.error is not None:
            raise (
                sink.error
                if sink.error.errno not in DISK_FULL
                else NoSpaceError(sink.error, f"{sink.size:,}")
            )


class _Sink:
    """A file for torch.save; after an error it writes nothing more, but keeps counting.

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


def index_of(path: str | os.PathLike) -> Path | None:
    """Returns the index beside a file that lists it as a part of a model, if there is one.

    One that lists no other file is that of a model which is whole in this one.
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
    """Checks that a file is not a part of a model alone.

    Raises:
        CheckpointError: it is.
    """
    index = index_of(path)
    if index is not None:
        raise CheckpointError(
            f"{path}: is a part of a model, of which {index.name} lists others; give the folder"
        )


def write_wrapped_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a torch file as the release's GPT-2 scripts do: tensors under ``model_state_dict``.

    The metadata, a second entry, is what safetensors would carry.
    """
    write_torch(path, {"model_state_dict": _copies(tensors), "metadata": dict(metadata)})


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, because a view would take all of the storage that it is part of into the file."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def read_tensors(
    path: str | os.PathLike, verify: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of a safetensors or torch file, on the CPU, and the file's metadata.

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
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path}: damaged or not a checkpoint (it is empty)")
    try:
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
        # A damaged pickle makes torch raise errors of any kind.
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


def _are_named_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) and _is_held(tensor)
        for name, tensor in value.items()
    )


def _where(value: Any) -> str:
    """Which entry of a file has the tensors that the whole of it is not, for an error."""
    entries = value.items() if isinstance(value, Mapping) else ()
    found = next((key for key, entry in entries if _are_named_tensors(entry) and entry), None)
    return "" if found is None else f": these are in its entry {found!r}; save that alone"


def _check_kind(path: Path, is_archive: bool) -> None:
    """Checks that a file begins as torch's do, and ends so: its own errors do not tell that."""
    with open(path, "rb") as file:
        head = file.read(4)
    is_started = head == b"PK\x03\x04"
    if is_started and not is_archive:
        raise ValueError("it is cut off, as after an interrupted download")
    if not is_started and head[:1] != pickle.PROTO:
        raise ValueError("it is neither safetensors nor a torch file")


def verify_archive(path: str | os.PathLike) -> None:
    """Compares a torch archive's checksums, which torch itself does not when it loads one.

    Files of torch's older format, and others that are no archives, have none.

    Raises:
        ValueError: one is wrong.
        zipfile.BadZipFile: the archive is damaged otherwise.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong, or was left out when it was saved")


def _is_held(tensor: Tensor) -> bool:
    """Whether each of a tensor's values is in the file: none is repeated, sparse or absent."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are of one dtype and shape, and equal."""
    return one.dtype == other.dtype and torch.equal(one, other)


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds a value that is not finite, if there is one."""
    names, found = [], []
    for name, tensor in tensors:
        names.append(name)
        found.append(tensor.isfinite().all())
    # All are read at once: on a GPU each would be waited for.
    are_finite = torch.stack(found).tolist() if found else []
    return next((name for name, sound in zip(names, are_finite, strict=True) if not sound), None)


def is_safetensors(path: Path) -> bool:
    """Whether the file starts as safetensors do: eight bytes of header length, then ``{``."""
    with open(path, "rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"
