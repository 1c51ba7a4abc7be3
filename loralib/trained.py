"""Records which parameters are trained besides LoRA, as attributes of the modules that own them.

`requires_grad` tells this only during training: without the record, a model that has been frozen
for inference would lose its head when it is saved. Because the record is an attribute of each
module, it is copied and pickled with the module, and stays with a block that is taken out of a
model.
"""

from collections.abc import Iterable

from torch import nn

_RECORD = "_trained_besides_lora"
_UNTIED = "_untied_by_adapter"
_FROZEN = "_frozen_for_lora"


def note_trained(model: nn.Module, names: Iterable[str], source: str | None = None) -> None:
    """Notes that parameters are trained, or come from an adapter that was trained with them.

    Args:
        model: the model that has the parameters.
        names: the parameters' names.
        source: the adapter that they come from, if any.
    """
    for name in names:
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        record = vars(module).setdefault(_RECORD, {})
        record[last] = source, module.get_parameter(last)._version


def noted(model: nn.Module) -> dict[str, str | None]:
    """Returns the parameters that `note_trained` has noted in a model, and where they come from.

    Returns:
        For each parameter's name, the adapter that it comes from; None if it comes from none, or
        has been changed since, by training or by loading another state.
    """
    return {
        f"{owner}.{last}" if owner else last: source if parameter._version == version else None
        for owner, module in model.named_modules()
        for last, (source, version) in vars(module).get(_RECORD, {}).items()
        if (parameter := module._parameters.get(last)) is not None
    }


def note_untied(module: nn.Module, others: Iterable[str]) -> None:
    """Notes that an adapter has given a module its own weight in place of a tied one.

    Args:
        module: the module.
        others: the names of the tied weight in the modules that still have it.
    """
    vars(module)[_UNTIED] = {*vars(module).get(_UNTIED, ()), *others}


def untied_from(model: nn.Module) -> set[str]:
    """Returns the names of the tied weights that modules had before adapters untied them."""
    return {name for module in model.modules() for name in vars(module).get(_UNTIED, ())}


def is_untied(module: nn.Module) -> bool:
    """Returns whether an adapter has given a module its own weight in place of a tied one."""
    return _UNTIED in vars(module)


def note_frozen(model: nn.Module) -> None:
    """Notes that all but LoRA was frozen in a model: what is trained later is meant to be."""
    for module in model.modules():
        vars(module)[_FROZEN] = True


def is_never_frozen(model: nn.Module, names: Iterable[str]) -> bool:
    """Returns whether none of the modules with these parameters was ever frozen for LoRA."""
    owners = {name.rpartition(".")[0] for name in names}
    return not any(_FROZEN in vars(model.get_submodule(owner)) for owner in owners)


def forget_frozen(model: nn.Module) -> None:
    """Drops the note of `note_frozen`: the model has no LoRA any more."""
    for module in model.modules():
        vars(module).pop(_FROZEN, None)


def forget_trained(model: nn.Module) -> None:
    """Drops the record: with its LoRA merged, the model is a base itself."""
    forget_frozen(model)
    for module in model.modules():
        vars(module).pop(_RECORD, None)
