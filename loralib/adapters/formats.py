"""The formats that an adapter has on disk: which one a file is, reading it, writing another.

    format      what it is                                            alpha, base, task, labels
    lora      this project's: safetensors, with an `LoraMetadata`    yes
              and a checksum in the metadata
    release   microsoft/LoRA's: a dict of tensors saved by torch;   no; for GPT-2, if this project
              for GPT-2 in another dict, under model_state_dict,    wrote the file
              its names beginning with "module."
    peft      PEFT's: a folder of adapter_config.json and           alpha and base; task and
              adapter_model.safetensors, see peft.py                labels if this project wrote it
    plain     what `lora_state_dict` gives of any model, saved by   no
              torch
    hub       AdapterHub's bottleneck adapters: a folder of         no
              pytorch_adapter.bin and pytorch_model_head.bin; is
              read only

Whatever the format, an `Adapter` in memory has the tensor names of this project's models, which are
the release's. Files are written whole or not at all, torch files are read weights-only, and
checksums are compared where a file has them: torch's archives and our own safetensors do.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..io.hub import resolve_file
from ..io.tensors import (
    is_safetensors,
    read_tensors,
    same_tensor,
    write_tensors,
    write_wrapped_tensors,
)
from . import peft
from .adapter import (
    BACKBONE_PREFIXES,
    BOTTLENECK,
    KINDS,
    LORA,
    Adapter,
    Kind,
    base_biases,
    lora_metadata,
    plain,
)
from .checks import alpha_is_missing, check_finite
from .deltas import lora_pairs, rank_of
from .metadata import AdapterMetadata, is_alpha

FORMATS = ("lora", "release", "peft")


# Names in the release's first DeBERTa files -> names in its layers.
_OLD_NAMES = {
    f".{part}_lora_{ab.lower()}.weight": f".{part}_proj.lora_{ab}"
    for part in ("query", "value")
    for ab in "AB"
}
# GPT-2's head is its token embedding: what a whole checkpoint holds of it is no head of a task.
_TIED_HEADS = ("lm_head.weight", "lm_head.decoder.weight")
_GPT2 = "transformer.h."
# AdapterHub's adapter and its head, the names in them, and what this project's models call these.
_HUB_WEIGHTS, _HUB_HEAD = "pytorch_adapter.bin", "pytorch_model_head.bin"
_HUB_NAME = re.compile(
    r"(?P<layer>.+)\.adapters\.((?P<task>[^.]+)\.)?(?P<part>adapter_down\.0|adapter_up)"
    r"\.(?P<end>weight|bias)"
)
_HUB_HEAD_NAME = re.compile(r"heads\.(?P<task>[^.]+)\.(?P<part>1|4)\.(?P<end>weight|bias)")
_HUB_PARTS = {
    "adapter_down.0": "adapter.adapter_A",
    "adapter_up": "adapter.adapter_B",
    "1": "classifier.dense",
    "4": "classifier.out_proj",
}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SUFFIXES = {"lora": (".safetensors",), "release": (".bin", ".pt")}


class WholeModelError(CheckpointError):
    """A checkpoint that holds a whole model where an adapter alone is asked for."""


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

    The release's format says nothing of itself; where this project wrote it, the safetensors beside
    it hold the same tensors, and the info is taken from there.

    Args:
        source: a file; a folder with one, such as a checkpoint's, PEFT's or AdapterHub's; or the
            name of a repository on the hub.
        kind: what the file has to hold.
        lora_alpha: the alpha that LoRA was trained with, where the file does not say it.
        cache_dir, revision, token: for the hub, as in `resolve_file`.

    Returns:
        The adapter. Its info is None where neither the file nor `lora_alpha` say enough.

    Raises:
        CheckpointError: there is no such adapter, it is damaged, no adapter of this kind, or it
            says something else than `lora_alpha` or than its own tensors.
        OSError: the hub cannot be reached.
    """
    path = Path(source)
    if not path.is_file():
        where = {"cache_dir": cache_dir, "revision": revision, "token": token}
        path = _within(os.fspath(source), kind, where)
    if path.name in (peft.CONFIG_NAME, *peft.WEIGHTS_NAMES):
        adapter = _read_peft(path)
    elif path.name in (_HUB_WEIGHTS, _HUB_HEAD) and kind is BOTTLENECK:
        adapter = _read_adapterhub(path)
    else:
        adapter = _read_file(path, kind)
    if kind is LORA:
        return check_lora(adapter, lora_alpha)
    _check_values(adapter)
    return adapter


