"""What is trained of a model besides its LoRA, as its modules remember it.

Whether a parameter requires a gradient says that only while it is trained: a model that is frozen
for inference would lose its head when it is saved. The record is an attribute of each module, so
that it is copied and pickled with it, and stays with a block that is taken out of a model.

What optimizers do beside it is an attribute of the parameters: a step knows no modules. A copy of a
model begins without it.
"""

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

logger = logging.getLogger(__name__)

_RECORD = "_trained_besides_lora"
_UNTIED = "_untied_by_adapter"
_FROZEN = "_frozen_for_lora"


def note_trained(model: nn.Module, names: Iterable[str], source: str | None = None) -> None:
    """Notes that parameters are trained, or come from an adapter that was trained with them.

    Args:
        model: whose parameters they are.
        names: of the parameters.
        source: the adapter that has brought them, if one has.
    """
    for name in names:
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        record = vars(module).setdefault(_RECORD, {})
        record[last] = source, module.get_parameter(last)._version


def noted(model: nn.Module) -> dict[str, str | None]:
    """What was noted of a model.

    Returns:
        By the parameter's name the adapter that it is from; None where it is from none, or has
        been changed since, by training or by loading another state.
    """
    return {
        f"{owner}.{last}" if owner else last: source if parameter._version == version else None
        for owner, module in model.named_modules()
        for last, (source, version) in vars(module).get(_RECORD, {}).items()
        if (parameter := module._parameters.get(last)) is not None
    }


def note_untied(module: nn.Module, others: Iterable[str]) -> None:
    """Notes that an adapter has given a module a weight of its own.

    Args:
        module: the module.
        others: what the model calls the weight that it was, in the modules that still have it.
    """
    vars(module)[_UNTIED] = {*vars(module).get(_UNTIED, ()), *others}


def untied_from(model: nn.Module) -> set[str]:
    """The names of the weights that modules of a model had before adapters gave them their own."""
    return {name for module in model.modules() for name in vars(module).get(_UNTIED, ())}


def note_frozen(model: nn.Module) -> None:
    """Notes that all but LoRA was frozen in a model: what is trained since then is meant to be."""
    for module in model.modules():
        vars(module)[_FROZEN] = True


def is_never_frozen(model: nn.Module, names: Iterable[str]) -> bool:
    """Whether none of these parameters was ever frozen for LoRA."""
    owners = {name.rpartition(".")[0] for name in names}
    return not any(_FROZEN in vars(model.get_submodule(owner)) for owner in owners)


def forget_frozen(model: nn.Module) -> None:
    """Drops the note that LoRA's base was frozen: the model has no LoRA any more."""
    for module in model.modules():
        vars(module).pop(_FROZEN, None)
    forget_steps(model)


def forget_trained(model: nn.Module) -> None:
    """Drops the record: the model, its LoRA merged, is a base of its own."""
    forget_frozen(model)
    for module in model.modules():
        vars(module).pop(_RECORD, None)


# ------------------------------------------------------------------------------------------------
# Optimizers' steps
# ------------------------------------------------------------------------------------------------

_UPDATE = "_is_of_lora"
_BENEATH = "_is_beneath_lora"
_STEPPED = "_version_when_stepped_with_lora"

# Steps of an optimizer without LoRA by which another one with it, which a loop may have as well,
# has made its own.
_PATIENCE = 3

_has_lora = False  # in this process; without it a step is not looked at
_trains_lora = False  # whether an optimizer does
_idle_steps: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()


def mark_update(parameters: Iterable[Tensor]) -> None:
    """Marks parameters as LoRA's own, by which an optimizer's step knows them."""
    global _has_lora
    for parameter in parameters:
        _has_lora = vars(parameter)[_UPDATE] = True


def mark_beneath(weight: Tensor) -> None:
    """Marks a weight as one that has an update."""
    vars(weight)[_BENEATH] = True


def forget_steps(model: nn.Module) -> None:
    """Drops what optimizers did: the model, as it is now, is a base."""
    for parameter in model.parameters():
        for mark in (_STEPPED, _BENEATH):
            vars(parameter).pop(mark, None)


def trained_along(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters besides LoRA's that an optimizer has trained together with it, or beneath it.

    Not those that have been written to since by another than that: they may be a base's again.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if _STEPPED in vars(parameter) and vars(parameter)[_STEPPED] == parameter._version
    }


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    """Notes what a step has changed along with LoRA, and warns of an optimizer without it.

    A step that is compiled notes nothing.
    """
    global _trains_lora
    if not _has_lora or torch.compiler.is_compiling():
        return
    groups = [group for group in optimizer.param_groups if not _is_still(group)]
    stepped = [p for group in groups for p in group["params"] if p.grad is not None]
    is_along = any(_UPDATE in vars(p) for p in stepped)
    for parameter in stepped:
        own = vars(parameter)
        if _UPDATE not in own and (is_along or _BENEATH in own):
            own[_STEPPED] = parameter._version
    _trains_lora = _trains_lora or is_along
    if not _trains_lora:
        _warn_of_earlier(optimizer)


def _is_still(group: Mapping[str, Any]) -> bool:
    """Whether the rate of an optimizer's group is zero; a tensor's would wait for its device."""
    rate = group.get("lr")
    return isinstance(rate, int | float) and rate == 0


def _warn_of_earlier(optimizer: Optimizer) -> None:
    """Warns of an optimizer that was made before add_lora: its steps leave LoRA as it is."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    has_frozen = any(_BENEATH in vars(p) and not p.requires_grad for p in held)
    if not has_frozen or any(_UPDATE in vars(p) for p in held):
        return
    _idle_steps[optimizer] = steps = _idle_steps.get(optimizer, 0) + 1
    if steps == _PATIENCE:
        logger.warning(
            "%s holds frozen weights that have LoRA, and none of LoRA's parameters, which nothing "
            "trains: it was made before add_lora; make it anew, after that",
            type(optimizer).__name__,
        )


register_optimizer_step_post_hook(_note_step)
