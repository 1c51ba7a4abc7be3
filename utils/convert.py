"""Convert a LoRA adapter: this project's format, the release's, PEFT's; or merge it into its base.

    python utils/convert.py IN --info
    python utils/convert.py output/rte rte_peft --to peft
    python utils/convert.py someone/their-peft-adapter adapter.safetensors --to lora
    python utils/convert.py lora_mnli.bin mnli.safetensors --to lora --lora_alpha 16
    python utils/convert.py model.26290.pt e2e_merged --to merged --base gpt2-medium

IN is an adapter of any format: a file, a folder, or a name on the hub. From a full
checkpoint with LoRA, the adapter is extracted; that of a GPT-2 that was trained without LoRA is
written as it is, with --to merged and without --base. OUT is

    lora      a .safetensors file, which says rank, alpha, targets, base, task, labels, and the
              columns of the texts that it was trained on
    release   a .bin or .pt file as microsoft/LoRA's scripts read it
    peft      a new folder, which PEFT opens on the base
    merged    a new folder with base and adapter in one, which upstream Transformers opens

For lora and release OUT may also be a folder. Without --to, OUT's name says which of the two it is,
so that `convert.py old.bin new.bin` gives the release's first DeBERTa files their later names. What
a format cannot hold is listed. Existing files are never overwritten.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

import torch
from torch import Tensor, nn

from gpt2_folder import GPT2, check_trained_on_card, is_whole_gpt2, read_gpt2, write_gpt2
from loralib.adapters.adapter import LORA, Adapter, lora_metadata, plain
from loralib.adapters.checks import check_possible_base
from loralib.adapters.deltas import adapted_modules, lora_pairs, merge_into, rank_of
from loralib.adapters.families import Family, family_of, registered
from loralib.adapters.fingerprint import has_float16
from loralib.adapters.formats import FORMATS, format_of_name, read_adapter, write_adapter
from loralib.adapters.names import within_layer
from loralib.adapters.peft import CONFIG_NAME, WEIGHTS_NAMES
from loralib.adapters.soundness import check_lora
from loralib.errors import (
    AdapterAsModelError,
    AlphaError,
    CheckpointError,
    FullModelError,
    NeedsMergingError,
    WayOut,
    WrongBaseError,
    adding_ways_out,
)
from loralib.io.atomic import atomic_write_folder
from loralib.io.command_line import ArgumentParser
from loralib.io.console import painted, table
from loralib.io.hub import resolve_file
from loralib.nn.positions import shared_projections
from loralib.training import process
from split_lora import extract
from transformers import PretrainedConfig, PreTrainedModel
from transformers.adapter_kinds import KINDS
from transformers.configuration_utils import OWN_SETTINGS, write_settings
from transformers.data.processors import GLUE_TASKS, glue_task, similar_glue_task
from transformers.models.auto.modeling_auto import auto_model_for
from transformers.models.registry import head_of_class
from transformers.utils.logging import errors_only
from transformers.weight_files import WEIGHTS_NAMES as FULL_NAMES
from transformers.weight_files import read_weights

DTYPES = ("float32", "bfloat16", "float16")
# The files that tokenizers of all families may have, for the others see `Family`; and how a model
# generates.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json"),
)
# The format, as messages show it, of an adapter that was extracted from a full checkpoint.
FULL = "in a full model"
# What this script's users can do about the library's errors.
WAYS_OUT: dict[type[CheckpointError], WayOut] = {
    AdapterAsModelError: lambda error: (
        f"IN is the adapter, --base {error.base or 'that model'}; where IN was trained on both, "
        "merge them first"
    ),
    AlphaError: "--lora_alpha",
    WrongBaseError: "--base",
    NeedsMergingError: "--to merged",
}
# The head of a model for an adapter that brings none.
DEFAULT_HEAD = "sequence_classification"
# Formats that are folders.
_FOLDERS = ("peft", "merged")
# Settings of the base that the merged model's own take the place of: its labels, and upstream's
# later name for torch_dtype.
_REPLACED = ("num_labels", "_num_labels", "dtype")
# What holds for the base's own head alone.
_OF_HEAD = ("problem_type", "text_columns")
# What is still true of an adapter once it is merged.
_OF_MERGED = ("base", "revision", "fingerprint", "task", "head", "labels", "texts")
_REACHED = {
    True: "reached by the update, as PEFT's are",
    False: "not reached by the update, as in the release",
}
_SEPARATE = "what is held besides LoRA is each module's own, whatever shares it in the base"
_FILE_SUFFIXES = (".safetensors", ".bin", ".pt")


# ------------------------------------------------------------------------------------------------
# The base
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """A base model, to check an adapter against or to merge it into.

    Args:
        family: the family that it is of.
        name: its folder, file or name on the hub.
        revision: of the hub's repository; None for its main branch.
        model: a plain model, float32, with a head of the adapter's shape.
        fingerprint: of its weights, see `loralib.adapters.fingerprint`; None in float16.
        settings: the content of its config.json, for upstream.
    """

    family: Family
    name: str
    revision: str | None
    model: nn.Module
    fingerprint: str | None
    settings: dict[str, Any]


def read_base(name: str, adapter: Adapter) -> Base:
    """The base of this name, for an adapter, which has to fit it.

    Raises:
        CheckpointError: it is damaged, or the adapter is one of another base.
        OSError: there is no such model.
        ValueError: it is a model that was adapted itself, or of no family that is known here.
    """
    revision = None
    if adapter.metadata and adapter.metadata.base == name:
        revision = adapter.metadata.base_revision
    modules = lora_pairs(adapter.tensors, adapter.source)
    family = family_of(modules)
    if family is None:
        *known, last = sorted(known.title for known in registered())
        raise CheckpointError(
            f"{adapter.source}: adapts neither {', '.join(known)} nor {last} ({min(modules)}): its "
            "base cannot be read here"
        )
    if family == GPT2:
        base = Base(family, name, revision, *read_gpt2(name, revision))
        if adapter.format in ("release", FULL):
            check_trained_on_card(adapter, name, base.settings)
    else:
        base = _read_encoder(family, name, revision, adapter)
    adapted_modules(base.model, with_metadata(adapter))
    known = [] if base.fingerprint is None else [base.fingerprint]
    check_possible_base(with_metadata(adapter), known)
    return base


def _read_encoder(family: Family, name: str, revision: str | None, adapter: Adapter) -> Base:
    if Path(name).is_file():
        raise CheckpointError(
            f"{name}: is a file; give a folder of {family.title}'s, with its config.json"
        )
    settings = PretrainedConfig.read_values(name, revision=revision)
    for kind in KINDS:
        if settings.get(kind.switch):
            raise ValueError(
                f"{name} was trained with --{kind.switch} itself: it is not a plain base"
            )
    _check_head(family, name, settings, adapter)
    auto_model = auto_model_for(adapter.head or DEFAULT_HEAD)
    weights = read_weights(name, verify=True, revision=revision)
    # No warning of a newly initialized head: the adapter brings one, or merging reports it.
    with errors_only():
        model = auto_model.from_pretrained(
            name,
            # What is written from it should not pass for sound where it is damaged.
            state_dict=weights,
            revision=revision,
            **_settings_of(adapter),
        )
    fingerprint = None if has_float16(weights) else model.base_fingerprint
    return Base(family, name, revision, model, fingerprint, settings)


def _check_head(family: Family, name: str, settings: Mapping[str, Any], adapter: Adapter) -> None:
    """Checks what an adapter's names alone say of its head against the base's own model.

    Raises:
        CheckpointError: that has another head of the same name.
    """
    said, own = adapter.metadata and adapter.metadata.head, adapter.head
    if said or own is None:
        return
    for theirs in map(head_of_class, settings.get("architectures") or ()):
        head = family.heads.get(theirs or own)
        if theirs not in (None, own) and head and head.logits == family.heads[own].logits:
            raise CheckpointError(
                f"{adapter.source}: does not say what its head is for: its names are those of "
                f"{own}, {name} is a model for {theirs}; give a base without a head, or PEFT's "
                "folder with its task_type"
            )


def _settings_of(adapter: Adapter) -> dict[str, object]:
    """The settings of a model with the head that the adapter brings, where they are its own."""
    said = adapter.metadata is not None and adapter.metadata.is_decoder
    return {**({"is_decoder": True} if said else {}), **_labels(adapter)}


def _labels(adapter: Adapter) -> dict[str, object]:
    """The labels of the head that the adapter brings; none where it has none."""
    count = adapter.outputs
    if count is None:
        return {}
    known = adapter.metadata.labels if adapter.metadata else None
    if known and len(known) != count:
        raise CheckpointError(
            f"{adapter.source}: names {len(known)} labels, its head has {count} outputs"
        )
    return {"id2label": dict(enumerate(known))} if known else {"num_labels": count}


# ------------------------------------------------------------------------------------------------
# Merging
# ------------------------------------------------------------------------------------------------


def merge(path: Path, adapter: Adapter, base: Base, dtype: torch.dtype) -> None:
    """Writes base and adapter in one, as a plain model's folder.

    Raises:
        CheckpointError: neither of them brings a trained head; the sum is beyond the range of
            `dtype`; or there is something at `path`.
    """
    merge_into(base.model, adapter)
    _write_model(path, base, dtype, adapter)


def write_whole(source: str, path: Path, dtype: torch.dtype) -> dict[str, str]:
    """Writes a GPT-2 that was trained as a whole, without LoRA, as a plain model's folder.

    Returns:
        What was written, by name, for people.

    Raises:
        CheckpointError: its values are damaged, or beyond the range of `dtype`; or there is
            something at `path`.
    """
    whole = Base(GPT2, source, None, *read_gpt2(source))
    _write_model(path, whole, dtype)
    return _described_model(whole, dtype)


def _described_model(base: Base, dtype: torch.dtype) -> dict[str, str]:
    values = sum(parameter.numel() for parameter in base.model.parameters())
    size = f"{values * dtype.itemsize / 2**20:.2f} MiB"
    return {"format": "merged", "size": size, "dtype": _name_of(dtype)}


def _write_model(
    path: Path, base: Base, dtype: torch.dtype, adapter: Adapter | None = None
) -> None:
    base.model.to(dtype)
    check_range(dict(base.model.named_parameters()), path, dtype)
    with atomic_write_folder(path) as folder:
        if isinstance(base.model, PreTrainedModel):
            _write_encoder(folder, adapter, base)
        else:
            write_gpt2(folder, base.model, base.settings)
        copy_tokenizer(base, folder)


def _write_encoder(folder: Path, adapter: Adapter, base: Base) -> None:
    model = base.model
    untrained = model.newly_initialized - adapter.tensors.keys()
    if untrained:
        raise CheckpointError(
            f"{adapter.source}: brings no {min(untrained)}, nor does {base.name}: the merged "
            "model would have an untrained head"
        )
    brought = {name.partition(".")[0] for name in adapter.tensors}
    backbone = f"{model.base_model_prefix}."
    own = {name for name, _ in model.named_parameters() if not name.startswith(backbone)}
    lacking = {name for name in own if name.partition(".")[0] in brought} - adapter.tensors.keys()
    if lacking:
        raise CheckpointError(f"{adapter.source}: lacks {min(lacking)} of the head that it brings")
    ties = model.tied.items()
    if any(model.get_parameter(n) is not model.get_parameter(kept) for n, kept in ties):
        model.config.tie_word_embeddings = False  # the adapter has an update of one, or its own
    model.save_pretrained(folder, safe_serialization=True)
    # Upstream's settings are the base's; the model's own are these.
    is_own_head = brought.isdisjoint(name.partition(".")[0] for name in own)
    left_out = {*OWN_SETTINGS, *_REPLACED, *(() if is_own_head else _OF_HEAD)}
    settings = {k: v for k, v in base.settings.items() if k not in left_out}
    written = model.config.to_dict()
    # Merging may have given positions projections of their own.
    from_model = ("architectures", "id2label", "label2id", *settings.keys() & {"share_att_key"})
    settings |= {name: written[name] for name in from_model}
    if not written["tie_word_embeddings"]:
        settings["tie_word_embeddings"] = False
    if adapter.metadata.is_decoder:
        settings["is_decoder"] = True
    if adapter.metadata.task:
        settings["finetuning_task"] = adapter.metadata.task
    if adapter.metadata.text_columns:
        settings["text_columns"] = list(adapter.metadata.text_columns)
    settings["torch_dtype"] = _name_of(next(model.parameters()).dtype)
    write_settings(folder, settings)


def copy_tokenizer(base: Base, folder: Path) -> None:
    """Copies what is beside the base's weights; beside a file of weights is nothing of its own."""
    if Path(base.name).is_file():
        return
    for name in (*TOKENIZER_FILES, *base.family.tokenizer_files):
        file = resolve_file(base.name, name, revision=base.revision)
        if file is not None:
            (folder / name).write_bytes(file.read_bytes())


