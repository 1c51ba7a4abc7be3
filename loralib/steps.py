"""Records which parameters optimizers change along with LoRA, as attributes of those parameters.

Saving reads the record to tell whether a base was trained along with LoRA. Layers ask for the
latest step to tell whether their merged copies are still valid. An optimizer knows parameters, not
modules, so each parameter is marked as LoRA's own or as a weight that LoRA updates. A copy of a
model starts without this record.
"""

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .text import counted, in_short

logger = logging.getLogger(__name__)

_UPDATE = "_is_of_lora"
_BENEATH = "_is_beneath_lora"
_STEPPED = "_version_when_stepped_with_lora"
_NAME = "_name_when_adapted"

# Attributes of optimizers, which may lack the hash that a key of a dict needs.
_IDLE_STEPS = "_idle_steps_beside_lora"
_TRAINING_STEPS = "_steps_with_gradients_beside_lora"
_LOST_STEPS = "_steps_without_any_gradient"
_WARNED_OF_WEIGHTS = "_is_warned_of_weights_beneath_lora"

# At which of its steps an optimizer without LoRA, or one whose LoRA gets no gradients, causes a
# warning. Not at the first: the loop may have another optimizer, with LoRA, that steps less often,
# and a model may call some of its modules only in some steps.
_PATIENCE = 10

_IF_SOME = "leave such modules out of targets, unless later steps call them"
_IF_ALL = (
    "choose other targets, unless torch.no_grad, detach or a checkpoint without "
    "use_reentrant=False keeps gradients from them"
)


class _Step:
    """A step of an optimizer, equal to no other. torch.compile cannot assign a plain object()."""


# A counter, instead of an object, would make a compiled step recompile at each new value.
_latest_step = _Step()

# All layers with LoRA in this process, by the id of their weight.
_layers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def latest_step() -> object:
    """Returns an object that each step of any optimizer in the process replaces with a new one.

    Merged copies are made again after that, because fused optimizers change tensors without
    changing their versions.
    """
    return _latest_step


def mark_update(parameter: Tensor) -> None:
    """Marks a parameter as one of LoRA's own."""
    vars(parameter)[_UPDATE] = True


def mark_layer(layer: Any) -> None:
    """Marks the parameters of a `LoRALayer` with r > 0; call it when they may be new objects."""
    updates, weight = _updates(layer), _weight(layer)
    for parameter in updates:
        mark_update(parameter)
    if updates and weight is not None:
        vars(weight)[_BENEATH] = True
        # A shallow copy must not replace the layer here: its end would remove the entry.
        if not _updates_above(weight):
            _layers[id(weight)] = layer


def forget_steps(model: nn.Module) -> None:
    """Drops the record of what optimizers did: the model, as it is now, is a base."""
    for parameter in model.parameters():
        for mark in (_STEPPED, _BENEATH):
            vars(parameter).pop(mark, None)


