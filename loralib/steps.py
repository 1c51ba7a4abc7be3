"""Records which parameters optimizers change along with LoRA, as attributes of those parameters.

Saving reads it to tell whether a base was trained along with LoRA, and layers ask for the latest
step to tell whether their merged copies still hold. A step knows no modules, so that parameters are
marked as LoRA's own, or as a weight beneath it. A copy of a model begins without this record.
"""

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

logger = logging.getLogger(__name__)

_UPDATE = "_is_of_lora"
_BENEATH = "_is_beneath_lora"
_STEPPED = "_version_when_stepped_with_lora"

# Steps of an optimizer without LoRA by which another one with it, which a loop may have as well and
# call less often, has made its own.
_PATIENCE = 10

# A new object with each step; at each new value of a number, a compiled step would be recompiled.
_latest_step = object()

# By the id of its weight, each layer with LoRA that there is in the process.
_layers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_idle_steps: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()


def latest_step() -> object:
    """What is another object after each step of any optimizer in the process.

    With it a merged copy is made again: fused optimizers change tensors, but not their versions.
    """
    return _latest_step


def mark_update(parameter: Tensor) -> None:
    """Marks a parameter as one of LoRA's own."""
    vars(parameter)[_UPDATE] = True


def mark_layer(layer: Any) -> None:
    """Marks the parameters of a `LoRALayer`, wherever they may be new objects; not if r = 0."""
    updates, weight = _updates(layer), _weight(layer)
    for parameter in updates:
        mark_update(parameter)
    if updates and weight is not None:
        vars(weight)[_BENEATH] = True
        if not _updates_above(weight):  # else a shallow copy's end would end the record
            _layers[id(weight)] = layer


def forget_steps(model: nn.Module) -> None:
    """Drops what optimizers did: the model, as it is now, is a base."""
    for parameter in model.parameters():
        for mark in (_STEPPED, _BENEATH):
            vars(parameter).pop(mark, None)


def trained_along(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters besides LoRA's for which `was_trained_along` is true, by name."""
    own = model.named_parameters()
    return {name: p for name, p in own if "lora_" not in name and was_trained_along(p)}


def was_trained_along(parameter: Tensor) -> bool:
    """Whether an optimizer has trained a parameter together with LoRA, or beneath it.

    False of one that has been written to since by another than that: it may be a base's again. What
    is written through ``.data`` cannot be told.
    """
    own = vars(parameter)
    return _STEPPED in own and own[_STEPPED] == parameter._version


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    """Notes what a step has changed along with LoRA, and warns of an optimizer without it.

    A step that is compiled notes nothing, but that it was made.
    """
    global _latest_step
    _latest_step = object()
    if torch.compiler.is_compiling() or not _layers:
        return
    groups = [group for group in optimizer.param_groups if not _is_still(group)]
    stepped = [p for group in groups for p in group["params"] if p.grad is not None]
    is_along = any(_UPDATE in vars(p) for p in stepped)
    for parameter in stepped:
        own = vars(parameter)
        if is_along or _BENEATH in own:
            own[_STEPPED] = parameter._version
    if not is_along:
        _warn_of_idle(optimizer)


def _is_still(group: Mapping[str, Any]) -> bool:
    """Whether the rate of an optimizer's group is zero; of a tensor elsewhere it is unknown."""
    rate = group.get("lr")
    if isinstance(rate, Tensor) and not rate.is_cpu:  # it would wait for a device
        return False
    return bool(rate == 0)


def _warn_of_idle(optimizer: Optimizer) -> None:
    """Warns of an optimizer whose steps leave LoRA as it is, as one from before add_lora does.

    Not where another one has trained LoRA of these layers, nor where nothing is to train it.
    """
    steps = _idle_steps.get(optimizer, 0) + 1
    if steps > _PATIENCE:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    frozen = [p for p in held if _BENEATH in vars(p) and not p.requires_grad]
    updates = [p for weight in frozen for p in _updates_above(weight) if p.requires_grad]
    is_known = {id(p) for p in held} & {id(p) for p in updates}
    if not updates or is_known or any(_STEPPED in vars(p) for p in updates):
        return
    _idle_steps[optimizer] = steps
    if steps == _PATIENCE:
        logger.warning(
            "%s holds frozen weights that have LoRA, and none of LoRA's parameters, which no step "
            "has trained so far: if it was made before add_lora, make it again; otherwise give it "
            "LoRA's parameters as well",
            type(optimizer).__name__,
        )


def _updates_above(weight: Tensor) -> list[Tensor]:
    """The parameters of the update that a weight has, if it still has one."""
    layer = _layers.get(id(weight))
    updates = [] if layer is None else _updates(layer)
    return updates if updates and _weight(layer) is weight else []


def _updates(layer: Any) -> list[Tensor]:
    """A layer's parameters of LoRA; not those that a parametrization has taken."""
    held = layer._parameters.items()
    return [p for name, p in held if name.startswith("lora_") and p is not None]


def _weight(layer: Any) -> Tensor | None:
    """A layer's weight, as its module holds it; None where it is computed, or not yet restored."""
    return vars(layer.base).get("_parameters", {}).get(layer.frozen_name)


register_optimizer_step_post_hook(_note_step)