# ------------------------------------------------------------------------------------------------
# Adapters
# ------------------------------------------------------------------------------------------------


def read_source(source: str, lora_alpha: float | None) -> Adapter:
    """The adapter that IN is, or that is in it where it is a full model's checkpoint.

    Raises:
        CheckpointError, OSError: as `read_adapter`.
    """
    try:
        if not _is_full_folder(Path(source)):
            return read_adapter(source, lora_alpha=lora_alpha)
    except FullModelError:
        pass
    return replace(check_lora(extract(Path(source)), lora_alpha), format=FULL)


def _is_full_folder(path: Path) -> bool:
    """Whether a folder holds a full model's weights, and no adapter beside them."""
    of_adapters = (*LORA.files, CONFIG_NAME, *WEIGHTS_NAMES)
    has_adapter = any((path / name).exists() for name in of_adapters)
    return not has_adapter and any((path / name).is_file() for name in FULL_NAMES)


def with_metadata(adapter: Adapter) -> Adapter:
    """The adapter with what its tensors say; its alpha, if that is unknown, is not a number."""
    if adapter.metadata is not None:
        return adapter
    rank = rank_of(adapter.tensors, adapter.source)
    return replace(adapter, metadata=lora_metadata(adapter.tensors, rank, math.nan))


def with_task(adapter: Adapter, task: str | None, labels: Sequence[str] | None) -> Adapter:
    """The adapter with the task and labels that a user named, where it does not say its own.

    Raises:
        CheckpointError: it says others, or its head has another number of outputs.
    """
    said = adapter.metadata and adapter.metadata.task
    if task:
        task = said if said and _glue_name(said) == _glue_name(task) else _glue_name(task)
    named = {"task": task, "labels": tuple(labels) if labels else None}
    for what, value in named.items():
        known = getattr(adapter.metadata, what, None)
        if value and known and known != value:
            raise CheckpointError(
                f"{adapter.source}: says {what} {plain(known)}, but --{what} is {plain(value)}"
            )
    outputs = adapter.outputs
    if labels and outputs != len(labels):
        has = "has no head" if outputs is None else f"has a head of {outputs} outputs"
        raise CheckpointError(f"{adapter.source}: {has}, but --labels names {len(labels)}")
    if adapter.metadata is None:
        return adapter
    own = {what: value for what, value in named.items() if value}
    return replace(adapter, metadata=replace(adapter.metadata, **own))


