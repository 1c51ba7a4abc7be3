"""What a user should know of an adapter that is saved: what is lost, or was probably unintended."""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..functional import variant_of
from ..in_place import replaced
from ..initialization import starts_from_weight
from ..lora_layer import LoRALayer, lora_layers
from ..model_checks import weights_with_updates
from ..modules_to_train import can_be_trained
from ..stacks import stacked_weights
from ..steps import trained_along
from ..text import counted, in_short, module_label
from ..trained import changed_buffers, is_never_frozen, is_unchanged, noted
from .adapter import LORA, Adapter
from .model_settings import dropout_of, setting_of, takes_dropout
from .peft import NAMES_OF_EXPERTS, REFUSED_IN, REFUSED_NAMES
from .peft_writing import saved_modules

# How errors tell users to save a whole model. A pickled module would break when a class is renamed.
SAVED_WHOLE = "torch.save(model.state_dict(), …)"


def saving_warnings(model: nn.Module, adapter: Adapter, format: str) -> Iterator[str]:
    """Yields the warnings about an adapter that was taken from a model, one line each.

    Args:
        model: the model.
        adapter: the adapter, as `adapter_of` returned it.
        format: the format that it is written in.
    """
    for warning_of in (
        _base_besides,
        _lost_base,
        _other_labels,
        _left_behind,
        _changed_buffers,
        _replaced,
        _without_effect,
        _of_several_dropouts,
        _of_frozen_and_trained_A,
        *((_taken_for_experts, _refused_by_peft, _not_whole_for_peft) if format == "peft" else ()),
    ):
        warning = warning_of(model, adapter)
        if warning is not None:
            yield warning


def _base_besides(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if an adapter holds most of its base, which was never frozen."""
    of_lora = {id(weight) for _, weight in weights_with_updates(model)}
    base = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if LORA.part not in name and id(parameter) not in of_lora and not is_lazy(parameter)
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
            f"the adapter needs this exact base: {SAVED_WHOLE} too, or train again from the base "
            "after mark_only_lora_as_trainable"
        )
    else:
        way_out = (
            "requires_grad_(True) on what belongs to it, such as a head, and save again; else "
            f"{SAVED_WHOLE} too, or train again"
        )
    return f"{which} trained along with LoRA but frozen now, so not saved: {way_out}"


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


def _left_behind(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if the adapter lacks running statistics, which training mode changes.

    Those that have not changed are the base's: of frozen norms, and of norms in evaluation mode.
    """
    normed = [
        name
        for name, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None
        and f"{name}.running_mean" not in adapter.tensors
        and not is_unchanged(module, "running_mean")
    ]
    if not normed:
        return None
    these = "this module" if len(normed) == 1 else "these modules"
    return (
        f"the running statistics of {counted(len(normed), 'module')} "
        f"({in_short(normed, at_most=1)}), which training changes, are not saved: "
        f"{_ways_out(model, normed, these)}"
    )


def _changed_buffers(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if the adapter lacks other buffers that have changed in training.

    Examples are the codebook of a vector quantizer, and the vectors of a spectral norm.
    """
    changed = [
        name
        for name in changed_buffers(model)
        if name not in adapter.tensors
        and getattr(model.get_submodule(name.rpartition(".")[0]), "running_mean", None) is None
    ]
    if not changed:
        return None
    owners = {name.rpartition(".")[0] for name in changed}
    these = "its module" if len(owners) == 1 else "their modules"
    return (
        f"{counted(len(changed), 'buffer')} of the base ({in_short(changed, at_most=2)}) changed "
        f"since add_lora, as some do in training mode, and the base without these changes computes "
        f"something else: {_ways_out(model, owners, these)}; now, {SAVED_WHOLE} too; if the base "
        "was loaded after add_lora, there is nothing to do"
    )


def _ways_out(model: nn.Module, owners: Collection[str], these: str) -> str:
    """Returns advice on modules whose buffers change in training mode; `these` stands for them."""
    them = "it" if len(owners) == 1 else "them"
    modules = [model.get_submodule(name) for name in owners]
    is_possible = all(can_be_trained(module) and not lora_layers(module) for module in modules)
    also = f", or name {them} in modules_to_train" if is_possible else ""
    return f"keep {these} in eval(){also}"


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
    dropouts = {dropout_of(layer) for n, layer in layers.items() if takes_dropout(model, n, layer)}
    if len(dropouts) < 2:
        return None
    return (
        f"its layers have dropouts from {min(dropouts):g} to {max(dropouts):g}, but only "
        f"{max(dropouts):g} is recorded: if training continues from the file, all layers get that"
    )


def _of_frozen_and_trained_A(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if A is frozen in some of the layers only, which files cannot record."""
    frozen = {layer.freeze_A for layer in lora_layers(model).values()}
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


def _not_whole_for_peft(model: nn.Module, adapter: Adapter) -> str | None:
    """Returns a warning if PEFT looks in the folder for tensors that the adapter does not hold.

    PEFT takes all of each module whose name ends in one of `modules_to_save`, even if no dot is
    before it.
    """
    ends = tuple(saved_modules(adapter, model))
    looked_for = [
        name
        for name, module in model.named_modules()
        if name.endswith(ends)
        and any(f"{name}.{each}" not in adapter.tensors for each, _ in module.named_parameters())
    ]
    if not looked_for:
        return None
    return (
        f"PEFT looks for all of {in_short(looked_for, at_most=2)}, because it saves whole modules "
        "and knows them by the end of the name, so that load_adapter alone opens the folder: for "
        f"PEFT, merge, or name {'it' if len(looked_for) == 1 else 'them'} in modules_to_train, too"
    )


def _last_names(names: Iterable[str]) -> str:
    """Formats the last parts of names, each once."""
    return in_short(dict.fromkeys(name.rpartition(".")[2] for name in names), quote="'")
