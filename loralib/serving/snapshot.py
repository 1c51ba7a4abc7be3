"""Records the state of a bank's model, and checks that it has not changed since."""

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from ..adapters.fingerprint import is_readable, sampled
from ..io.tensors import same_when_rounded
from ..nn.fast_paths import is_transformed
from ..tensor_kinds import is_sharded
from ..text import module_label
from .prepared import PreparedAdapter


class ModelSnapshot:
    """The modules that adapters change, as they were when the adapters were prepared."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}  # of these modules and of those around them
        self._weights: dict[str, _Weight] = {}  # of the modules that have deltas

    def note(self, model: nn.Module, prepared: PreparedAdapter) -> None:
        """Notes the modules that an adapter changes, right after it was prepared for the model."""
        for name in _around(_changed(prepared)):
            if name not in self._places:
                self._places[name] = _Place(model, name)
        for module, delta in prepared.deltas.items():
            if module not in self._weights:
                self._weights[module] = _Weight(delta.module)

    def forget_unused(self, adapters: Collection[PreparedAdapter]) -> None:
        """Drops all but what these adapters change."""
        places = _around({name for adapter in adapters for name in _changed(adapter)})
        weights = {module for adapter in adapters for module in adapter.deltas}
        self._places = {name: x for name, x in self._places.items() if name in places}
        self._weights = {module: x for module, x in self._weights.items() if module in weights}

    def check(self, adapters: Collection[PreparedAdapter]) -> None:
        """Checks that the modules and weights that these adapters change are as they were.

        Raises:
            ValueError: one is not.
        """
        for name, place in tuple(self._places.items()):
            fault = place.fault()
            if fault and any(_needs(adapter, name, place.found) for adapter in adapters):
                raise ValueError(f"{module_label(name)} {fault}")
        for module, weight in tuple(self._weights.items()):
            if weight.has_changed() and any(module in adapter.deltas for adapter in adapters):
                raise ValueError(
                    f"the weight of {module_label(module)} has changed since an adapter was added "
                    "to it: load the base's weights again, or make another bank of the model as "
                    "it is now"
                )


def _changed(adapter: PreparedAdapter) -> tuple[str, ...]:
    """Returns the names of the modules that an adapter changes."""
    return (*adapter.deltas, *adapter.heads)


def _needs(adapter: PreparedAdapter, name: str, found: nn.Module | None) -> bool:
    """Returns whether an adapter needs the module of this name, in whose place `found` is now.

    It does not need its head if an `nn.Identity` is there, put in to get the features before it.
    """
    is_taken_out = name in adapter.heads and isinstance(found, nn.Identity)
    needed = adapter.deltas if is_taken_out else _changed(adapter)
    return name in _around(needed)


def _around(modules: Iterable[str]) -> dict[str, None]:
    """Returns these modules and those around them, without the model itself."""
    parts = [module.split(".") for module in modules if module]
    return dict.fromkeys(".".join(x[:count]) for x in parts for count in range(1, len(x) + 1))


_REPLACED = (
    "has been replaced since an adapter was added to it: put the module back, or make another bank "
    "of the model as it is now"
)
# For a module with a hook, Dynamo may run what it compiled for one without a hook.
_COMPILED_ALONE = (
    "is wrapped by torch.compile on its own, where adapters get lost: wrap the model or its "
    "layers instead, or call the module's own compile()"
)


class _Place:
    """A module, and its place in the model.

    Args:
        model: the model.
        name: the name of a module within it.
    """

    def __init__(self, model: nn.Module, name: str):
        owner, _, self._last = name.rpartition(".")
        self._owner, self._module = model.get_submodule(owner), model.get_submodule(name)

    @property
    def found(self) -> nn.Module | None:
        """The module that is there now."""
        return self._owner._modules.get(self._last)

    def fault(self) -> str | None:
        """Returns why an adapter would have no effect here; None if it would have one."""
        return _fault(self.found, self._module)


_LISTS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


def _fault(found: nn.Module | None, module: nn.Module | None) -> str | None:
    """Returns why `found` cannot stand for `module`; None if it can.

    It can if it is that module, wraps it, or is a list of the same modules.
    """
    if found is module:
        return None
    if found is not None and module is not None:
        within = tuple(found.modules())
        if any(each is module for each in within):
            is_compiled = any(type(each).__name__ == "OptimizedModule" for each in within)
            return _COMPILED_ALONE if is_compiled and not module._modules else None
        ours, theirs = found._modules, module._modules
        are_lists = isinstance(found, _LISTS) and isinstance(module, _LISTS)
        if are_lists and ours.keys() == theirs.keys():
            faults = (_fault(ours[key], theirs[key]) for key in ours)
            return next(filter(None, faults), None)
    return _REPLACED


class _Weight:
    """A module's weight, as it was when adapters were prepared for it.

    Args:
        module: the module.
    """

    def __init__(self, module: Any):
        self._module = module
        self._note(module.weight)
        self._sample = sampled(module.weight).clone() if is_readable(module.weight) else None

    def _note(self, weight: Tensor) -> None:
        self._weight, self._writes = weight, _writes_to(weight)

    def has_changed(self) -> bool:
        """Returns whether the weight's values have changed, as by `load_state_dict` or a merge.

        Some values (`sampled`) are compared, and only if the weight is another tensor, or PyTorch
        has counted a write to it. So writes to others, through ``.data`` or by an optimizer's fused
        step are missed. A tensor that is sharded, transformed or cannot be read counts as
        unchanged.
        """
        weight = self._module.weight
        if weight is self._weight and _writes_to(weight) == self._writes:
            return False
        if is_sharded(weight) or is_transformed(weight) or not is_readable(weight):
            return False
        if self._sample is None or not same_when_rounded(sampled(weight), self._sample):
            return True
        self._note(weight)
        return False


def _writes_to(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version
