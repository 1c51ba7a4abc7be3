"""Modules that become LoRA layers in place, and plain ones again.

A module changes its class and gets the attributes of the new one. It stays the same object, so that
its tensors, hooks and names stay as well, and so does whatever refers to it.
"""

import copy
from typing import Any, NamedTuple

from torch import nn

from .layers import LoRALayer


class _Before(NamedTuple):
    kind: type[nn.Module]
    names: frozenset[str]


def turn_into(module: nn.Module, kind: type[nn.Module]) -> None:
    """Makes a module one of another class; the caller adds what that class needs."""
    before = _Before(type(module), frozenset().union(*_attributes(module)))
    module.__class__ = kind
    vars(module)["_before"] = before


def turn_back(module: nn.Module) -> None:
    """Undoes `turn_into`: the class, and everything that was added since."""
    before = vars(module)["_before"]
    for attributes in _attributes(module):
        for name in attributes.keys() - before.names:
            del attributes[name]
    module.__class__ = before.kind


def was_turned(module: nn.Module) -> bool:
    """Whether this module is a LoRA layer that was a plain one before."""
    return "_before" in vars(module)


def _attributes(module: nn.Module) -> tuple[dict, ...]:
    return vars(module), module._parameters, module._buffers, module._modules


def merge_in_place(model: nn.Module) -> None:
    """Turns a model's modules back; each gets a new weight, with its update merged into it."""
    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, LoRALayer) and (was_turned(module) or hasattr(module, "owner"))
    ]
    merged = [
        (getattr(layer, "owner", layer), layer.frozen_name, _merged_parameter(layer))
        for layer in layers
        if layer.r > 0
    ]
    for layer in layers:
        if was_turned(layer):
            turn_back(layer)
    for owner, name, parameter in merged:
        setattr(owner, name, parameter)
    take_fast_path(model)


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
    """Lets PyTorch's encoders call their children, where these have LoRA."""
    for module in model.modules():
        for kind, (name, off) in _FAST_PATH.items():
            if not isinstance(module, kind) or "_fast_path" in vars(module):
                continue
            if any(isinstance(child, LoRALayer) for child in module.modules()):
                vars(module)["_fast_path"] = getattr(module, name)
                setattr(module, name, off)


def take_fast_path(model: nn.Module) -> None:
    """Undoes what was done for LoRA in PyTorch's encoders."""
    for module in model.modules():
        for kind, (name, _) in _FAST_PATH.items():
            if isinstance(module, kind) and "_fast_path" in vars(module):
                setattr(module, name, vars(module).pop("_fast_path"))