def _glue_name(task: str) -> str:
    """A task's name as run_glue.py records it, and compares it when it evaluates an adapter."""
    with suppress(ValueError):  # a task of one's own
        return glue_task(task).name
    return task


def unknown_task(before: Adapter, after: Adapter) -> list[str]:
    """What a user has to know of a task that was named, a line; none where GLUE has it.

    Args:
        before: an adapter as it was read.
        after: the same, `with_task`.
    """
    task = after.metadata and after.metadata.task
    family = family_of(after.tensors)
    is_of_texts = after.head in (None, DEFAULT_HEAD) and family and DEFAULT_HEAD in family.heads
    if not task or not is_of_texts or task in GLUE_TASKS or task == before.metadata.task:
        return []
    near = similar_glue_task(task)
    meant = f" (did you mean {near}?)" if near else ""
    return [f"{task} is not a GLUE task{meant}; it is written as --task says"]


def with_base(adapter: Adapter, base: Base) -> Adapter:
    """The adapter with what its base says of it, where it has metadata to hold that.

    This is the base's name, and whether any adapted projection is shared at all. Its fingerprint is
    taken on a user's word, as an alpha is, unless the adapter names another base.
    """
    if adapter.metadata is None:
        return adapter
    own: dict[str, Any] = {"base": base.name, "base_revision": base.revision}
    if adapter.metadata.base_fingerprint is None and not names_another(adapter, base):
        own["base_fingerprint"] = base.fingerprint
    if shared_projections(base.model).isdisjoint(lora_pairs(adapter.tensors, adapter.source)):
        own["positions"] = None
    return replace(adapter, metadata=replace(adapter.metadata, **own))


