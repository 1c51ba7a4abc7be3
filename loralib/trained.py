"""What is trained of a model besides its LoRA, as its modules remember it.

Whether a parameter requires a gradient says that only while it is trained: a model that is frozen
for inference would lose its head when it is saved. The record is an attribute of each module, so
that it is copied and pickled with it, and stays with a block that is taken out of a model.
"""

from collections.abc import Iterable

from torch import nn

_RECORD = "_trained_besides_lora"


def note_trained(model: nn.Module, names: Iterable[str], source: str | None = None) -> None:
    """Notes that parameters are trained, or come from an adapter that was trained with them.

    Args:
        model: whose parameters they are.
        names: of the parameters.
        source: the adapter that has brought them, if one has.
    """
    for name in names:
        owner, _, last = name.rpartition(".")
        vars(model.get_submodule(owner)).setdefault(_RECORD, {})[last] = source


def noted(model: nn.Module) -> dict[str, str | None]:
    """What was noted of a model: by the parameter's name, the adapter that it is from, or None."""
    return {
        f"{owner}.{last}" if owner else last: source
        for owner, module in model.named_modules()
        for last, source in vars(module).get(_RECORD, {}).items()
        if module._parameters.get(last) is not None
    }


def forget_trained(model: nn.Module) -> None:
    """Drops the record: the model, its LoRA merged, is a base of its own."""
    for module in model.modules():
        vars(module).pop(_RECORD, None)
