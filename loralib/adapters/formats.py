"""Reads and writes the formats that an adapter can have on disk, and tells them apart.

    format    what it is                                            variant, alphas, base, task
    lora      this project's: safetensors, with a `LoraMetadata`    yes
              and a checksum in the metadata
    release   microsoft/LoRA's: a dict of tensors saved by torch;   no; for GPT-2, all but variants,
              for GPT-2 in another dict, under model_state_dict,    if this project wrote it
              its names beginning with "module."
    peft      PEFT's: a folder of adapter_config.json and           variant, alphas, base; more if
              adapter_model.safetensors, see peft.py                this project wrote it
    plain     what `lora_state_dict` gives of any model, saved by   no
              torch

Kinds other than LoRA can have another library's format in place of PEFT's, see `Kind.foreign`.

Whatever the format, an `Adapter` in memory has canonical names: those of this project's models,
which are the release's. Writing is atomic, and torch files are read weights-only. Checksums are
compared if a file has them, as torch's archives and our own safetensors do.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..arguments import as_path
from ..errors import AlphaError, CheckpointError, ModelAsAdapterError, NeedsMergingError
from ..io.hub import is_a_path, resolve_file
from ..io.tensors import (
    check_is_whole,
    index_of,
    read_tensors,
    same_tensor,
    write_tensors,
    write_wrapped_tensors,
)
from ..text import listed, shown
from . import peft, peft_reading, peft_writing
from .adapter import LORA, Adapter, Foreign, Kind, in_words
from .canonical import canonical_names, has_ddp_prefix, names_without_wrappers, uncompiled
from .checksums import read_checked, with_checksum
from .deltas import lora_pairs, slices_in
from .families import backbone_prefixes, enabled_slices, family_of, in_known_backbone
from .metadata import AdapterMetadata, LoraMetadata
from .names import within_layer
from .validation import check_lora, check_names, check_values

FORMATS = ("lora", "release", "peft")

# Metadata that the release's files cannot record, and that changes what the adapter computes.
_NOT_IN_RELEASE = (
    *("variant", "initialization", "rank_pattern", "alpha_pattern"),
    *("embeddings", "slices", "stacks"),
)
# Initializations that make no difference to a trained adapter.
_WITHOUT_EFFECT = ("orthogonal",)

_SUFFIXES = {"lora": (".safetensors",), "release": (".bin", ".pt")}
# The suffixes by which a file's name tells its format.
SUFFIXES = tuple(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
# The names of a model's config and weights files in a Transformers folder.
_CONFIG = "config.json"
_MODEL_FILE = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)")
# Suffixes of files, ours, other programs' or mistyped. A folder or a repository has none of them.
_FILE_SUFFIXES = (
    *SUFFIXES,
    *(".ckpt", ".gguf", ".h5", ".json", ".npz", ".onnx", ".pickle", ".pkl", ".pth", ".safetensor"),
)


# ------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------


def read_adapter(
    source: str | os.PathLike,
    kind: Kind = LORA,
    *,
    lora_alpha: float | None = None,
    cache_dir: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Adapter:
    """Reads an adapter of any format.

    The release's format has no metadata. For a file that a run of this project wrote, it is taken
    from the sidecar, the run's safetensors file next to it, if that holds the same tensors.

    Args:
        source: a file; a folder with an adapter file, such as a checkpoint's folder or one of
            another library; or the name of a repository on the hub.
        kind: the kind of adapter that the file must hold.
        lora_alpha: the alpha that LoRA was trained with, if the file does not record it.
        cache_dir: where files from the hub are kept, as in `resolve_file`.
        revision: branch, tag or commit of a repository on the hub.
        token: an access token for a private repository, or True for the stored one.

    Returns:
        The adapter. Its metadata is None if neither the file nor `lora_alpha` provides it.

    Raises:
        AlphaError: the file records another alpha than `lora_alpha`.
        FullModelError: it holds a full model with LoRA.
        ModelAsAdapterError: it holds a full model without LoRA.
        CheckpointError: there is no such adapter, it is damaged or not an adapter of this kind, or
            its metadata contradicts its tensors.
        OSError: the hub cannot be reached.
    """
    where = {"cache_dir": cache_dir, "revision": revision, "token": token}
    return read_adapter_for((), source, kind, lora_alpha, where)


def read_adapter_for(
    stacks: Iterable[str],
    source: str | os.PathLike,
    kind: Kind,
    lora_alpha: float | None,
    where: Mapping[str, Any],
) -> Adapter:
    """Reads an adapter as `read_adapter` does, for a model whose stacks of matrices are known.

    `stacks` are their names, in the model's order. In PEFT's folders, only that order tells which
    update belongs to which stack.
    """
    path = as_path("the adapter's name", source)
    foreign = _PEFT if kind == LORA else kind.foreign
    if not path.is_file():
        # `path` will not do: it turns "./a" into "a", which may be a repository's name.
        name = os.path.expanduser(source)
        path = _within(name, kind, foreign, where)
    if foreign is None or path.name not in (*foreign.names, *foreign.others):
        adapter = _read_file(path, kind)
    elif foreign is _PEFT:
        adapter = peft_reading.read(path, kind, tuple(stacks))
    else:
        adapter = foreign.read(path, kind)
    if kind == LORA:
        return check_lora(adapter, lora_alpha)
    check_values(adapter)
    return adapter


def _within(source: str, kind: Kind, foreign: Foreign | None, where: Mapping[str, Any]) -> Path:
    """Returns the adapter file in a folder or a repository, which may be another library's.

    Of the two files that a run of this project writes, the one with metadata is taken.
    """
    if not os.path.isdir(source) and not _may_be_on_hub(source):
        raise CheckpointError(f"{source}: no such checkpoint file")
    names = (*kind.files, *(foreign.names if foreign else ()))
    found = {name: path for name in names if (path := resolve_file(source, name, **where))}
    own = [path for name, path in found.items() if name in kind.files]
    theirs = [path for name, path in found.items() if name not in kind.files]
    if foreign and own and theirs:
        raise CheckpointError(
            f"{source}: holds two adapters, {own[0].name} and {foreign.owner}'s {theirs[0].name}; "
            "name one of these files"
        )
    if not own and not theirs:
        others = _files_of_weights(source, kind)
        if kind == LORA and not others and _is_model_without_lora(source):
            raise ModelAsAdapterError(source)
        hint = f"; if you mean {listed(others)}, give that file" if others else ""
        raise CheckpointError(f"{source}: holds no adapter: none of {', '.join(names)}{hint}")
    if foreign and theirs:
        _fetch_first(source, foreign.others, where)
    return (own or theirs)[0]


def _files_of_weights(folder: str, kind: Kind) -> list[str]:
    """Returns a folder's files that may be adapters with unusual names, such as GPT-2's."""
    if not os.path.isdir(folder):
        return []
    paths = [Path(folder, name) for name in os.listdir(folder) if name.endswith(SUFFIXES)]
    return [path.name for path in paths if index_of(path) is None and _seems_to_be(kind, path)]


def _is_model_without_lora(folder: str) -> bool:
    """Returns whether a folder holds a model without LoRA, all of whose weights can be read."""
    if not os.path.isfile(os.path.join(folder, _CONFIG)):
        return False
    paths = [Path(folder, name) for name in os.listdir(folder) if _MODEL_FILE.fullmatch(name)]
    try:
        names = {name for path in paths for name in read_tensors(path)[0]}
    except CheckpointError:
        return False
    return bool(names) and not any(LORA.part in name for name in names)


def _seems_to_be(kind: Kind, path: Path) -> bool:
    """Returns whether a file holds tensors of this kind. An optimizer's state does not."""
    try:
        tensors, _ = read_tensors(path)
    except CheckpointError:
        return False
    return any(kind.holds(name, backbone_prefixes()) for name in tensors)