def names_another(adapter: Adapter, base: Base) -> bool:
    """Whether an adapter says a base of another name."""
    said = adapter.metadata.base if adapter.metadata else None
    return said is not None and Path(said) != Path(base.name)


def unverified(adapter: Adapter, base: Base | None) -> list[str]:
    """What a user has to know of a base that nothing but its name can confirm, a line each."""
    if base is None or adapter.metadata is None or not names_another(adapter, base):
        return []
    if adapter.metadata.base_fingerprint and base.fingerprint:
        return []
    return [
        f"{adapter.source} names its base '{adapter.metadata.base}', which --base is not called"
    ]


def in_dtype(adapter: Adapter, dtype: torch.dtype | None) -> Adapter:
    """The adapter with all tensors in one dtype, but for counters and masks among its buffers.

    Raises:
        CheckpointError: it has several, and none was asked for; or values are beyond the range of
            the one that was.
    """
    found = dtypes_of(adapter)
    if dtype is None and len(found) > 1:
        raise CheckpointError(
            f"{adapter.source}: holds tensors of {' and '.join(found)}; say which it is to be "
            "with --dtype"
        )
    if dtype is None:
        return adapter
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in adapter.tensors.items()
    }
    check_range(tensors, adapter.source, dtype)
    return replace(adapter, tensors=tensors)


