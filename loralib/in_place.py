"""Modules that become LoRA layers in place, and plain ones again.

A module changes its class and gets the attributes of the new one. It stays the same object, so that
its tensors, hooks and names stay as well, and so does whatever refers to it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from .adapted_layers import AdaptedProjection
from .lora_layer import LoRALayer, lora_layers
from .quantized_layers import keep_unpacked, let_pack
from .wrappers import drop_set_forward, has_own_forward, own_forward_message


class _Turned(NamedTuple):
    """What a turned module remembers: its class before, and the attributes that it got since."""

    before: type[nn.Module]
    added: frozenset[str]


@contextmanager
def turning(module: nn.Module) -> Iterator[None]:
    """Within this block a module is turned, and gets the attributes that `turn_back` takes away.

    Those that somebody sets on it later are theirs, and stay.
    """
    names = _names(module)
    try:
        yield
    finally:
        if was_turned(module):
            turned = vars(module)["_turned"]
            added = turned.added | (_names(module) - names)
            vars(module)["_turned"] = turned._replace(added=added)


def turn_into(module: nn.Module, kind: type[nn.Module]) -> None:
    """Makes a module one of another class, in a `turning` block that adds what that class needs."""
    drop_set_forward(module)
    vars(module)["_turned"] = _Turned(class_of(module), frozenset())
    set_class(module, kind)


def turn_back(module: nn.Module) -> None:
    """Undoes what was done in `turning` blocks: the class, and the attributes."""
    drop_set_forward(module)
    turned = vars(module)["_turned"]
    for attributes in _attributes(module):
        for name in attributes.keys() & turned.added:
            del attributes[name]
    set_class(module, turned.before)


def was_turned(module: nn.Module) -> bool:
    """Whether this module is a LoRA layer that was a plain one before."""
    return "_turned" in vars(module)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, below the one that PyTorch's parametrizations put over it."""
    return type(module).__bases__[0] if _has_class_over(module) else type(module)


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Gives a module another class in the place of `class_of` it; its parametrizations stay."""
    if _has_class_over(module):
        over = {n: v for n, v in vars(type(module)).items() if n not in ("__dict__", "__weakref__")}
        kind = type(f"Parametrized{kind.__name__}", (kind,), over)
    module.__class__ = kind


def _has_class_over(module: nn.Module) -> bool:
    """Whether a module has such a class; one's own may have parts of that name, and properties."""
    theirs = vars(type(module)).get("__getstate__")  # a metaclass may say another __module__
    is_theirs = getattr(theirs, "__module__", None) == parametrize.__name__
    return is_theirs and parametrize.is_parametrized(module)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, before it was turned."""
    return vars(module)["_turned"].before if was_turned(module) else type(module)


def is_in_place(module: nn.Module) -> bool:
    """Whether this module is a LoRA layer that came into its model by `add_lora`."""
    return was_turned(module) or isinstance(module, AdaptedProjection)


def _attributes(module: nn.Module) -> tuple[dict, ...]:
    return vars(module), module._parameters, module._buffers, module._modules


def _names(module: nn.Module) -> frozenset[str]:
    return frozenset().union(*_attributes(module))


def merge_in_place(model: nn.Module) -> None:
    """Turns a model's modules back; each gets a new weight, with its update merged into it.

    Raises:
        ValueError: as `turn_all_back`.
    """
    _check_turnable(model)  # before a weight is read that may be gone
    parts = model.modules()
    layers: list[Any] = [m for m in parts if isinstance(m, LoRALayer) and is_in_place(m)]
    merged = [
        (layer.base, layer.frozen_name, _merged_parameter(layer)) for layer in layers if layer.r > 0
    ]
    turn_all_back(model)
    for base, name, parameter in merged:
        setattr(base, name, parameter)


def turn_all_back(model: nn.Module) -> None:
    """Turns a model's modules back, and lets its encoders take their fast path again.

    Raises:
        ValueError: since it was adapted, the weight or the update of a module has been parametrized
            or pruned, or the module has got a forward of its own.
    """
    _check_turnable(model)
    for module in list(model.modules()):
        if was_turned(module):
            turn_back(module)
    take_fast_path(model)


def _check_turnable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not is_in_place(module) or not isinstance(module, LoRALayer):
            continue
        base = module.base
        is_plain = module.r == 0 or base._parameters.get(module.frozen_name) is not None
        if not is_plain or _is_update_parametrized(base):
            raise ValueError(
                f"{name or 'the layer'} has been parametrized or pruned since it was adapted: "
                "undo that first (parametrize.remove_parametrizations, prune.remove)"
            )
        if has_own_forward(base):
            is_parameters = isinstance(module, AdaptedProjection)  # of the module around it
            raise ValueError(
                own_forward_message(
                    name.rpartition(".")[0] if is_parameters else name,
                    base,
                    "as set by hooks that offload weights: remove these first (accelerate's "
                    "remove_hook_from_submodules)",
                    "set since it was adapted, which may still call the LoRA layer when it is gone",
                )
            )


def _is_update_parametrized(module: nn.Module) -> bool:
    """Whether a tensor that a turned module has got with its update has been parametrized."""
    return any(parametrize.is_parametrized(module, name) for name in vars(module)["_turned"].added)


def merged_copy(layer: nn.Module) -> nn.Module:
    """The plain module that a turned layer was, with the update merged into its weight."""
    copied = copy.deepcopy(layer)
    merge_in_place(copied)
    return copied


def _merged_parameter(layer: LoRALayer) -> nn.Parameter:
    return nn.Parameter(layer._merge(), requires_grad=layer.frozen_weight.requires_grad)


# ------------------------------------------------------------------------------------------------
# PyTorch's own encoder
# ------------------------------------------------------------------------------------------------

# In evaluation these compute with their children's weights, and would pass over an update. What
# keeps them from it, and its value for that.
_FAST_PATH: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def leave_fast_path(model: nn.Module) -> None:
    """Lets PyTorch's encoders call their children, where these have LoRA.

    And keeps quantized layers of a model with LoRA from the fast path that bitsandbytes has.
    """
    if lora_layers(model):
        keep_unpacked(model)
    for module in model.modules():
        for kind, (name, off) in _FAST_PATH.items():
            if not isinstance(module, kind) or "_fast_path" in vars(module):
                continue
            if any(isinstance(child, LoRALayer) for child in module.modules()):
                vars(module)["_fast_path"] = getattr(module, name)
                setattr(module, name, off)


def take_fast_path(model: nn.Module) -> None:
    """Undoes what was done for LoRA in PyTorch's encoders, and in quantized layers."""
    let_pack(model)
    for module in model.modules():
        for kind, (name, _) in _FAST_PATH.items():
            if isinstance(module, kind) and "_fast_path" in vars(module):
                setattr(module, name, vars(module).pop("_fast_path"))
