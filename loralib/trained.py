"""Records which parameters are trained besides LoRA, as attributes of the modules that own them.

`requires_grad` tells this only during training: without the record, a model that has been frozen
for inference would lose its head when it is saved. Because the record is an attribute of each
module, it is copied and pickled with the module, and stays with a block that is taken out of a
model. The same goes for the record of what buffers held when the rest was frozen.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .module_names import joined
from .nn.bits import bits_of
from .tensor_kinds import is_dense, is_fake, is_sharded, unreadable

_RECORD = "_trained_besides_lora"
_UNTIED = "_untied_by_adapter"
_FROZEN = "_frozen_for_lora"
_BUFFERS = "_buffers_when_frozen"


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
        joined(owner, last): source if parameter._version == version else None
        for owner, module in model.named_modules()
        for last, (source, version) in vars(module).get(_RECORD, {}).items()
        if (parameter := module._parameters.get(last)) is not None
    }


def noted_weights(model: nn.Module) -> set[Tensor]:
    """Returns the parameters, except biases, that `note_trained` has noted in a model."""
    names = (name for name in noted(model) if "bias" not in name.rpartition(".")[2])
    return {model.get_parameter(name) for name in names}


def forget_weights(model: nn.Module, owners: Iterable[nn.Module]) -> None:
    """Drops the record of some modules' parameters, except biases: they are the base's again.

    Of a tied weight, it drops the records of all modules that have it.
    """
    own = (item for owner in owners for item in owner._parameters.items())
    theirs = {each for name, each in own if each is not None and "bias" not in name}
    for module in model.modules():
        record = vars(module).get(_RECORD, {})
        for name in [name for name in record if module._parameters.get(name) in theirs]:
            del record[name]


def note_untied(module: nn.Module) -> None:
    """Notes that an adapter has given a module its own weight in place of a tied one."""
    vars(module)[_UNTIED] = True


def is_untied(module: nn.Module) -> bool:
    """Returns whether an adapter has given a module its own weight in place of a tied one."""
    return _UNTIED in vars(module)


def note_frozen(model: nn.Module) -> None:
    """Notes that all but LoRA was frozen in a model: what is trained later is meant to be.

    Also notes what its buffers hold, unless an earlier call has.
    """
    for module in model.modules():
        vars(module)[_FROZEN] = True
        if _BUFFERS not in vars(module):
            vars(module)[_BUFFERS] = _digests(module)


def note_buffers(model: nn.Module) -> None:
    """Notes again what the buffers of a model hold that was frozen: its base has been loaded."""
    for module in model.modules():
        if _BUFFERS in vars(module):
            vars(module)[_BUFFERS] = _digests(module)


def changed_buffers(model: nn.Module) -> list[str]:
    """Returns the names of the buffers that have changed since the model was frozen for LoRA.

    Modules change them in training mode. Those that have been cast since are left out, and those of
    another shape, such as tables that grow with the longest input.
    """
    return [
        joined(owner, name) for owner, module in model.named_modules() for name in _changed(module)
    ]


def is_unchanged(module: nn.Module, name: str) -> bool:
    """Returns whether a module's buffer certainly holds what it did when the model was frozen.

    So do the module's others: a variance can change without its mean.
    """
    before = vars(module).get(_BUFFERS, {})
    return name in before and before == _digests(module)


def _changed(module: nn.Module) -> list[str]:
    """Returns which of a module's own buffers hold something else than when it was frozen."""
    before = vars(module).get(_BUFFERS, {})
    now = _digests(module) if before else {}
    alike = (name for name in now if name in before and before[name][:-1] == now[name][:-1])
    return [name for name in alike if before[name] != now[name]]


def _digests(module: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """Returns dtype, shape and digest of a module's own floating-point buffers, if persistent."""
    buffers = {
        name: buffer.detach().cpu()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name not in module._non_persistent_buffers_set
        and not name.startswith("lora_")
        and _has_plain_values(buffer)
    }
    return {
        name: (buffer.dtype, buffer.shape, hashlib.sha256(_bytes(buffer)).digest())
        for name, buffer in buffers.items()
        if not is_fake(buffer)  # as a copy is in FakeTensorMode
    }


def _bytes(buffer: Tensor) -> bytes:
    return bits_of(buffer.resolve_neg()).numpy().tobytes()


def _has_plain_values(buffer: Tensor) -> bool:
    if not buffer.is_floating_point() or buffer.is_meta or is_fake(buffer) or is_sharded(buffer):
        return False
    return is_dense(buffer) and unreadable(buffer) is None


def is_never_frozen(model: nn.Module, names: Iterable[str]) -> bool:
    """Returns whether none of the modules with these parameters was ever frozen for LoRA."""
    owners = {name.rpartition(".")[0] for name in names}
    return not any(_FROZEN in vars(model.get_submodule(owner)) for owner in owners)


def forget_frozen(model: nn.Module) -> None:
    """Drops what `note_frozen` has noted: the model has no LoRA any more."""
    for module in model.modules():
        vars(module).pop(_FROZEN, None)
        vars(module).pop(_BUFFERS, None)


def forget_trained(model: nn.Module) -> None:
    """Drops the record: with its LoRA merged, the model is a base itself."""
    forget_frozen(model)
    for module in model.modules():
        vars(module).pop(_RECORD, None)