def check_range(tensors: Mapping[str, Tensor], name: object, dtype: torch.dtype) -> None:
    """Checks that tensors, once rounded to `dtype`, are finite; errors call them `name`.

    Raises:
        CheckpointError: one is not.
    """
    for tensor, values in tensors.items():
        if not torch.isfinite(values).all():
            raise CheckpointError(
                f"{name}: {tensor} has values beyond the range of {_name_of(dtype)}; give another "
                "--dtype"
            )


def dtypes_of(adapter: Adapter) -> list[str]:
    """The names of the dtypes of an adapter's tensors, but for counters and masks."""
    tensors = adapter.tensors.values()
    return sorted({_name_of(tensor.dtype) for tensor in tensors if tensor.is_floating_point()})


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(adapter: Adapter) -> dict[str, str]:
    """What an adapter is, by name, for people."""
    metadata = with_metadata(adapter).metadata
    pairs = lora_pairs(adapter.tensors, adapter.source)
    stacked = max(len(A) // B.shape[1] for A, B in pairs.values())
    each = f" ({stacked} updates in each module)" if stacked > 1 else ""
    lora = sum(t.numel() for name, t in adapter.tensors.items() if LORA.part in name)
    others = sum(t.numel() for t in adapter.tensors.values()) - lora
    said = {
        "format": adapter.format,
        "rank": f"{metadata.rank}{each}{_exceptions(metadata.rank_pattern)}",
        "alpha": "not said; --lora_alpha says it"
        if adapter.metadata is None
        else f"{metadata.alpha:g}{_exceptions(metadata.alpha_pattern)}",
        "variant": metadata.variant or (adapter.metadata and "lora"),
        "initialization": metadata.initialization,
        "freeze_A": "A is frozen, B alone was trained" if metadata.freeze_A else None,
        "targets": f"{plain(metadata.targets)}, in {len(pairs)} modules",
        "slices": _updated(metadata.slices),
        "dropout": metadata.dropout,
        "biases": metadata.bias,
        "separate": _SEPARATE if metadata.separate else None,
        "positions": None if metadata.positions is None else _REACHED[metadata.positions],
        "parameters": f"{lora:,} of LoRA, {others:,} others",
        "size": f"{sum(t.nbytes for t in adapter.tensors.values()) / 2**20:.2f} MiB",
        "dtype": ", ".join(dtypes_of(adapter)),
        "base": metadata.base,
        "revision": metadata.base_revision,
        "fingerprint": metadata.base_fingerprint,
        "task": metadata.task,
        "head": adapter.head,
        "labels": plain(metadata.labels) if metadata.labels else None,
        "texts": plain(metadata.text_columns) if metadata.text_columns else None,
        "with": plain(metadata.trained_with) if metadata.trained_with else None,
    }
    return {name: str(value) for name, value in said.items() if value is not None}


def _exceptions(pattern: Mapping[str, float] | None) -> str:
    """The other values that some modules have, and which these are, for people."""
    modules: dict[float, list[str]] = {}
    for module, value in sorted((pattern or {}).items()):
        modules.setdefault(value, []).append(module)
    listed = [f"{value:g} in {_listed(names)}" for value, names in sorted(modules.items())]
    return f", but {'; '.join(listed)}" if listed else ""


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} modules)"


