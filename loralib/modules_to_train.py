"""Checks of the modules that `add_lora` trains without LoRA, its `modules_to_train`.

They can be trained as wholes, and adapters can hold them.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .inject_checks import WITHOUT_SHAPE, own_parameters
from .model_checks import DTYPES, DTYPES_OF_BUFFERS
from .module_names import owner_of
from .targets import Target, matches
from .tensor_kinds import has_own_dispatch, is_dense, unreadable
from .text import module_label
from .trained import noted_weights


def check_has_parameters(
    model: nn.Module, to_train: Iterable[Target], trained: Collection[str]
) -> list[str]:
    """Checks that modules_to_train matches a module with parameters.

    Args:
        model: the model.
        to_train: the targets.
        trained: the names of the modules that they match.

    Returns:
        For each target that matches only modules without parameters, such as a ReLU, one of these.

    Raises:
        ValueError: all targets are like that.
    """
    with_some = [n for n in trained if next(model.get_submodule(n).parameters(), None) is not None]
    # A target has no match here if what it names is inside of another, by that one's name for it.
    matched = ([name for name in trained if matches(name, target)] for target in to_train)
    without = [names[0] for names in matched if names and not {*names} & {*with_some}]
    if without and not with_some:
        raise ValueError(
            f"modules_to_train: {module_label(without[0])} has no parameters to train: leave it out"
        )
    return without


def check_trained(model: nn.Module, trained: Iterable[str], adapted: Iterable[str]) -> None:
    """Checks that a module in modules_to_train shares no weight with a frozen or adapted one."""
    frozen = {name: own_parameters(model, name) for name in adapted}
    whole_parts = {part for whole in trained for part in model.get_submodule(whole).modules()}
    for whole in trained:
        _check_trainable(model, whole)
        parts = set(model.get_submodule(whole).parameters())
        others = sharing(model, parts, whole_parts)
        if others:
            names = ", ".join(name or "the model itself" for name in others)
            raise ValueError(
                f"{module_label(whole)} shares a weight with {names}, which would be trained as "
                "well: name all of them in modules_to_train, or none"
            )
        for name, own in frozen.items():
            if own & parts:
                raise ValueError(
                    f"{module_label(whole)} cannot be trained as a whole: {module_label(name)} is "
                    "adapted, and its weight is frozen; leave the former out of modules_to_train, "
                    "or the latter out of targets"
                )


def trained_as_wholes(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns which of these modules and stacks are trained already, or come from an adapter."""
    trained = noted_weights(model)
    return [name for name in names if own_parameters(model, name) & trained]


def check_none_trained(trained: Iterable[str]) -> None:
    """Checks that no module to adapt is trained already; `trained_as_wholes` says which are."""
    for name in trained:
        raise ValueError(
            f"{module_label(name)} is trained as a whole already, by an earlier modules_to_train "
            "or an adapter, and no adapter can hold an update of it as well: leave it out of "
            "targets, or call remove_lora first, which makes it a part of the base"
        )


def can_be_trained(module: nn.Module) -> bool:
    """Returns whether a module has parameters, and only tensors that adapters can hold.

    A scripted module, of which adapters hold nothing, cannot be trained.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    parameters = list(module.parameters())
    can_be_held = all(p.dtype in DTYPES and not unreadable(p) for p in parameters)
    return bool(parameters) and can_be_held and not any(map(_kind_not_held, module.buffers()))


def _check_trainable(model: nn.Module, trained: str) -> None:
    """Checks that a module in modules_to_train can be trained, and that an adapter can hold it."""
    part = model.get_submodule(trained)
    scripted = (each for each in part.modules() if isinstance(each, torch.jit.ScriptModule))
    if any(next(each.parameters(), None) is not None for each in scripted):
        raise ValueError(
            f"{module_label(trained)} cannot be trained as it is: it is scripted or traced; leave "
            "it out of modules_to_train, or script it after training"
        )
    parameters = dict(part.named_parameters(remove_duplicate=False))
    if any(map(is_lazy, parameters.values())):
        raise ValueError(f"{module_label(trained)} {WITHOUT_SHAPE}")
    for name, parameter in parameters.items():
        reason = unreadable(parameter)
        if reason:
            raise _not_held(trained, name, reason, "load the model with that part in bfloat16")
        if parameter.dtype not in DTYPES:
            reason = f"a parameter of {parameter.dtype}, which adapters cannot hold"
            raise _not_held(
                trained, name, reason, "make the parameter a buffer with persistent=False"
            )
    owners = set(map(owner_of, parameters))
    for name, tensor in part.state_dict().items():
        if name in parameters or owner_of(name) not in owners:
            continue
        if not isinstance(tensor, Tensor):
            reason = f"not a tensor (its get_extra_state gives a {type(tensor).__name__})"
            raise _not_held(trained, name, reason, "train it without that state")
        kind = _kind_not_held(tensor)
        if kind is not None:
            reason = f"a buffer of {kind}, which adapters cannot hold"
            raise _not_held(trained, name, reason, "register the buffer with persistent=False")


def _kind_not_held(buffer: Tensor) -> object | None:
    """Returns the layout, class or dtype that keeps a buffer out of adapters; None if none does."""
    if not is_dense(buffer):
        return "nested tensors" if buffer.is_nested else buffer.layout
    if has_own_dispatch(buffer):
        return type(buffer).__name__
    return None if buffer.dtype in (*DTYPES, *DTYPES_OF_BUFFERS) else buffer.dtype


def _not_held(trained: str, name: str, reason: str, way_out: str) -> ValueError:
    return ValueError(
        f"{module_label(trained)} cannot be trained as it is: its {name} is {reason}; leave it "
        f"out of modules_to_train, or {way_out}"
    )


def sharing(
    model: nn.Module, parameters: set[nn.Parameter], but_for: Collection[nn.Module]
) -> list[str]:
    """Returns the names of the modules, except `but_for`, that own one of these parameters."""
    return [
        name
        for name, module in model.named_modules()
        if module not in but_for and parameters & {*module._parameters.values()}
    ]