def _may_be_on_hub(source: str) -> bool:
    """Returns whether this can be a repository's name. A name with a file's suffix cannot."""
    return not is_a_path(source) and Path(source).suffix.lower() not in _FILE_SUFFIXES


def _fetch_first(source: str, names: Iterable[str], where: Mapping[str, Any]) -> None:
    """Downloads the first of these files that a repository has into the cache."""
    for name in names:
        if resolve_file(source, name, **where):
            return


_PEFT = Foreign("PEFT", (peft.CONFIG_NAME,), peft.WEIGHTS_NAMES, peft_reading.read)


def _read_file(path: Path, kind: Kind) -> Adapter:
    check_is_whole(path)
    tensors, fields = read_checked(path, kind)
    if any(uncompiled(name).startswith(peft.PREFIX) for name in tensors):
        raise CheckpointError(
            f"{path}: holds weights of PEFT, but is not called {' or '.join(peft.WEIGHTS_NAMES)}: "
            f"rename it, and put it next to their {peft.CONFIG_NAME}"
        )
    metadata = kind.metadata.from_metadata(fields, path) or _metadata_of_sidecar(
        path, tensors, kind
    )
    # Our own safetensors have the model's own names already.
    if metadata is None or path.suffix != ".safetensors":
        tensors = names_without_wrappers(tensors, str(path))
    tensors = canonical_names(tensors, str(path))
    if not any(kind.holds(name, backbone_prefixes()) for name in tensors):
        is_model_file = _MODEL_FILE.fullmatch(path.name) and path.with_name(_CONFIG).is_file()
        if kind == LORA and is_model_file:
            raise ModelAsAdapterError(str(path))
        raise CheckpointError(
            f"{path}: none of its {len(tensors)} tensors is {kind.name}'s ('{kind.part}'): it "
            "holds another kind of adapter, or a model, which has to be given as the base"
        )
    format = "lora" if path.suffix == ".safetensors" and metadata else "release"
    if format == "release" and not any(in_known_backbone(name) for name in tensors):
        format = "plain"
    return Adapter(tensors, metadata, str(path), kind, format)