def _updated(slices: Mapping[str, tuple[bool, ...]] | None) -> str | None:
    """Which slices of modules' outputs have an update, for people."""
    listed = {
        f"{within_layer(module)} {', '.join('yes' if on else 'no' for on in enabled)}"
        for module, enabled in (slices or {}).items()
    }
    return "; ".join(sorted(listed)) or None


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def format_named(path: Path) -> str:
    """The format that OUT's name says.

    Raises:
        CheckpointError: it does not tell.
    """
    if not path.suffix:
        raise CheckpointError(
            f"{path}: a name without .safetensors (lora), .bin or .pt (release) does not tell the "
            "format to write: give --to, such as --to peft or --to merged for a folder"
        )
    return format_of_name(path)


def check_target(path: Path, format: str, source: str) -> None:
    """Checks that OUT can be written, before anything is read.

    Raises:
        CheckpointError: it is there already, it is not a folder's name, or it is a folder with
            another adapter than IN, `source`.
    """
    if format in _FOLDERS and path.suffix in _FILE_SUFFIXES:
        raise CheckpointError(f"{path}: the format {format} is a folder; give it a folder's name")
    if format in _FOLDERS:
        is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    else:
        written = _written(path, format)
        is_free = not written.exists()
        if is_free and written != path:
            _check_no_other(path, source)
        path = written
    if not is_free:
        raise CheckpointError(f"{path}: exists already; give another name")


def _check_no_other(folder: Path, source: str) -> None:
    """Checks that a folder holds no adapter that would be read in the place of the written one."""
    for name in (*LORA.files, CONFIG_NAME, *WEIGHTS_NAMES):
        file = folder / name
        is_own = name in LORA.files and Path(source).resolve() in (folder.resolve(), file.resolve())
        if file.exists() and not is_own:
            raise CheckpointError(
                f"{file}: is another adapter's, which would be read in the place of the new one; "
                "give another folder"
            )


def _written(path: Path, format: str) -> Path:
    """The file that OUT stands for, or PEFT's folder."""
    if format in _FOLDERS or path.suffix:
        return path
    return path / LORA.files[FORMATS.index(format)]


def check_complete(adapter: Adapter, format: str, base: str | None) -> None:
    """Checks that all is known that the format needs.

    Raises:
        CheckpointError: something is missing.
    """
    metadata = adapter.metadata
    if metadata is None and format != "release":
        raise AlphaError(adapter.source)
    if metadata and metadata.trained_with:
        raise CheckpointError(
            f"{adapter.source}: was trained with {plain(metadata.trained_with)} as well, whose "
            "weights are in another file: without them it is not what was trained"
        )
    if format == "merged" and base is None:
        known = f" (it names '{metadata.base}')" if metadata.base else ""
        raise CheckpointError(f"{adapter.source}: give its base as --base{known}")