def check_lora(adapter: Adapter, lora_alpha: float | None = None) -> Adapter:
    """A LoRA adapter with its alpha, after the checks that `read_adapter` makes.

    Args:
        adapter: as it was read.
        lora_alpha: as for `read_adapter`.

    Raises:
        WholeModelError: its tensors are those of a whole model.
        CheckpointError: it is damaged, or says something else.
    """
    adapter = _with_alpha(adapter, lora_alpha)
    _check_lora(adapter)
    _check_values(adapter)
    return adapter


def _within(source: str, kind: Kind, where: Mapping[str, object]) -> Path:
    """The adapter file within a folder or a repository; PEFT's config where it is one of PEFT's.

    For bottleneck adapters the folder can be one of AdapterHub's.

    Of the two files that a run of this project writes, the one with metadata is taken.
    """
    if not os.path.isdir(source) and not _may_be_on_hub(source):
        raise CheckpointError(f"{source}: no such checkpoint file")
    foreign = {LORA: ("PEFT", peft.CONFIG_NAME), BOTTLENECK: ("AdapterHub", _HUB_WEIGHTS)}
    owner, foreign_name = foreign.get(kind, (None, None))
    names = (*kind.files, foreign_name) if owner else kind.files
    found = {name: resolve_file(source, name, **where) for name in names}
    own = [path for name in kind.files if (path := found[name])]
    theirs = found.get(foreign_name)
    if own and theirs:
        raise CheckpointError(
            f"{source}: holds two adapters, {own[0].name} and {owner}'s {theirs.name}; name one "
            "of these files"
        )
    if theirs and not os.path.isdir(source):
        _fetch_first(source, peft.WEIGHTS_NAMES if kind is LORA else (_HUB_HEAD,), where)
    if not own and not theirs:
        raise CheckpointError(f"{source}: holds no adapter: none of {', '.join(names)}")
    return own[0] if own else theirs


def _may_be_on_hub(source: str) -> bool:
    """Whether this can be a repository's name: not one that ends as a file does."""
    is_path = source.startswith((".", "~", os.sep)) or source.count("/") > 1
    return not is_path and Path(source).suffix not in (".bin", ".pt", ".safetensors", ".json")


def _fetch_first(source: str, names: Iterable[str], where: Mapping[str, object]) -> None:
    """Brings the first of these files that a repository has to the cache."""
    for name in names:
        if resolve_file(source, name, **where):
            return


def _read_peft(path: Path) -> Adapter:
    weights = peft.weights_of(path)
    tensors, metadata = _read_checked(weights)
    tensors = canonical_names(peft.canonical_names(tensors, str(weights)), str(weights))
    adapter = peft.read(path.with_name(peft.CONFIG_NAME), tensors, weights)
    known = LORA.metadata.from_metadata(metadata, weights)
    return adapter if known is None else peft.with_known(adapter, known)


def _read_adapterhub(path: Path) -> Adapter:
    """A bottleneck adapter and its head, from the folder that AdapterHub has written them to.

    Source: the release's ``--adapter_path``, which takes such a folder.
    """
    found: list[tuple[str, str | None, Tensor]] = []
    for name, pattern in ((_HUB_WEIGHTS, _HUB_NAME), (_HUB_HEAD, _HUB_HEAD_NAME)):
        file = path.with_name(name)
        if not file.is_file():
            raise CheckpointError(
                f"{path.parent}: {name} is missing; an adapter of AdapterHub's is {_HUB_WEIGHTS} "
                f"and {_HUB_HEAD}"
            )
        for theirs, tensor in _read_checked(file)[0].items():
            found.append((*_name_of_adapterhub(theirs, pattern, file), tensor))
    tasks = sorted({task for _, task, _ in found if task})
    if len(tasks) > 1:
        raise CheckpointError(
            f"{path.parent}: holds adapters or heads of several tasks, {', '.join(tasks)}; give a "
            "folder with one"
        )
    tensors: dict[str, Tensor] = {}
    for own, _, tensor in found:
        if own in tensors:
            raise CheckpointError(f"{path.parent}: holds {own} under two names")
        tensors[own] = tensor
    return Adapter(tensors, None, str(path.parent), BOTTLENECK, "hub")


