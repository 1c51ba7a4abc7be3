"""Writes PEFT's folders. Their contents are described in peft.py."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..functional import Delta, joined_with_start
from ..io.atomic import atomic_write_folder
from ..io.tensors import write_tensors
from ..module_names import layer_of, owner_of
from ..stacks import stack_of_layer
from .adapter import Adapter, base_biases, lora_modules
from .checksums import with_checksum
from .deltas import (
    MAGNITUDE,
    START_A,
    START_B,
    deltas_of,
    has_slices,
    lora_pairs,
    ranks_of,
    slices_in,
)
from .families import family_of, in_known_backbone, top_module
from .metadata import LoraMetadata, usual
from .names import AMBIGUOUS
from .peft import (
    CONFIG_NAME,
    HEADS_OF_TASK,
    OUT_PROJ,
    PREFIX,
    TASK_OF_HEAD,
    TIMES_ADDED,
    VARIANT_OF_FLAGS,
    WEIGHTS_NAMES,
    as_int,
    attention_of,
    end_of_name,
    is_targeted,
    magnitude_for,
    stacked_B_for,
)

# The head that PEFT's auto classes save as one module even if the settings name no task.
_CLASSIFIER = "classifier"
# The PEFT version that is recorded in folders with an attention. If none is recorded, PEFT assumes
# its own version. It keeps this one when it saves the adapter again.
_VERSION = "0.21.0"
# Parts of names that PEFT adds where it wraps a module. Reading a folder takes them off again.
_WRAPPED = {"modules_to_save", "original_module"}
# Metadata that PEFT's settings cannot record, and that PEFT does not need.
_NOT_IN_PEFT = ("base_fingerprint", "task", "labels", "text_columns", "trained_with", "freeze_A")


def write(path: Path, adapter: Adapter, model: nn.Module | None) -> list[str]:
    """Writes a PEFT folder, atomically.

    Args:
        path: the folder.
        adapter: an adapter that PEFT can hold, see `why_not_expressible`.
        model: its model, if there is one, see `_config_of`.

    Returns:
        Remarks that the user should see, one line each.

    Raises:
        CheckpointError: there is something at `path` other than an empty folder, or PEFT has no
            such updates.
    """
    adapter, remarks = _as_peft_computes(adapter)
    metadata = adapter.lora
    if model is None:  # a model's metadata name all adapted embeddings
        _refuse_embeddings(adapter)
    tensors = _tensors_of(adapter)
    config = _config_of(adapter, model)
    with atomic_write_folder(path) as folder:
        write_tensors(folder / WEIGHTS_NAMES[0], tensors, with_checksum(tensors, metadata))
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
    unseen = [name for name in _NOT_IN_PEFT if getattr(metadata, name) is not None]
    if metadata.head is not None and metadata.head not in TASK_OF_HEAD:
        unseen.append("head")
    if unseen:
        remarks.append(f"in the metadata, where PEFT does not look: {', '.join(unseen)}")
    return remarks


def why_not_expressible(adapter: Adapter) -> str | None:
    """Returns why PEFT cannot hold an adapter, or None if it can."""
    modules = ranks_of(adapter.tensors, adapter.source)
    reason = (
        _why_not_updates(adapter, modules)
        or _why_not_names(adapter, modules)
        or _why_not_modules(adapter, modules)
    )
    if reason is None and adapter.lora.positions is False:
        return (
            "its LoRA does not reach positions, as in the release, but PEFT's always does where "
            "they share a projection with contents: train it with lora_positions, or on a base "
            "that shares none"
        )
    return reason


def _why_not_updates(adapter: Adapter, modules: Collection[str]) -> str | None:
    """Returns why PEFT cannot compute an adapter's updates, or None if it can."""
    metadata = adapter.lora
    for module, (A, B) in lora_pairs(adapter.tensors, adapter.source).items():
        attention = attention_of(module, modules)
        is_of_slices = len(A) > B.shape[1] or module in (metadata.slices or {})
        if metadata.has_magnitude and is_of_slices:
            return (
                f"{module} has DoRA's magnitudes for slices of its output, but PEFT's are for the "
                "complete output"
            )
        if metadata.has_magnitude and attention:
            return f"adapts {attention}, an nn.MultiheadAttention, for which PEFT has no DoRA"
        if attention and _strength(metadata, module) != _strength(metadata, attention):
            return (
                f"{module} and {attention} differ in rank or alpha, but PEFT adapts the two as one "
                "module"
            )
    return None