def trained_along(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters besides LoRA's for which `was_trained_along` is true, by name."""
    own = model.named_parameters()
    return {name: p for name, p in own if "lora_" not in name and was_trained_along(p)}


def was_trained_along(parameter: Tensor) -> bool:
    """Returns whether an optimizer has trained a parameter along with LoRA.

    For a weight that has LoRA, any step counts. False if anything but such a step has written to
    the parameter since: it may be a base's again.
    Writes through ``.data`` are not noticed.
    """
    own = vars(parameter)
    return _STEPPED in own and own[_STEPPED] == parameter._version


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    """Notes what a step has changed along with LoRA, and warns of LoRA that is not trained.

    Of a compiled step, it notes only that there was one.
    """
    global _latest_step
    _latest_step = _Step()
    if torch.compiler.is_compiling() or not _layers:
        return
    groups = [group for group in optimizer.param_groups if not _is_still(group)]
    stepped = [p for group in groups for p in group["params"] if p.grad is not None]
    is_along = any(_UPDATE in vars(p) for p in stepped)
    for parameter in stepped:
        own = vars(parameter)
        if is_along or _BENEATH in own:
            own[_STEPPED] = parameter._version
    if is_along:
        _warn_of_weights(optimizer, [p for p in stepped if _BENEATH in vars(p)])
    else:
        _warn_of_idle(optimizer)
    if stepped:
        _warn_of_no_gradients(optimizer)
    else:
        _warn_of_lost(optimizer)


def _is_still(group: Mapping[str, Any]) -> bool:
    """Returns whether a group's learning rate is zero; False for a tensor that is not on a CPU."""
    rate = group.get("lr")
    if isinstance(rate, Tensor) and not rate.is_cpu:  # reading it would wait for the device
        return False
    return bool(rate == 0)


def _warn_of_weights(optimizer: Optimizer, weights: list[Tensor]) -> None:
    """Warns once of an optimizer that trains weights as well as their LoRA."""
    if _WARNED_OF_WEIGHTS in vars(optimizer):
        return
    names = [_name(_layers[id(weight)]) for weight in weights if _updates_above(weight)]
    if not names:
        return
    vars(optimizer)[_WARNED_OF_WEIGHTS] = True
    logger.warning(
        "besides LoRA, %s trains the weights that it updates (%s), which no adapter can hold: if "
        "that is unintended, start again from the base, with mark_only_lora_as_trainable first",
        type(optimizer).__name__,
        in_short(dict.fromkeys(names), at_most=4),
    )


def _warn_of_idle(optimizer: Optimizer) -> None:
    """Warns of an optimizer whose steps do not train LoRA, such as one made before `add_lora`.

    There is no warning if another optimizer has trained these layers' LoRA, or if it is frozen.
    """
    steps = vars(optimizer).get(_IDLE_STEPS, 0) + 1
    if steps > _PATIENCE:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    frozen = [p for p in held if not p.requires_grad]
    updates = [p for weight in frozen for p in _updates_above(weight) if p.requires_grad]
    is_known = {id(p) for p in held} & {id(p) for p in updates}
    if not updates or is_known or any(_STEPPED in vars(p) for p in updates):
        return
    vars(optimizer)[_IDLE_STEPS] = steps
    if steps == _PATIENCE:
        logger.warning(
            "%s holds frozen weights that have LoRA, but none of LoRA's parameters, which no step "
            "has trained so far: if it was created before add_lora, create it again; otherwise "
            "give it LoRA's parameters as well",
            type(optimizer).__name__,
        )


def _warn_of_no_gradients(optimizer: Optimizer) -> None:
    """Warns of LoRA that an optimizer holds, and that got no gradients in its first steps."""
    steps = vars(optimizer).get(_TRAINING_STEPS, 0) + 1
    if steps > _PATIENCE:
        return
    vars(optimizer)[_TRAINING_STEPS] = steps
    if steps < _PATIENCE:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [reference() for reference in _layers.valuerefs()]  # other threads may add layers
    layers = {id(layer): layer for layer in found if layer is not None}.values()
    own = [layer for layer in layers if any(id(p) in held for p in _updates(layer))]
    without = [_name(layer) for layer in own if _is_without_gradients(layer)]
    if without:
        logger.warning(
            "in %d steps of %s, %d of %s with LoRA got no gradients (%s): the loss was computed "
            "without them, or from their weights without calling them, where LoRA has no effect: "
            "%s",
            steps,
            type(optimizer).__name__,
            len(without),
            counted(len(own), "module"),
            in_short(dict.fromkeys(without), at_most=4),
            _IF_SOME if len(without) < len(own) else _IF_ALL,
        )


def _warn_of_lost(optimizer: Optimizer) -> None:
    """Warns of an optimizer with LoRA that never gets a gradient: another model is trained.

    FSDP2's `fully_shard`, for example, replaces the parameters that an earlier optimizer holds.
    Parameters without elements do not count, as in `_is_without_gradients`.
    """
    steps = vars(optimizer).get(_LOST_STEPS, 0) + 1
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if steps > _PATIENCE or any(p.grad is not None or _STEPPED in vars(p) for p in held):
        return
    if not any(_UPDATE in vars(p) and p.requires_grad and p.numel() > 0 for p in held):
        return
    vars(optimizer)[_LOST_STEPS] = steps
    if steps == _PATIENCE:
        logger.warning(
            "in %d steps of %s, no parameter that it holds got a gradient: if it was created "
            "before the model was sharded or copied, create it again",
            steps,
            type(optimizer).__name__,
        )


def _is_without_gradients(layer: Any) -> bool:
    """Returns whether a layer's LoRA is to be trained, but has no gradients and never had any.

    Parameters without elements do not count: FSDP has their elements in another process.
    """
    trained = [p for p in _updates(layer) if p.requires_grad and p.numel() > 0]
    return bool(trained) and all(p.grad is None and _STEPPED not in vars(p) for p in trained)


def _name(layer: Any) -> str:
    """Returns the name that a layer was adapted by, or its class if it was built with LoRA."""
    return vars(layer).get(_NAME) or type(layer).__name__


def note_name(layer: Any, name: str) -> None:
    """Notes the name that a `LoRALayer` has in its model, for warnings."""
    vars(layer)[_NAME] = name


def _updates_above(weight: Tensor) -> list[Tensor]:
    """Returns the parameters of the update that a weight has; empty if it has none any more."""
    layer = _layers.get(id(weight))
    updates = [] if layer is None else _updates(layer)
    return updates if updates and _weight(layer) is weight else []


def _updates(layer: Any) -> list[Tensor]:
    """Returns a layer's LoRA parameters, except those that a parametrization has replaced."""
    held = layer._parameters.items()
    return [p for name, p in held if name.startswith("lora_") and p is not None]


def _weight(layer: Any) -> Tensor | None:
    """Returns a layer's weight parameter; None if it is computed, or not yet unpickled."""
    return vars(layer.base).get("_parameters", {}).get(layer.frozen_name)


register_optimizer_step_post_hook(_note_step)