def _metadata_of_sidecar(
    path: Path, tensors: Mapping[str, Tensor], kind: Kind
) -> AdapterMetadata | None:
    safe, release = kind.files
    sidecar = path.with_name(safe)
    if path.name != release or not sidecar.is_file():
        return None
    others, metadata = read_checked(sidecar, kind)
    same = others.keys() == tensors.keys() and all(
        same_tensor(others[name], tensor) for name, tensor in tensors.items()
    )
    return kind.metadata.from_metadata(metadata, sidecar) if same else None


# ------------------------------------------------------------------------------------------------
# Writing
# ------------------------------------------------------------------------------------------------


def write_adapter(
    path: str | os.PathLike, adapter: Adapter, format: str | None = None
) -> list[str]:
    """Writes an adapter.

    Args:
        path: a file, ``.safetensors`` for the format lora and ``.bin`` or ``.pt`` for release. Or a
            folder: for these two formats, the file in it then gets the name that runs of this
            project use.
        adapter: the adapter to write.
        format: one of `FORMATS`. By default the file's name decides.

    Returns:
        Remarks that the user should see, one line each: what this format cannot hold, and what
        could not be checked.

    Raises:
        TypeError: `adapter` is something else, such as a model.
        ValueError: there is no such format.
        AlphaError: the format must record an alpha, and the adapter has none.
        NeedsMergingError: the format, or the models that read it, cannot express the adapter.
        CheckpointError: the adapter is not sound, or the name does not fit the format. Nothing is
            written.
    """
    path = as_path("the path to write to", path)
    if not isinstance(adapter, Adapter):
        raise TypeError(
            f"the adapter has to be what lora.read_adapter(path) returns, got {shown(adapter)}; "
            "to write a model's adapter, call save_adapter"
        )
    format = format or format_of_name(path)
    return [*_unchecked(adapter, format), *write_checked_adapter(path, adapter, format)]