def _name_of_adapterhub(name: str, pattern: re.Pattern[str], file: Path) -> tuple[str, str | None]:
    """The name that this project's models have for one of AdapterHub's tensors, and its task."""
    if match := pattern.fullmatch(name):
        layer = f"{match['layer']}." if "layer" in pattern.groupindex else ""
        return f"{layer}{_HUB_PARTS[match['part']]}.{match['end']}", match["task"]
    # A head that belongs to the model's class has the class's canonical names.
    if pattern is _HUB_HEAD_NAME and not name.startswith(("heads.", *BACKBONE_PREFIXES)):
        return name, None
    what = "the head" if pattern is _HUB_HEAD_NAME else "bottleneck adapters"
    raise CheckpointError(f"{file}: holds {name}, which is not a tensor of {what} known here")


def _read_file(path: Path, kind: Kind) -> Adapter:
    tensors, metadata = _read_checked(path)
    if any(name.startswith(peft.PREFIX) for name in tensors):
        raise CheckpointError(
            f"{path}: holds weights of PEFT under another name than {peft.WEIGHTS_NAMES[0]}, which "
            f"belongs beside their {peft.CONFIG_NAME}"
        )
    info = kind.metadata.from_metadata(metadata, path) or _metadata_of_sidecar(path, tensors, kind)
    tensors = canonical_names(tensors, str(path))
    if not any(kind.holds(name, BACKBONE_PREFIXES) for name in tensors):
        raise CheckpointError(
            f"{path}: none of its {len(tensors)} tensors is {kind.name}'s ('{kind.part}')"
        )
    format = "lora" if path.suffix == ".safetensors" and info else "release"
    if format == "release" and not any(name.startswith(BACKBONE_PREFIXES) for name in tensors):
        format = "plain"
    return Adapter(tensors, info, str(path), kind, format)


def _metadata_of_sidecar(
    path: Path, tensors: Mapping[str, Tensor], kind: Kind
) -> AdapterMetadata | None:
    safe, plain = kind.files
    sidecar = path.with_name(safe)
    if path.name != plain or not sidecar.is_file():
        return None
    others, metadata = _read_checked(sidecar)
    same = others.keys() == tensors.keys() and all(
        same_tensor(others[name], tensor) for name, tensor in tensors.items()
    )
    return kind.metadata.from_metadata(metadata, sidecar) if same else None


def _read_checked(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A file's tensors and metadata, after its checksum, if it has one, was found to be right."""
    tensors, metadata = read_tensors(path, verify=True)
    metadata.pop("format", None)
    recorded = metadata.pop("digest", None)
    described = any(kind.metadata.own & metadata.keys() for kind in KINDS)
    if recorded is not None:
        if not all(isinstance(text, str) for entry in metadata.items() for text in entry):
            raise CheckpointError(f"{path}: its metadata is damaged (not text)")
        if recorded != checksum(tensors, metadata):
            raise CheckpointError(
                f"{path}: damaged: its content is not what was written (checksum)"
            )
    # A torch archive has checksums of its own, which cover its metadata as well.
    elif described and is_safetensors(path):
        raise CheckpointError(f"{path}: damaged: the checksum that belongs to it is missing")
    return tensors, metadata


def _check_values(adapter: Adapter) -> None:
    for name, tensor in adapter.tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{adapter.source}: {name} is of {tensor.dtype}, not of a floating type"
            )
    check_finite(adapter)


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over metadata, names, dtypes, shapes and bytes."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def canonical_names(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """An adapter's tensors under the names that this project's models have for them.

    Known are DDP's ``module.``, the names of the release's first DeBERTa files, and GPT-2's without
    ``transformer.``.

    Raises:
        CheckpointError: two tensors have one name.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("module.")
        for old, new in _OLD_NAMES.items():
            if own.endswith(old):
                own = own.removesuffix(old) + new
        if own.startswith("h."):
            own = f"transformer.{own}"
        if own in renamed:
            raise CheckpointError(f"{source}: holds {own} under two names")
        renamed[own] = tensor
    if any(name.startswith(_GPT2) for name in renamed):
        embedding = renamed.get("transformer.wte.weight")
        for name in _TIED_HEADS:
            head = renamed.pop(name, None)
            if head is not None and (embedding is None or not same_tensor(head, embedding)):
                raise CheckpointError(
                    f"{source}: brings {name}, a head of its own; this project's GPT-2 has its "
                    "token embedding for one"
                )
    return renamed