def convert(
    adapter: Adapter, path: Path, format: str, base: Base | None, dtype: torch.dtype | None
) -> tuple[dict[str, str], list[str]]:
    """Writes an adapter to `path` in a format, or merged.

    Returns:
        What was written, as `describe` has it; and what a user has to know of it, a line each.
    """
    if base is not None:
        adapter = with_base(adapter, base)
    if format == "merged":
        dtype = dtype or torch.float32
        merge(path, adapter, base, dtype)
        own = _described_model(base, dtype)
        kept = {name: value for name, value in describe(adapter).items() if name in _OF_MERGED}
        return {**own, **kept}, []
    adapter = in_dtype(adapter, dtype)
    remarks = write_adapter(path, adapter, format)
    # What it says of itself, and not what it was made from.
    return describe(read_adapter(_written(path, format))), remarks


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="IN", help="an adapter: file, folder, or name on the hub")
    add("target", metavar="OUT", nargs="?", type=Path, help="what to write")
    add("--to", choices=[*FORMATS, "merged"], help="the format to write")
    add("--info", action="store_true", help="print what IN is, and write nothing")
    add(
        "--base",
        metavar="FOLDER_OR_NAME",
        help="the model that IN was trained on; merged needs it, other formats are checked against "
        "it and say its name. For GPT-2 also a file of weights",
    )
    add("--lora_alpha", type=float, help="the alpha that IN was trained with, if IN does not say")
    add("--task", help="the task that IN was trained for, such as rte, if IN does not say")
    add(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="the names of its head's outputs, in their order, if IN does not say",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="of the written tensors; default: IN's own, or float32 for merged",
    )
    args = parser.parse_args(argv)
    if args.target is None and not args.info:
        parser.error("give OUT, or --info")
    if args.info and any((args.target, args.to, args.base, args.dtype, args.task, args.labels)):
        parser.error("--info writes nothing: with IN it takes --lora_alpha alone")
    return args


@adding_ways_out(WAYS_OUT)
def main(argv: Sequence[str] | None = None) -> None:
    """Parses, and does what is asked for."""
    args = parse_args(argv)
    if args.info:
        adapter = read_source(args.source, args.lora_alpha)
        show(f"{adapter.source}:", describe(adapter))
    else:
        run(args)


def run(args: argparse.Namespace) -> None:
    """Reads, checks, converts, and says what was written."""
    format = args.to or format_named(args.target)
    check_target(args.target, format, args.source)
    if format == "merged" and is_whole_gpt2(args.source):
        run_on_whole(args)
        return
    adapter = read_source(args.source, args.lora_alpha)
    check_complete(adapter, format, args.base)
    read, adapter = adapter, with_task(adapter, args.task, args.labels)
    base = None if args.base is None else read_base(args.base, adapter)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    args.target.parent.mkdir(parents=True, exist_ok=True)
    said, remarks = convert(adapter, args.target, format, base, dtype)
    of_task = unknown_task(read, adapter)
    remarks = [*unverified(adapter, base), *of_task, *_unsaid(adapter, args), *remarks]
    if adapter.format == FULL:
        remarks = [f"{adapter.source} is a full model: its LoRA and head were taken", *remarks]
    show(f"{args.target}: written, from {adapter.source}:", said, remarks)


def run_on_whole(args: argparse.Namespace) -> None:
    """The same where IN is no adapter, but a GPT-2 that was trained without LoRA."""
    flags = ("base", "lora_alpha", "task", "labels")
    given = [f"--{flag}" for flag in flags if getattr(args, flag) is not None]
    if given:
        raise CheckpointError(
            f"{args.source}: is a whole GPT-2 without LoRA: leave out {' and '.join(given)}"
        )
    args.target.parent.mkdir(parents=True, exist_ok=True)
    said = write_whole(args.source, args.target, getattr(torch, args.dtype or "float32"))
    show(f"{args.target}: written, from {args.source}:", said)


def _unsaid(adapter: Adapter, args: argparse.Namespace) -> list[str]:
    """What a user named that is not written, as nothing is of an adapter whose alpha is unknown."""
    if adapter.metadata is not None:
        return []
    named = {"task": args.task, "labels": tuple(args.labels or ())}
    return [f"not in this format: {name} {plain(value)}" for name, value in named.items() if value]


def show(first: str, said: Mapping[str, str], remarks: Sequence[str] = ()) -> None:
    """Prints what an adapter is, and what a user has to know of it."""
    print(painted(first, "bold", sys.stdout))
    print(table(said.items(), indent="  ", stream=sys.stdout))
    for remark in remarks:
        print(f"  {painted('note:', 'yellow', sys.stdout)} {remark}")


if __name__ == "__main__":
    process.run(main)
