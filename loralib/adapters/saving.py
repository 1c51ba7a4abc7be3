"""Extracts an adapter from any model with LoRA layers, and writes it.

lora.save_adapter(model, "my_adapter")                   a folder that PEFT opens too
lora.save_adapter(model, "my_adapter.safetensors")       one file, with all that is known
"""

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import as_names, as_path, as_text, check_model
from ..errors import CheckpointError, NeedsMergingError
from ..experts import AdaptedStack
from ..functional import variant_of
from ..in_place import replaced
from ..initialization import starts_from_weight
from ..layers import ConvLoRA
from ..lora_layer import LoRALayer, is_update_computed, lora_layers
from ..model_checks import (
    check_no_peft_layers,
    check_there,
    check_unsharded,
    tensors_of,
    weights_with_updates,
)
from ..quantized_layers import QuantizedLayer, check_unpacked
from ..stacks import stacked_weights
from ..steps import trained_along, was_trained_along
from ..targets import first_names, other_places
from ..text import counted, in_short, module_label
from ..trained import is_never_frozen, noted, untied_from
from ..wrappers import without_wrappers
from ..zero3 import check_gathered, with_shapes
from .adapter import LORA, Adapter, base_biases, lora_metadata
from .configs import setting_of
from .families import in_known_backbone
from .fingerprint import fingerprint_without
from .formats import format_of_path, write_checked_adapter
from .loading import lora_settings, takes_dropout
from .metadata import LoraMetadata
from .peft import NAMES_OF_EXPERTS, REFUSED_IN, REFUSED_NAMES, peft_difference

logger = logging.getLogger(__name__)

# How errors tell users to save a whole model. A pickled module would break when a class is renamed.
_SAVED_WHOLE = "torch.save(model.state_dict(), …)"


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
            PEFT's format, which must be new. Other files' suffixes (``.pth``) are refused.
        format: one of `loralib.adapters.formats.FORMATS`, if the path does not tell it.
        base: the base's name or path, for the metadata. By default the one in the model's config.
        task: the name of the task that the adapter was trained for.
        labels: the names of the classes that the head's outputs stand for.

    Returns:
        Remarks that the user should see, one line each, as `write_adapter` returns them.

    Raises:
        ValueError: the model has no LoRA layers, has PEFT's layers as well, or is sharded. Or a
            module with LoRA or a trained parameter is offloaded, or has been quantized since. Or
            bitsandbytes has packed a layer for evaluation. Or base, task or labels are invalid.
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
        for remark_on in (
            _base_besides,
            _lost_base,
            _other_labels,
            _left_behind,
            _replaced,
            _without_effect,
            _of_several_dropouts,
            _of_frozen_and_trained_A,
            *((_taken_for_experts, _refused_by_peft) if format == "peft" else ()),
        ):
            remark = remark_on(plain, adapter)
            if remark is not None:
                logger.warning("%s: %s", adapter.source, remark)
                remarks.append(remark)
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
        raise ValueError(
            f"{type(model).__name__} has no LoRA to save: add_lora and load_adapter add it, merge "
            "and remove_lora remove it"
        )
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
    besides, untied = _trained_besides(model, state), untied_from(model)
    check_there(weights_with_updates(model, but_for=QuantizedLayer), "it is saved")
    check_there(tensors_of(model, besides), "it is saved")
    check_gathered(tensors_of(model, besides), "it is saved")
    second = _second_names(model)
    updates = {n for n in state if LORA.part in n and n.rpartition(".")[0] not in second}
    saved = updates | besides
    tensors = {n: t.detach() for n, t in state.items() if n in saved}
    _check_frozen(model, tensors)
    settings: dict[str, Any] = lora_settings(model)
    seen = lora_metadata(tensors, settings["rank"], settings["alpha"])
    metadata = LoraMetadata(
        **settings,
        dropout=_dropout(layers) or None,
        bias=seen.bias,
        base=as_text("base", base, "roberta-base") or _name_in_config(model),
        base_fingerprint=fingerprint_without(model, besides | untied),
        task=as_text("task", task, "mnli"),
        labels=None if labels is None else as_names("labels", labels),
        separate=bool(untied) or None,
    )
    return Adapter(tensors, metadata, source=type(model).__name__)