def _with_alpha(adapter: Adapter, alpha: float | None) -> Adapter:
    if alpha is None:
        return adapter
    if not is_alpha(alpha):
        raise CheckpointError(f"{adapter.source}: --lora_alpha has to be above 0, not {alpha:g}")
    if adapter.metadata is not None:
        if adapter.metadata.alpha != alpha:
            raise CheckpointError(
                f"{adapter.source}: was trained with alpha {adapter.metadata.alpha:g}, "
                f"but --lora_alpha is {alpha:g}"
            )
        return adapter
    rank = rank_of(adapter.tensors, adapter.source)
    return replace(adapter, metadata=lora_metadata(adapter.tensors, rank, alpha))


def _check_lora(adapter: Adapter) -> None:
    """Sees that LoRA's tensors are whole, nothing of the base's, and what the info says."""
    tensors, source, info = adapter.tensors, adapter.source, adapter.metadata
    rank, biases = rank_of(tensors, source), base_biases(tensors)
    halves = {f"{module}.lora_{ab}" for module in lora_pairs(tensors, source) for ab in "AB"}
    for name in tensors:
        if LORA.part in name and name not in halves:
            raise CheckpointError(f"{source}: {name} is not the name of a low-rank update")
        is_of_base = name.startswith(BACKBONE_PREFIXES) and name not in biases
        # A convolution's frozen weight is its submodule's.
        module = name.removesuffix(".weight").removesuffix(".conv")
        is_updated = name.endswith(".weight") and f"{module}.lora_A" in halves
        if (is_of_base and name not in halves) or is_updated:
            raise WholeModelError(
                f"{source}: holds a whole model, not LoRA alone: {name}, …; give it as "
                "--init_checkpoint or --model_name_or_path, or take its LoRA out with "
                "utils/split_lora.py"
            )
    if info is None:
        return
    seen = lora_metadata(tensors, rank, info.alpha)
    for what in ("rank", "targets", "bias"):
        said, is_so = getattr(info, what), getattr(seen, what)
        if said != is_so:
            raise CheckpointError(
                f"{source}: damaged: it says {what} {plain(said)}, its tensors have {plain(is_so)}"
            )


# ------------------------------------------------------------------------------------------------
# Writing
# ------------------------------------------------------------------------------------------------


def write_adapter(
    path: str | os.PathLike, adapter: Adapter, format: str | None = None
) -> list[str]:
    """Writes an adapter.

    Args:
        path: a file, ``.safetensors`` for the format lora and ``.bin`` or ``.pt`` for release; or a
            folder: these formats then get the file name that runs of this project give them.
        adapter: what to write.
        format: of `FORMATS`; by default the one that the file's name says.

    Returns:
        What a user has to know of the result, a line each: what this format cannot hold.

    Raises:
        CheckpointError: the adapter lacks what the format has to say; the format has no way to say
            what the adapter does; or the name is none for the format. Nothing is written.
    """
    path = Path(path)
    format = format or format_of_name(path)
    if format not in FORMATS:
        raise ValueError(f"unknown format '{format}' (known: {', '.join(FORMATS)})")
    _check_sound(adapter, format)
    if format == "peft":
        return _write_peft(path, adapter)
    if path.suffix not in ("", *_SUFFIXES[format]):
        names = " or ".join(_SUFFIXES[format])
        raise CheckpointError(
            f"{path}: a file of the format {format} has a name that ends in {names}"
        )
    _check_has_layers(adapter)
    if not path.suffix:
        path.mkdir(parents=True, exist_ok=True)
        path = path / adapter.kind.files[FORMATS.index(format)]
    return _write_lora(path, adapter) if format == "lora" else _write_release(path, adapter)


def format_of_name(path: Path) -> str:
    """The format of a file that is called so.

    Raises:
        CheckpointError: the name does not tell.
    """
    for format, suffixes in _SUFFIXES.items():
        if path.suffix in suffixes:
            return format
    raise CheckpointError(
        f"{path}: its name does not tell the format to write: .safetensors is lora, .bin and .pt "
        "are release"
    )