def write_checked_adapter(
    path: Path, adapter: Adapter, format: str, model: nn.Module | None = None
) -> list[str]:
    """Writes an adapter as `write_adapter` does, for a model that is known to have such layers.

    So there is no remark on what could not be checked.

    Args:
        path, adapter, format: as in `write_adapter`.
        model: the adapter's model. PEFT's settings record its class, and name the adapted modules
            so that they match no others in it.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format '{format}' (known: {', '.join(FORMATS)})")
    _check_sound(adapter, format)
    if format == "peft":
        return peft_writing.write(path, adapter, model)
    check_suffix(path, format)
    _check_has_layers(adapter, format)
    if not path.suffix:
        path.mkdir(parents=True, exist_ok=True)
        path = path / f"{adapter.kind.file}{_SUFFIXES[format][0]}"
    if format == "release":
        return _write_release(path, adapter)
    assert adapter.metadata is not None  # see `_check_sound`
    write_tensors(path, adapter.tensors, with_checksum(adapter.tensors, adapter.metadata))
    return []


def check_suffix(path: Path, format: str) -> None:
    """Checks that a path's suffix, if it has one, is that of files in the format lora or release.

    Raises:
        CheckpointError: it is not.
    """
    if path.suffix not in ("", *_SUFFIXES[format]):
        names = " or ".join(_SUFFIXES[format])
        raise CheckpointError(
            f"{path}: the name of a file in the format {format} has to end in {names}"
        )


def format_of_name(path: Path) -> str:
    """Returns the format that a file's name implies.

    Raises:
        CheckpointError: the name implies none.
    """
    for format, suffixes in _SUFFIXES.items():
        if path.suffix in suffixes:
            return format
    raise CheckpointError(
        f"{path}: cannot tell the format to write from its name: .safetensors is lora, .bin and "
        ".pt are release"
    )


def format_of_path(path: Path) -> str:
    """Returns the format that a path implies: a file's by its suffix, or PEFT's for a folder.

    Raises:
        CheckpointError: the path has the suffix of a file that is no adapter's.
    """
    if path.suffix in SUFFIXES:
        return format_of_name(path)
    if path.suffix.lower() in _FILE_SUFFIXES:
        raise CheckpointError(
            f"{path}: the name of an adapter file has to end in {' or '.join(SUFFIXES)}, and that "
            "of a folder must not end like a file's"
        )
    return "peft"


def why_not_expressible(adapter: Adapter, format: str) -> str | None:
    """Returns why an adapter would compute something else in a format, or None if it would not."""
    if format == "release":
        return _why_not_in_release(adapter)
    if format == "peft" and isinstance(adapter.metadata, LoraMetadata):
        return peft_writing.why_not_expressible(adapter)
    return None


def _why_not_in_release(adapter: Adapter) -> str | None:
    if has_ddp_prefix(adapter.tensors):
        return "its names begin with 'module.', which readers of this format take for DDP's"
    metadata = adapter.metadata
    for what in _NOT_IN_RELEASE:
        value = getattr(metadata, what, None)
        if isinstance(value, Mapping) and value:
            return f"its metadata has {what}, which this format cannot record"
        if value and value not in _WITHOUT_EFFECT:
            return f"its LoRA is of the {what} {in_words(value)}, which this format cannot record"
    if getattr(metadata, "positions", None):
        return (
            "its LoRA reaches positions (lora_positions), but the release's does not, so it would "
            "compute something else there: use the format lora or peft"
        )
    return None


def _check_sound(adapter: Adapter, format: str) -> None:
    """Checks that the written adapter could be read again."""
    reason = why_not_expressible(adapter, format)
    if reason:
        raise NeedsMergingError(adapter.source, reason)
    if adapter.metadata is not None:
        adapter.metadata.check(adapter.source)
    elif format != "release":
        raise AlphaError(adapter.source)
    if adapter.kind == LORA:
        check_names(adapter)
    check_values(adapter)


def _check_has_layers(adapter: Adapter, format: str) -> None:
    """Checks that this project's models of a registered family can have the adapted layers.

    For the release's format, the release's models must have them as well.
    """
    family = family_of(adapter.tensors)
    if adapter.kind != LORA or family is None:
        return
    of_release = family.release_modules if format == "release" else None
    for module, (A, B) in lora_pairs(adapter.tensors, adapter.source).items():
        slices, usual = slices_in(adapter.metadata, module), enabled_slices(module)
        if len(A) != (sum(slices) or 1) * B.shape[1]:
            models = f"this project's {family.title} and the release's need"
            reason = f"its update of {module} does not have the one block per slice that {models}"
        elif of_release is not None and within_layer(module) not in of_release:
            reason = f"adapts {module}, where the release's {family.title} has no LoRA"
        elif of_release is not None and slices != usual:
            reason = f"adapts other slices of {module} than the release's {family.title}"
        else:
            continue
        raise NeedsMergingError(adapter.source, reason)


def _unchecked(adapter: Adapter, format: str) -> list[str]:
    """Returns a remark on what LoRA's tensors do not show in a model of no registered family."""
    is_known = adapter.kind != LORA or any(in_known_backbone(name) for name in adapter.tensors)
    if is_known or format == "release":
        return []
    remark = (
        "is for a kind of model that is not known here: its modules are assumed to be linear "
        "layers, unless its shapes or its metadata (embeddings, slices) say otherwise"
    )
    if format == "peft":
        remark += "; and a weight that the model uses in several places is adapted in all of them"
    has_kernels = any(LORA.part in name and t.dim() > 2 for name, t in adapter.tensors.items())
    if has_kernels and (adapter.format == "peft") != (format == "peft"):
        remark += (
            "; and its convolutions are assumed to have no groups, dilation or padding_mode, "
            "with which PEFT computes something else"
        )
    return [remark]


def _write_release(path: Path, adapter: Adapter) -> list[str]:
    family = family_of(adapter.tensors)
    if family is None:
        for module, (A, B) in lora_pairs(adapter.tensors, adapter.source).items():
            if len(A) != B.shape[1]:
                raise CheckpointError(
                    f"{adapter.source}: {module} stacks several updates, which the release writes "
                    "differently for each family: register its family (adapters.families)"
                )
    elif family.wrapped_in_release:
        named = {f"module.{name}": tensor for name, tensor in adapter.tensors.items()}
        metadata = adapter.metadata.to_metadata() if adapter.metadata else {}
        write_wrapped_tensors(path, named, metadata)
        return []
    write_tensors(path, adapter.tensors)
    kept = ["rank", "targets", "bias", "positions"]
    if replace(adapter, metadata=None).head == adapter.head:  # its tensors say it
        kept.append("head")
    return _lost(adapter.metadata, kept)


def _lost(metadata: AdapterMetadata | None, kept: Iterable[str]) -> list[str]:
    """Returns what a format that keeps only these fields loses, one line each."""
    if metadata is None:
        return []
    known = {name: value for name, value in asdict(metadata).items() if value is not None}
    return [
        " ".join(f"not in this format: {name} {in_words(value)}".splitlines())
        for name, value in known.items()
        if name not in kept
    ]
