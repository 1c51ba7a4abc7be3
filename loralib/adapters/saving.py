"""Extracts an adapter from any model with LoRA layers, and writes it.

lora.save_adapter(model, "my_adapter")                   a folder that PEFT opens too
lora.save_adapter(model, "my_adapter.safetensors")       one file, with all that is known
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import as_names, as_path, as_text, check_model
from ..errors import CheckpointError, NeedsMergingError
from ..experts import AdaptedStack
from ..in_place import replaced
from ..layers import ConvLoRA
from ..lora_layer import LoRALayer, is_update_computed, lora_layers
from ..model_checks import (
    check_no_peft_layers,
    check_there,
    check_unsharded,
    tensors_of,
    weights_with_updates,
)
from ..module_names import first_names, other_places, owner_of
from ..quantized_layers import QuantizedLayer, check_unpacked
from ..steps import was_trained_along
from ..text import counted, in_short
from ..trained import noted
from ..wrappers import without_wrappers
from ..zero3 import check_gathered, with_shapes
from .adapter import LORA, Adapter, base_biases, bias_of
from .families import family_of, in_known_backbone, top_module
from .fingerprint import fingerprint_without
from .formats import format_of_path, write_checked_adapter
from .metadata import LoraMetadata
from .model_settings import dropout_of, lora_settings, setting_of
from .peft import HEADS_OF_TASK, TASK_OF_HEAD, head_of_class, peft_difference
from .saving_warnings import SAVED_WHOLE, saving_warnings

logger = logging.getLogger(__name__)


def save_adapter(
    model: nn.Module,
    path: str | os.PathLike,
    format: str | None = None,
    *,
    base: str | os.PathLike | None = None,
    task: str | None = None,
    labels: Sequence[str] | None = None,
) -> list[str]:
    """Writes the trained part of a model with LoRA layers, see `adapter_of`.

    Args:
        model: one of this project's models, one that `add_lora` has adapted, or any other model
            with LoRA layers.
        path: a file, ``.safetensors`` for this project's format and ``.bin`` or ``.pt`` for the
            release's. An existing file is replaced. A path without such a suffix is a folder in
            PEFT's format, which must be new or empty. Other files' suffixes (``.pth``) are refused.
        format: one of `loralib.adapters.formats.FORMATS`, if the path does not tell it.
        base: the base's name or path, for the metadata. By default the one in the model's config.
        task: the name of the task that the adapter was trained for.
        labels: the names of the classes that the head's outputs stand for.

    Returns:
        Remarks that the user should see, one line each, as `write_adapter` returns them.

    Raises:
        TypeError: the model is not a module, as if the arguments are swapped.
        ValueError: the model has no LoRA layers, has PEFT's layers as well, or is sharded. Or a
            module with LoRA or a trained parameter is offloaded, or has been quantized since. Or
            bitsandbytes has packed a layer for evaluation. Or format, base, task or labels are
            invalid.
        NeedsMergingError: the format cannot express the adapter.
        CheckpointError: the adapter is not sound, or the folder exists already.
    """
    check_model(model, path)
    path = as_path("the path to write to", path)
    if format is None:
        format = format_of_path(path)
    with without_wrappers(model) as plain, with_shapes(plain):
        adapter = _adapter_of(plain, base, task, labels)
        _check_buffers(plain, adapter)
        if format == "peft":
            _check_peft_adapts(plain, adapter.source)
        remarks = write_checked_adapter(path, adapter, format, plain)
        for warning in saving_warnings(plain, adapter, format):
            logger.warning("%s: %s", adapter.source, warning)
            remarks.append(warning)
        return remarks


def adapter_of(
    model: nn.Module,
    *,
    base: str | os.PathLike | None = None,
    task: str | None = None,
    labels: Sequence[str] | None = None,
) -> Adapter:
    """Returns the trained part of a model: its LoRA, and the parameters that are trained besides.

    If a module's parameters are trained, as those of a head are, all of its tensors are taken,
    including buffers. If only its bias is trained, the bias is taken. The tensors share their
    memory with the model's.

    Raises:
        ValueError: the model has no LoRA layers or is sharded. Or a module with LoRA or a trained
            parameter is offloaded, or has been quantized since. Or bitsandbytes has packed a layer.
        CheckpointError: its LoRA layers are of several kinds, and an adapter can record only one.
            Or the weight of a LoRA layer is trained as well.
    """
    check_model(model)
    with without_wrappers(model) as plain, with_shapes(plain):
        return _adapter_of(plain, base, task, labels)


def _adapter_of(
    model: nn.Module,
    base: str | os.PathLike | None,
    task: str | None,
    labels: Sequence[str] | None,
) -> Adapter:
    layers = lora_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no LoRA to save: {_why_without_lora(model)}")
    check_no_peft_layers(model)
    check_unsharded(model, "it is saved")
    check_unpacked(
        model,
        "save the part that add_lora was given; or load the model again, and give all of it to "
        "add_lora before it is evaluated",
    )
    state = model.state_dict()
    _check_layers(layers)
    _check_names(model, layers, state)
    besides = _trained_besides(model, state)
    check_there(weights_with_updates(model, but_for=QuantizedLayer), "it is saved")
    check_there(tensors_of(model, besides), "it is saved")
    check_gathered(tensors_of(model, besides), "it is saved")
    second = _second_names(model)
    updates = {n for n in state if LORA.part in n and n.rpartition(".")[0] not in second}
    held = updates | besides
    saved = {name: value for name, value in state.items() if name in held}
    _check_tensors(model, saved)
    tensors = {name: tensor.detach() for name, tensor in saved.items()}
    _check_frozen(model, tensors)
    metadata = LoraMetadata(
        **lora_settings(model),
        dropout=max(map(dropout_of, layers.values())) or None,
        bias=bias_of(tensors),
        base=as_text("base", base, "roberta-base") or _name_in_config(model),
        base_fingerprint=fingerprint_without(model, besides),
        task=as_text("task", task, "mnli"),
        head=_head_of(model, state, tensors),
        labels=None if labels is None else as_names("labels", labels),
        places=_places_of(model, tensors),
    )
    return Adapter(tensors, metadata, source=type(model).__name__)


def _why_without_lora(model: nn.Module) -> str:
    lost = replaced(model)
    if not lost:
        return "add_lora and load_adapter add it, merge and remove_lora remove it"
    return (
        f"that of {counted(len(lost), 'module')} ({in_short(lost, at_most=4)}) is lost: replaced "
        "since add_lora, as by a quantization; replace modules before add_lora, or after merge"
    )


def _check_layers(layers: dict[str, LoRALayer]) -> None:
    for name, layer in layers.items():
        if isinstance(layer, ConvLoRA):
            raise CheckpointError(
                f"{name} is a loralib {type(layer).__name__}, whose factors are in the release's "
                "shapes, which no adapter format describes: save them with lora_state_dict, or let "
                "add_lora adapt a plain convolution"
            )
        if is_update_computed(layer):
            raise CheckpointError(
                f"the update of {name} has been parametrized or pruned: undo that first "
                "(parametrize.remove_parametrizations, prune.remove)"
            )
        weight = getattr(layer, "frozen_weight", None)  # layers of other packages may lack it
        if weight is not None and weight.requires_grad:
            raise CheckpointError(
                f"the weight of {name} is trained as well as its LoRA, and adapters do not hold "
                f"it: {_instead_of_saving(weight)}"
            )


def _check_names(model: nn.Module, layers: dict[str, LoRALayer], state: Mapping[str, Any]) -> None:
    """Checks that a model's state dict has the names of its modules, by which tensors are saved."""
    for name, layer in layers.items():
        if "lora_A" in layer._parameters and f"{name}.lora_A" not in state:
            raise CheckpointError(
                f"the state_dict() of {type(model).__name__} has other names than its modules: it "
                f"lacks {name}.lora_A; save the model inside that wrapper instead"
            )