def _why_not_names(adapter: Adapter, modules: Collection[str]) -> str | None:
    """Returns why PEFT has no names for some of an adapter's tensors, or None if it has."""
    metadata = adapter.lora
    owners = {layer.rpartition(".")[0] for layer in metadata.stacks or ()}
    if "" in owners:
        return (
            "adapts a parameter of the model itself, but PEFT adapts only parameters of modules "
            "in it"
        )
    for name in adapter.tensors:
        module, _, last = name.rpartition(".")
        owner = next((each for each in owners if name.startswith(f"{each}.")), None)
        if owner is not None and not metadata.is_of_stack(module):
            return (
                f"holds {name}, which PEFT could not load: it wraps {owner}, whose parameters are "
                "adapted"
            )
        added = (_WRAPPED if module in modules else {*_WRAPPED, "base_layer"}) & {*name.split(".")}
        if added:
            return f"holds {name}, in which PEFT takes {min(added)} for a part that it has added"
        if module in modules and last in ("in_proj_bias", "bias_k", "bias_v"):
            return f"brings {name}, a bias that PEFT does not save"
        if not module:
            return f"brings {name}, a parameter of the model itself, but PEFT saves only modules"
        if last.isdecimal():
            return f"brings {name}, whose module is an nn.ParameterList, which PEFT does not save"
    return None


def _why_not_modules(adapter: Adapter, modules: Collection[str]) -> str | None:
    """Returns why PEFT would save too much: it saves modules as wholes. None if it would not."""
    for saved in saved_modules(adapter):
        for module in modules:
            if module.startswith(f"{saved}."):
                return (
                    f"brings parameters of {saved}: PEFT would save all of it, including "
                    f"{module}, which has LoRA"
                )
    # A head may share a weight with the base.
    family = family_of(adapter.tensors)
    tops = set(map(top_module, _tensors_of_saved_modules(adapter)))
    for name, kept in (family.tied if family else {}).items():
        if top_module(name) in tops and name not in adapter.tensors and in_known_backbone(kept):
            return (
                f"brings {top_module(name)}, whose {name} is tied to the base's {kept}: PEFT would "
                "save that weight as well"
            )
    return None


def _strength(metadata: LoraMetadata, module: str) -> tuple[int, float]:
    return metadata.rank_of(module), metadata.alpha_of(module)


def _as_peft_computes(adapter: Adapter) -> tuple[Adapter, list[str]]:
    """Converts an adapter to one that PEFT can express, and returns remarks for the user.

    An update relative to its start becomes a plain one of twice the rank, as in PEFT's own
    conversion. The metadata record which slices stacked updates reach, so that the updates can be
    recovered from PEFT's tensors. Each remark is one line.
    """
    remarks = []
    if adapter.lora.has_start:
        remarks.append(
            f"for PEFT, the {adapter.lora.initialization} initialization becomes plain LoRA of "
            "twice the rank, which computes the same"
        )
        adapter = _without_start(adapter)
    metadata, slices, deltas = adapter.lora, {}, deltas_of(adapter)
    if metadata.stacks and metadata.dropout:
        remarks.append(
            "PEFT takes no dropout for updates of parameters: if training continues there, it is 0"
        )
    if any(attention_of(module, deltas) for module in deltas):
        remarks.append(
            "PEFT up to 0.21 adds the update of an nn.MultiheadAttention's out_proj twice, so its "
            "lora_B is halved in the file, and PEFT computes the same"
        )
    for module, delta in deltas.items():
        if not has_slices(adapter, module, delta):
            continue
        slices[module] = slices_in(metadata, module)
        parts, rank, alpha = len(delta.starts), *_strength(metadata, module)
        if parts == 1:
            continue
        remarks.append(
            f"for PEFT, the {parts} updates of rank {rank} in one {module.rpartition('.')[2]} "
            f"become one of rank {parts * rank} and alpha "
            f"{_joined_alpha(metadata, alpha, parts):g}, which computes the same"
        )
    return replace(adapter, metadata=replace(metadata, slices=slices)), sorted(set(remarks))


