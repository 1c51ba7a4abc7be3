"""What a bank has seen of its model, and whether adapters still find it as it was."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ..adapters.fingerprint import is_readable, sampled
from ..adapters.loading import same_when_rounded
from ..nn.fast_paths import is_transformed
from ..text import called
from ..wrappers import is_sharded
from .prepared import PreparedAdapter


class SeenModules:
    """The modules that adapters change, as they were when the adapters were prepared."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}  # of these modules and of those around them
        self._weights: dict[str, _Weight] = {}  # of the modules that have deltas

    def note(self, model: nn.Module, prepared: PreparedAdapter) -> None:
        """Notes what an adapter changes, which has just been prepared for the model."""
        for module in (*prepared.deltas, *prepared.heads):
            parts = module.split(".") if module else []
            for count in range(1, len(parts) + 1):
                name = ".".join(parts[:count])
                self._places[name] = _Place(model, name)
        for module, delta in prepared.deltas.items():
            if module not in self._weights:
                self._weights[module] = _Weight(delta.module)

    def forget_unused(self, adapters: Collection[PreparedAdapter]) -> None:
        """Drops all but what these adapters change."""
        for name in tuple(self._places):
            if not _changed(adapters, name):
                del self._places[name]
        for module in tuple(self._weights):
            if not any(module in adapter.deltas for adapter in adapters):
                del self._weights[module]

    def check(self, adapters: Collection[PreparedAdapter]) -> None:
        """Checks that what these adapters change is as it was.

        Raises:
            ValueError: it is not.
        """
        for name, place in tuple(self._places.items()):
            found = place.found()
            if found is not place.module:
                self._check_within(name, found, adapters)
        for module, weight in tuple(self._weights.items()):
            if weight.has_changed() and any(module in adapter.deltas for adapter in adapters):
                raise ValueError(
                    f"the weight of {called(module)} has changed since an adapter was added to it: "
                    "load the base's weights again, or make another bank of the model as it is now"
                )

    def _check_within(
        self, name: str, found: nn.Module | None, adapters: Collection[PreparedAdapter]
    ) -> None:
        """Checks that adapted modules of a place are within what has taken it, such as a wrapper.

        Not a head that an `nn.Identity` has replaced, for the features before it.
        """
        within = () if found is None else tuple(found.modules())
        for module in _changed(adapters, name):
            is_there = any(each is self._places[module].module for each in within)
            is_head = any(module in each.heads for each in adapters)
            if not (is_there or (is_head and isinstance(found, nn.Identity))):
                raise ValueError(
                    f"{called(module)} has been replaced since an adapter was added to it: put the "
                    "module back, or make another bank of the model as it is now"
                )
            if module == name and not is_head and type(found).__name__ == "OptimizedModule":
                # Dynamo would take what it compiled for a module without a hook for this one.
                raise ValueError(
                    f"{called(module)} is wrapped by torch.compile alone, where adapters get lost: "
                    "wrap the model or its layers, or call the module's own compile()"
                )


def _changed(adapters: Collection[PreparedAdapter], place: str) -> list[str]:
    """The modules at or within a place that adapters change."""
    changed = dict.fromkeys(name for each in adapters for name in (*each.deltas, *each.heads))
    return [name for name in changed if f"{name}.".startswith(f"{place}.")]


class _Place:
    """A module of a model, and where it is.

    Args:
        model: the model.
        name: the module's, not the model itself.
    """

    def __init__(self, model: nn.Module, name: str):
        owner, _, self._last = name.rpartition(".")
        self._owner, self.module = model.get_submodule(owner), model.get_submodule(name)

    def found(self) -> nn.Module | None:
        """What is there now."""
        return self._owner._modules.get(self._last)


class _Weight:
    """A module's weight, as it was when adapters were prepared for it.

    Args:
        module: it, with a weight that can be read.
    """

    def __init__(self, module: Any):
        self._module = module
        self._note(module.weight)
        self._sample = sampled(module.weight).clone()

    def _note(self, weight: Tensor) -> None:
        self._weight, self._writes = weight, _writes_to(weight)

    def has_changed(self) -> bool:
        """Whether the module's weight has got other values, as by `load_state_dict` or a merge.

        Values are compared where it is another tensor, or PyTorch has counted a write to it: not
        what is written through ``.data`` or by a fused step of an optimizer. Those of a tensor that
        is sharded, transformed or cannot be read are not compared.
        """
        weight = self._module.weight
        if weight is self._weight and _writes_to(weight) == self._writes:
            return False
        if is_sharded(weight) or is_transformed(weight) or not is_readable(weight):
            return False
        if not same_when_rounded(sampled(weight), self._sample):
            return True
        self._note(weight)
        return False


def _writes_to(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version