def _instead_of_saving(weight: torch.Tensor) -> str:
    """Returns advice for a model in which the weight of a LoRA layer is not frozen."""
    if was_trained_along(weight):
        return (
            f"lora.merge(model), then {SAVED_WHOLE}; or train again from the base, and call "
            "mark_only_lora_as_trainable before that, because now it is too late"
        )
    return (
        "call mark_only_lora_as_trainable and save again, if nothing has changed it yet; else "
        f"lora.merge(model), then {SAVED_WHOLE}"
    )


def _trained_besides(model: nn.Module, state: Collection[str]) -> set[str]:
    """Returns the names of what is or was trained besides LoRA, and of what goes with it.

    All other tensors of a module go with its trained parameters, unless only its bias is trained. A
    weight that modules share is listed under all of its names.
    """
    earlier, second = noted(model), _second_names(model)
    parameters = {
        name: p
        for name, p in model.named_parameters(remove_duplicate=False)
        if LORA.part not in name and name.rpartition(".")[0] not in second
    }
    meant = {id(p) for name, p in parameters.items() if p.requires_grad or name in earlier}
    trained = {name for name, p in parameters.items() if id(p) in meant}
    biases = base_biases(trained)
    owners = set(map(owner_of, trained - biases))
    return biases | {name for name in state if owner_of(name) in owners and LORA.part not in name}


