"""What is trained of a model besides its LoRA, as its modules remember it.

Whether a parameter requires a gradient says that only while it is trained: a model that is frozen
for inference would lose its head when it is saved. The record is an attribute of each module, so
that it is copied and pickled with it, and stays with a block that is taken out of a model.
"""

from collections.abc import Iterable

from torch import nn

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


def forget_trained(model: nn.Module) -> None:
    """Drops the record: the model, its LoRA merged, is a base of its own."""
    forget_frozen(model)
    for module in model.modules():
        vars(module).pop(_RECORD, None)