def what_forbids(adapter: Adapter, format: str) -> str | None:
    """Why an adapter would compute something else in a format; None where it computes the same."""
    reached = getattr(adapter.metadata, "positions", None)
    if format == "release" and reached:
        return (
            "its LoRA reaches positions (lora_positions), the release's does not: it would compute "
            "something else there; --to lora and --to peft keep it, --to merged makes a plain model"
        )
    if format == "peft" and reached is False:
        return (
            "its LoRA does not reach positions, as in the release; PEFT's always does where they "
            "share a projection with contents: merge it (--to merged), train it with "
            "--lora_positions, or give a --base that shares none"
        )
    return None


def _check_sound(adapter: Adapter, format: str) -> None:
    """Sees that what is written can be read again."""
    reason = what_forbids(adapter, format)
    if reason:
        raise CheckpointError(f"{adapter.source}: {reason}")
    if adapter.metadata is not None:
        adapter.metadata.check(adapter.source)
    elif format != "release":
        raise alpha_is_missing(adapter.source)
    if adapter.kind is LORA:
        _check_lora(adapter)
    _check_values(adapter)


def _check_has_layers(adapter: Adapter) -> None:
    """Sees that this project's GPT-2 and the release's have the layers that were trained."""
    if adapter.kind is not LORA:
        return
    for module, (A, B) in lora_pairs(adapter.tensors, adapter.source).items():
        reason = None
        if module.startswith(_GPT2) and not module.endswith(".c_attn"):
            reason = f"adapts {module}, where this project's GPT-2 and the release's have no LoRA"
        elif module.startswith(_GPT2) and len(A) == B.shape[1]:
            reason = (
                f"its update of {module} is not made of one block for the query and one for the "
                "value, as this project's GPT-2 and the release's have them"
            )
        if reason:
            raise CheckpointError(f"{adapter.source}: {reason}; --to merged folds it into the base")


def _write_lora(path: Path, adapter: Adapter) -> list[str]:
    write_tensors(path, adapter.tensors, _with_digest(adapter.tensors, adapter.metadata))
    return _taken_for_linear(adapter)


def _taken_for_linear(adapter: Adapter) -> list[str]:
    """What the shapes of LoRA's tensors cannot tell of layers in a model that is not known here."""
    known = any(name.startswith(BACKBONE_PREFIXES) for name in adapter.tensors)
    if known or adapter.kind is not LORA:
        return []
    return [
        "its modules are taken for linear layers: a convolution's LoRA has another rank than its "
        "shapes say, and an embedding's another format in PEFT"
    ]


def _with_digest(tensors: Mapping[str, Tensor], info: AdapterMetadata) -> dict[str, str]:
    metadata = info.to_metadata()
    return {**metadata, "digest": checksum(tensors, metadata)}


def _write_release(path: Path, adapter: Adapter) -> list[str]:
    if any(name.startswith(_GPT2) for name in adapter.tensors):
        named = {f"module.{name}": tensor for name, tensor in adapter.tensors.items()}
        write_wrapped_tensors(
            path, named, adapter.metadata.to_metadata() if adapter.metadata else {}
        )
        return []
    write_tensors(path, adapter.tensors)
    return _lost(adapter.metadata, kept=("rank", "targets", "bias", "positions"))


def _lost(info: AdapterMetadata | None, kept: Iterable[str]) -> list[str]:
    """What a format that keeps no more than these fields loses, a line each."""
    if info is None:
        return []
    said = {name: value for name, value in asdict(info).items() if value is not None}
    return [
        " ".join(f"not in this format: {name} {plain(value)}".splitlines())
        for name, value in said.items()
        if name not in kept
    ]


def _write_peft(path: Path, adapter: Adapter) -> list[str]:
    tensors, remarks = peft.tensors_of(adapter)
    remarks += _taken_for_linear(adapter)
    peft.write(path, peft.config_of(adapter), tensors, _with_digest(tensors, adapter.metadata))
    unseen = [
        name
        for name in ("base_fingerprint", "task", "labels", "trained_with")
        if getattr(adapter.metadata, name) is not None
    ]
    if unseen:
        remarks.append(f"in the metadata, where PEFT does not look: {', '.join(unseen)}")
    return remarks