def _second_names(model: nn.Module) -> set[str]:
    """Returns those names of modules that are not the module's first name in the model."""
    return {name for name, first in first_names(model).items() if name != first}


def _places_of(model: nn.Module, tensors: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the other places of the modules that have these tensors, or contain those modules."""
    owners = set(map(owner_of, tensors))
    return {
        first: tuple(others)
        for first, others in other_places(model).items()
        if any(f"{owner}.".startswith(f"{first}.") for owner in owners)
    }


def _check_tensors(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Checks that a state holds only tensors. A module's `get_extra_state` may give anything."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{type(model).__name__}: {name} is not a tensor (its get_extra_state gives a "
                f"{type(value).__name__}), and no adapter can hold it: if nothing has changed that "
                f"module yet, freeze it, and save again; else {SAVED_WHOLE}"
            )


def _check_frozen(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Checks that no parameters of a registered family's backbone are trained, except biases."""
    biases = base_biases(tensors)
    base = [n for n in tensors if in_known_backbone(n) and LORA.part not in n and n not in biases]
    if base:
        raise CheckpointError(
            f"{type(model).__name__}: {base[0]} of the base is trained, and no adapter holds it: "
            "if nothing has changed it yet, call mark_only_lora_as_trainable, "
            f"requires_grad_(True) on the head, and save again; else {SAVED_WHOLE}"
        )


def _name_in_config(model: nn.Module) -> str | None:
    """Returns the name of the checkpoint in the config of upstream's models."""
    name = setting_of(getattr(model, "config", None), "_name_or_path")
    return name if isinstance(name, str) and name else None


def _head_of(
    model: nn.Module, state: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> str | None:
    """Returns the task of the head of upstream's models, told by the class's name, or None.

    In a registered family the tensors tell it. PEFT saves a classifier as a whole, so it is not
    said of an adapter that holds less.

    Args:
        model: the model.
        state: its state dict.
        saved: the adapter's tensors.
    """
    if family_of(saved) or not setting_of(getattr(model, "config", None), "model_type"):
        return None
    head = head_of_class(type(model).__name__)
    if head not in TASK_OF_HEAD:
        return None
    wholes = HEADS_OF_TASK.get(TASK_OF_HEAD[head])
    own = {name for name in state if top_module(name) in (wholes or ())}
    return head if wholes is None or (own and own <= saved.keys()) else None


def _check_buffers(model: nn.Module, adapter: Adapter) -> None:
    """Refuses buffers with infinities, such as masks. NaN come from a training that diverged."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in adapter.tensors or LORA.part in name or buffer.isnan().any():
            continue
        if not buffer.isfinite().all():
            raise CheckpointError(
                f"{adapter.source}: the buffer {name} holds infinities, which adapters may not "
                "hold: register it with persistent=False, if the model creates it itself"
            )


def _check_peft_adapts(model: nn.Module, source: str) -> None:
    """Refuses layers that PEFT would adapt in another way, if the tensors do not show it."""
    others = other_places(model)
    for name, layer in lora_layers(model).items():
        reason = _not_as_in_peft(model, name)
        place = name.rpartition(".")[0] if isinstance(layer, AdaptedStack) else name
        if place in others:
            reason = f"the same module as {others[place][0]}, and PEFT adapts only one of the two"
        if reason:
            raise NeedsMergingError(source, f"{name} is {reason}")


def _not_as_in_peft(model: nn.Module, name: str) -> str | None:
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.MultiheadAttention) and not owner._qkv_same_embed_dim:
        return (
            "part of an nn.MultiheadAttention with inputs of different sizes, which PEFT does not "
            "adapt"
        )
    if isinstance(owner, nn.MultiheadAttention) and getattr(owner, "r", 0) == 0:
        return "adapted without its nn.MultiheadAttention, which PEFT does not do"
    return peft_difference(model.get_submodule(name))