def _check_frozen(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Checks that no parameters of a registered family's backbone are trained, except biases."""
    biases = base_biases(tensors)
    base = [n for n in tensors if in_known_backbone(n) and LORA.part not in n and n not in biases]
    if base:
        raise CheckpointError(
            f"{type(model).__name__}: {in_short(base, at_most=1)} of the base is trained, and no "
            "adapter holds it: if nothing has changed it yet, call mark_only_lora_as_trainable, "
            f"requires_grad_(True) on the head, and save again; else {_SAVED_WHOLE}"
        )


def _other_labels(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if the number of labels differs from the outputs of every head."""
    labels = adapter.lora.labels
    outputs = {
        name: module.out_features
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.weight" in adapter.tensors
    }
    of_one_logit = 1 in outputs.values() and labels is not None and len(labels) == 2
    if not labels or not outputs or len(labels) in outputs.values() or of_one_logit:
        return None
    last = next(reversed(outputs))
    return (
        f"the adapter has {counted(len(labels), 'label')}, but {module_label(last)} has "
        f"{counted(outputs[last], 'output')}: a bank takes it only with one label per output"
    )


def _base_besides(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if an adapter holds most of its base, which was never frozen."""
    of_lora = {id(weight) for _, weight in weights_with_updates(model)}
    base = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if LORA.part not in name
        and id(parameter) not in of_lora
        and not isinstance(parameter, nn.parameter.UninitializedParameter)
    }
    held = (base.keys() & adapter.tensors.keys()) - noted(model).keys()
    size = sum(base[name] for name in held)
    # A head is a small part of the tensors, and biases are a small part of the numbers. If only
    # these are trained, the rest was frozen on purpose. A base that was not frozen is most of both,
    # even if one of its tables was frozen.
    is_most = 2 * size > sum(base.values()) and 4 * len(held) > 3 * len(base)
    if not is_most or not is_never_frozen(model, base):
        return None
    return (
        f"holds {len(held)} tensors ({size:,} numbers) besides LoRA, most of the base, which was "
        "not frozen: if that is unintended, train again from the base; call "
        "mark_only_lora_as_trainable first, then requires_grad_(True) on what else is to be trained"
    )


def _lost_base(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if some of the base was trained with LoRA and frozen since.

    Neither the adapter nor the original base holds these values.
    """
    held = {id(p) for name, p in model.named_parameters() if name in adapter.tensors}
    lost = {name: p for name, p in trained_along(model).items() if id(p) not in held}
    if not lost:
        return None
    first, of_lora = next(iter(lost)), {id(weight) for _, weight in weights_with_updates(model)}
    which = f"{first} was" if len(lost) == 1 else f"{first} and {len(lost) - 1} more were"
    if of_lora & {id(parameter) for parameter in lost.values()}:  # no adapter can hold these
        way_out = (
            f"the adapter needs this exact base: {_SAVED_WHOLE} too, or train again from the base "
            "after mark_only_lora_as_trainable"
        )
    else:
        way_out = (
            "requires_grad_(True) on what belongs to it, such as a head, and save again; else "
            f"{_SAVED_WHOLE} too, or train again"
        )
    return f"{which} trained along with LoRA but frozen now, so not saved: {way_out}"


def _left_behind(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if the adapter lacks running statistics, which training mode changes."""
    normed = [
        name
        for name, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None
        and f"{name}.running_mean" not in adapter.tensors
    ]
    if not normed:
        return None
    have_parameters = all(any(True for _ in model.get_submodule(n).parameters()) for n in normed)
    these, them = ("this module", "it") if len(normed) == 1 else ("these modules", "them")
    return (
        f"the running statistics of {counted(len(normed), 'module')} "
        f"({in_short(normed, at_most=1)}), which training changes, are not saved: keep {these} in "
        "eval()" + (f", or name {them} in modules_to_train" if have_parameters else "")
    )


def _replaced(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if modules with LoRA have been replaced by others, which have none."""
    lost = replaced(model)
    if not lost:
        return None
    return (
        f"the LoRA of {counted(len(lost), 'module')} ({in_short(lost, at_most=4)}) is lost: "
        "replaced since add_lora, as by resize_token_embeddings or dequantize; adapt the model "
        "after that"
    )


def _without_effect(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if updates are zero.

    They were not trained, or the model does not call these layers.
    """
    layers = lora_layers(model)
    zero = [name for name, layer in layers.items() if _is_zero(layer)]
    if not zero:
        return None
    return (
        f"the updates of {len(zero)} of {len(layers)} modules are zero "
        f"({in_short(zero, at_most=1)}): they were not trained, as by an optimizer from before "
        "add_lora, or the model does not call these modules but reads their weights, and then LoRA "
        "has no effect there"
    )


@torch.no_grad()
def _is_zero(layer: LoRALayer) -> bool:
    """Returns whether an update does not change its weight, as before training."""
    if starts_from_weight(layer.initialization):
        pairs = (layer.lora_A, layer.lora_A_start), (layer.lora_B, layer.lora_B_start)
        is_zero = all(torch.equal(half, start) for half, start in pairs)
    else:
        is_zero = not (layer.lora_A.any() and layer.lora_B.any())
    if not is_zero or not variant_of(layer.variant).has_magnitude:
        return is_zero
    gain = layer._delta().gain(layer._as_matrix(layer.frozen_weight))
    return gain is None or torch.allclose(gain, torch.ones_like(gain), rtol=0, atol=1e-6)


def _of_several_dropouts(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if layers differ in dropout, as files record only one value."""
    layers = lora_layers(model)
    dropouts = {_dropout_of(layer) for n, layer in layers.items() if takes_dropout(model, n, layer)}
    if len(dropouts) < 2:
        return None
    return (
        f"its layers have dropouts from {min(dropouts):g} to {max(dropouts):g}, but only "
        f"{max(dropouts):g} is recorded: if training continues from the file, all layers get that"
    )


def _of_frozen_and_trained_A(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if A is frozen in some of the layers only, which files cannot record."""
    frozen = {getattr(layer, "freeze_A", False) for layer in lora_layers(model).values()}
    if len(frozen) < 2:
        return None
    return (
        "A is frozen in some of its layers, which is not recorded: if training continues from the "
        "file, every A is trained"
    )


def _taken_for_experts(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if PEFT may leave out updates because it takes their modules for experts.

    In upstream's Transformers 5, all experts of a layer are one parameter in some models. For these
    models, PEFT (0.21) replaces targets that have the experts' former names, whatever modules they
    name.
    """
    if not any(name.endswith("gate_up_proj") for name in stacked_weights(model)):
        return None
    taken = [name for name in lora_layers(model) if name.rpartition(".")[2] in NAMES_OF_EXPERTS]
    if not taken:
        return None
    return (
        f"PEFT with Transformers 5 may mistake {in_short(taken, at_most=2)} for experts, and "
        "leave out their updates or not open the folder: compare its outputs with this model's; "
        f"or, for PEFT, merge, or adapt no modules called {_last_names(taken)}"
    )


def _refused_by_peft(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if PEFT refuses modules because of their names and the model's type."""
    kind = setting_of(getattr(model, "config", None), "model_type")
    refused = [name for name in lora_layers(model) if name.rpartition(".")[2] in REFUSED_NAMES]
    if kind not in REFUSED_IN or not refused:
        return None
    return (
        f"PEFT refuses to adapt {in_short(refused, at_most=2)} in models of the type {kind}, so "
        "that load_adapter alone opens the folder: for PEFT, merge, or adapt no modules called "
        f"{_last_names(refused)}"
    )


def _last_names(names: Iterable[str]) -> str:
    """Formats the last parts of names, each once."""
    return in_short(dict.fromkeys(name.rpartition(".")[2] for name in names), quote="'")


def _dropout_of(layer: LoRALayer) -> float:
    return getattr(layer.lora_dropout, "p", 0.0)


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
            f"lora.merge(model), then {_SAVED_WHOLE}; or train again from the base, and call "
            "mark_only_lora_as_trainable before that, because now it is too late"
        )
    return (
        "call mark_only_lora_as_trainable and save again, if nothing has changed it yet; else "
        f"lora.merge(model), then {_SAVED_WHOLE}"
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
    owners = {name.rpartition(".")[0] for name in trained - biases}
    return biases | {
        name for name in state if name.rpartition(".")[0] in owners and LORA.part not in name
    }


def _second_names(model: nn.Module) -> set[str]:
    """Returns those names of modules that are not the module's first name in the model."""
    return {name for name, first in first_names(model).items() if name != first}


def _dropout(layers: dict[str, LoRALayer]) -> float:
    """Returns the largest dropout of the layers. Embeddings and attentions have none."""
    return max(map(_dropout_of, layers.values()))


def _name_in_config(model: nn.Module) -> str | None:
    """Returns the name of the checkpoint in the config of upstream's models."""
    name = setting_of(getattr(model, "config", None), "_name_or_path")
    return name if isinstance(name, str) and name else None


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
            reason = f"the same module as {others[place]}, and PEFT adapts only one of the two"
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