def _without_start(adapter: Adapter) -> Adapter:
    """Replaces updates that are relative to their start by plain LoRA of twice the rank."""
    metadata, tensors = adapter.lora, dict(adapter.tensors)
    for module, rank in ranks_of(tensors, adapter.source).items():
        names = [f"{module}.{half}" for half in ("lora_A", "lora_B", START_A, START_B)]
        A, B, A0, B0 = (tensors.pop(name) for name in names)
        joined = joined_with_start(A, B, A0, B0, len(A) // rank)
        tensors[names[0]], tensors[names[1]] = joined
    ranks, alphas = metadata.rank_pattern or {}, metadata.alpha_pattern or {}
    plain = replace(
        metadata,
        rank=2 * metadata.rank,
        alpha=_joined_alpha(metadata, metadata.alpha, 2),
        rank_pattern={module: 2 * rank for module, rank in ranks.items()},
        alpha_pattern={m: _joined_alpha(metadata, alpha, 2) for m, alpha in alphas.items()},
        initialization=None,
    )
    return replace(adapter, tensors=tensors, metadata=plain)


def _joined_alpha(metadata: LoraMetadata, alpha: float, parts: int) -> float:
    """Returns the alpha that gives an update of `parts` times the rank the scaling of its parts."""
    return as_int(alpha / metadata.delta.scale(1.0, parts))


def _tensors_of(adapter: Adapter) -> dict[str, Tensor]:
    """Returns the tensors of an adapter from `_as_peft_computes` with PEFT's names and shapes.

    Raises:
        CheckpointError: PEFT has no such updates.
    """
    named, deltas, places = {}, deltas_of(adapter), _places_of_stacks(adapter)
    for name, tensor in (adapter.tied | adapter.besides).items():  # PEFT saves both names
        module, _, last = name.rpartition(".")
        named[f"{_place(module, deltas)}.{last}"] = tensor
    for module, delta in deltas.items():
        A, B = (adapter.tensors[f"{module}.lora_{ab}"] for ab in "AB")
        if module in places:
            place = places[module]
            named[f"{place}.lora_A.weight"] = A
            named[f"{place}.lora_B.weight"] = stacked_B_for(B, len(delta.starts))
            continue
        B = _joined_B(delta) if has_slices(adapter, module, delta) else B
        B = _divided(B, module, adapter.source) if attention_of(module, deltas) else B
        is_embedding = module in (adapter.lora.embeddings or ())
        half = "lora_embedding_{}" if is_embedding else "lora_{}.weight"
        place = _place(module, deltas, of_lora=True)
        named[f"{place}.{half.format('A')}"], named[f"{place}.{half.format('B')}"] = A, B
        magnitude = adapter.tensors.get(f"{module}.{MAGNITUDE}")
        if magnitude is not None:
            named[f"{place}.{MAGNITUDE}"] = magnitude_for(magnitude, A)
    return named


def _divided(B: Tensor, module: str, source: str) -> Tensor:
    """Returns B divided by the number of times that PEFT adds it.

    Raises:
        CheckpointError: values are too small to be divided exactly in their dtype.
    """
    divided = B / TIMES_ADDED
    if not torch.equal(divided * TIMES_ADDED, B):
        raise CheckpointError(
            f"{source}: lora_B of {module} has values too small to be halved in {B.dtype}, as "
            "PEFT needs it: write it in float32"
        )
    return divided


def _place(module: str, adapted: Collection[str], of_lora: bool = False) -> str:
    """Returns the prefix of PEFT's names for a module's LoRA, or for the module's own tensors."""
    attention = attention_of(module, adapted)
    inner = f"{attention}.base_layer{OUT_PROJ}" if attention else module
    of_base = module in adapted and not of_lora
    return f"{PREFIX}{inner}.base_layer" if of_base else f"{PREFIX}{inner}"


def _places_of_stacks(adapter: Adapter) -> dict[str, str]:
    """Returns the prefixes of PEFT's names for stacks' LoRA. It wraps a module once per stack."""
    places: dict[str, str] = {}
    for layer in reversed(adapter.lora.stacks or ()):  # what was wrapped last is the outermost
        place = f"{PREFIX}{layer.rpartition('.')[0]}"
        while place in places.values():
            place += ".base_layer"
        places[layer] = place
    return places


def _refuse_embeddings(adapter: Adapter) -> None:
    """Refuses modules that seem to be embeddings, as files without metadata do not say it."""
    for module in sorted(lora_modules(adapter.tensors) - {*(adapter.lora.embeddings or ())}):
        last = module.rpartition(".")[2]
        is_kernel = adapter.tensors[f"{module}.lora_A"].dim() > 2
        if not is_kernel and re.search(r"(?:^|_)(?:embed(?:ding)?s?|embed_tokens|wte|wpe)$", last):
            raise CheckpointError(
                f"{adapter.source}: {module} seems to be an embedding, which PEFT adapts "
                "differently: list it in its metadata (embeddings)"
            )


def _joined_B(delta: Delta) -> Tensor:
    """Returns B of one update of the whole output: the blocks of stacked updates, and zeros."""
    joined = delta.B.new_zeros(delta.out_features, len(delta.A))
    for block in delta.blocks():
        joined[block.columns, block.rows] = block.B
    return joined


def _config_of(adapter: Adapter, model: nn.Module | None) -> dict[str, Any]:
    """Returns PEFT's settings for an adapter.

    Args:
        adapter: the adapter, as `_as_peft_computes` returned it.
        model: its model, if there is one. If there is no task type, the settings record the model's
            class, by which PEFT's auto classes find it. The targets are chosen so that they match
            no other module of the model.
    """
    metadata, family = adapter.lora, family_of(adapter.tensors)
    stacks = {layer: stack_of_layer(layer) for layer in metadata.stacks or ()}
    deltas = deltas_of(adapter).items()
    parts = {m: 1 if m in stacks else len(delta.starts) for m, delta in deltas}
    named = {m: stacks.get(m, m) for m in parts if attention_of(m, parts) is None}
    targets, modules = {*named.values()}, named.keys() - stacks
    rank, ranks = usual({name: parts[m] * metadata.rank_of(m) for m, name in named.items()})
    alpha, alphas = usual(
        {name: _joined_alpha(metadata, metadata.alpha_of(m), parts[m]) for m, name in named.items()}
    )
    saved, task = saved_modules(adapter, model), _task_of(adapter)
    has_attention = len(named) < len(parts)
    told = {name: values for values, name in VARIANT_OF_FLAGS.items()}
    flags = zip(("use_rslora", "use_dora"), told[metadata.variant or "lora"], strict=True)
    return {
        "peft_type": "LORA",
        "task_type": task,
        **({} if task or model is None else {"auto_mapping": _auto_mapping(type(model))}),
        "base_model_name_or_path": metadata.base,
        "revision": metadata.base_revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": as_int(alpha),
        "rank_pattern": _pattern(ranks, targets),
        "alpha_pattern": _pattern(alphas, targets),
        # PEFT refuses dropout if parameters are adapted.
        "lora_dropout": 0.0 if stacks else metadata.dropout or 0.0,
        **_targets(modules, model),
        **({"target_parameters": [*stacks.values()]} if stacks else {}),
        "modules_to_save": sorted(saved) or None,
        "bias": metadata.bias,
        "fan_in_fan_out": family is not None and family.fan_in_fan_out,
        "init_lora_weights": True,
        # A PEFT version that does not know a flag refuses the folder, as it should. With biases,
        # flags are therefore written even if off: PEFT before 0.7 would not read the biases.
        **{flag: is_on for flag, is_on in flags if is_on or metadata.bias != "none"},
        **({"peft_version": _VERSION} if has_attention else {}),
    }


def _task_of(adapter: Adapter) -> str | None:
    """Returns PEFT's task type for an adapter, or None if it has none."""
    family = family_of(adapter.tensors)
    task = TASK_OF_HEAD.get(adapter.head or "") or (family.peft_task if family else None)
    is_without_head = task in HEADS_OF_TASK and not _tensors_of_saved_modules(adapter)
    return None if family and is_without_head else task


def saved_modules(adapter: Adapter, model: nn.Module | None = None) -> set[str]:
    """Returns the modules that PEFT is to save beside LoRA; `model` is the adapter's, if known."""
    family = family_of(adapter.tensors)
    of_heads = family.heads.values() if family else ()
    as_one = {module for head in of_heads for module in head.modules}
    as_one |= HEADS_OF_TASK.get(_task_of(adapter) or "", set())
    if _brings_all_of(getattr(model, _CLASSIFIER, None), _CLASSIFIER, adapter):
        as_one.add(_CLASSIFIER)
    owners = {
        next(
            (module for module in as_one if name.startswith(f"{module}.")),
            owner_of(name).partition(".parametrizations.")[0],
        )
        for name in _tensors_of_saved_modules(adapter)
    }
    # PEFT saves a module with all that is in it, and cannot save the latter twice.
    return {each for each in owners if not any(each.startswith(f"{one}.") for one in owners)}


def _brings_all_of(module: object, name: str, adapter: Adapter) -> bool:
    """Returns whether this is a module and the adapter holds all of its tensors, by this name."""
    if not isinstance(module, nn.Module):
        return False
    return module.state_dict(prefix=f"{name}.").keys() <= adapter.tensors.keys()


def _tensors_of_saved_modules(adapter: Adapter) -> set[str]:
    """Returns the tensors that PEFT saves as parts of modules, and not by its setting `bias`.

    If that is "all", PEFT also trains and saves the biases of a head that it does not save.
    """
    names = adapter.besides.keys() - base_biases(adapter.tensors)
    if adapter.lora.bias != "all":
        return names
    tops = {top_module(name) for name in names if not name.endswith("bias")}
    return {name for name in names if top_module(name) in tops}


def _auto_mapping(model_class: type) -> dict[str, str]:
    return {
        "base_model_class": model_class.__name__,
        "parent_library": model_class.__module__,
    }


def _pattern(values: Mapping[str, float], modules: Collection[str]) -> dict[str, float]:
    """Returns PEFT's pattern for the ranks or alphas of some of the adapted modules.

    PEFT reads each key as a regular expression. A key is the module's name if that matches this
    module alone, and otherwise the escaped name after ``^``.
    """
    return {
        module if _meant_by(module, modules) == [module] else f"^{re.escape(module)}": as_int(value)
        for module, value in values.items()
    }


def _meant_by(pattern: str, modules: Iterable[str]) -> list[str]:
    """Returns the modules that a pattern's key matches, or none if it is no valid expression."""
    try:
        expression = end_of_name(pattern)
    except re.error:
        return []
    return [module for module in modules if expression.match(module)]


def _targets(modules: Collection[str], model: nn.Module | None) -> dict[str, Any]:
    """Returns PEFT's settings that target these modules, and no others of the model.

    They are the last parts of the names with the numbers of the layers if that is enough. They are
    the full names if several modules of a layer have the same last part, or if the modules are not
    all adapted in the same layers. If a full name is also the end of another module's name, they
    are one regular expression.
    """
    told = _targets_by_name(modules) if modules else {"target_modules": []}
    others = {name for name, _ in model.named_modules()} - set(modules) if model else ()
    named = told | {"target_modules": frozenset(told["target_modules"])}  # found at once in a set
    if any(is_targeted(named, name) for name in others):
        return {"target_modules": "|".join(re.escape(name) for name in sorted(modules))}
    return told


def _targets_by_name(modules: Iterable[str]) -> dict[str, list]:
    layers: dict[str, set[int]] = {}
    for module in modules:
        number, last = layer_of(module), module.rpartition(".")[2]
        if number is None or not in_known_backbone(module) or last in AMBIGUOUS:
            return {"target_modules": sorted(modules)}
        layers.setdefault(last, set()).add(number)
    first, *others = layers.values()
    if any(numbers != first for numbers in others):
        return {"target_modules": sorted(modules)}
    return {"target_modules": sorted(layers), "layers_to_transform": sorted(first)}
