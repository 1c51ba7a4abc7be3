"""The base that a bank's adapters were checked against, and whether the model still is that one.

PyTorch counts what is written to a parameter, as by `load_state_dict`. Each block compares these
counts, and that of optimizers' steps; values are compared where one has changed, because the same
weights may be loaded again. What is written through ``.data`` is not counted, and not seen.
"""

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..adapters.families import top_module
from ..adapters.fingerprint import is_readable, sampled
from ..adapters.loading import same_when_rounded
from ..errors import called
from ..lora_layer import optimizer_steps

_writes_to = attrgetter("_version")


class _Seen(NamedTuple):
    """A parameter as it was.

    Args:
        parameter: itself.
        writes: how often it had been written to; None where that is not counted.
        sample: some of its values.
    """

    parameter: nn.Parameter
    writes: int | None
    sample: Tensor


def _seen(parameter: nn.Parameter) -> _Seen:
    writes = None if parameter.is_inference() else _writes_to(parameter)
    return _Seen(parameter, writes, sampled(parameter).clone())


class CheckedBase:
    """A model's parameters, as far as they can be read, and the modules that have a bank's hooks.

    Args:
        model: it, without wrappers.
    """

    def __init__(self, model: nn.Module):
        self._seen = {name: _seen(p) for name, p in model.named_parameters() if is_readable(p)}
        self._hooked: dict[str, nn.Module] = {}
        # Dicts of modules and of parameters, and names in there; the key tells them apart.
        self._places: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._differing: list[str] = []
        self.note_state()

    def note_hooked(self, model: nn.Module, names: Iterable[str]) -> None:
        """Notes modules of the model that have hooks now, and where they and their weights are."""
        for name in names:
            module = model
            for part in name.split("."):
                self._note_place(module._modules, part)
                module = module.get_submodule(part)
            for part in module._parameters:
                self._note_place(module._parameters, part)
            self._hooked[name] = module

    def _note_place(self, held_in: dict[str, Any], name: str) -> None:
        self._places[id(held_in), name] = held_in, name

    def note_state(self) -> None:
        """Notes all counts and what is in the places, of a model that is known to be the same."""
        self._steps = optimizer_steps()
        counted = [seen for seen in self._seen.values() if seen.writes is not None]
        self._counted = [seen.parameter for seen in counted]
        self._writes = [seen.writes for seen in counted]
        self._owners = [held_in for held_in, _ in self._places.values()]
        self._names = [name for _, name in self._places.values()]
        self._held = list(map(dict.get, self._owners, self._names))

    def may_differ(self) -> bool:
        """Whether there was a step, a write to a parameter, or something put into a place since."""
        held = map(dict.get, self._owners, self._names)
        return (
            bool(self._differing)
            or self._steps != optimizer_steps()
            or list(map(_writes_to, self._counted)) != self._writes
            or not all(map(is_, held, self._held))
        )

    def difference(self, model: nn.Module, heads: Collection[str]) -> str | None:
        """What of a model is not what it was, in words; None where nothing is.

        Args:
            model: without wrappers.
            heads: the top modules in whose place adapters have their own, whatever their values.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, module in self._hooked.items():
            if modules.get(name) is not module:
                return f"{called(name)} is another module than before"
        self._compare(dict(model.named_parameters()))
        differing = [name for name in self._differing if top_module(name) not in heads]
        if not differing:
            return None
        more = f" and {len(differing) - 1} more have" if len(differing) > 1 else " has"
        return f"{differing[0]}{more} other values than before"

    def _compare(self, now: Mapping[str, nn.Parameter]) -> None:
        """Finds the parameters with other values, and notes the new counts of the rest."""
        is_stepped, self._differing = self._steps != optimizer_steps(), []
        for name, seen in self._seen.items():
            parameter = now.get(name)
            if parameter is not None and _is_untouched(parameter, seen, is_stepped):
                continue
            if parameter is None or not _has_values_of(parameter, seen):
                self._differing.append(name)
            elif is_readable(parameter):
                self._seen[name] = _seen(parameter)._replace(sample=seen.sample)


def _is_untouched(parameter: nn.Parameter, seen: _Seen, is_stepped: bool) -> bool:
    """Whether its count says that a parameter is as it was; a fused step adds none."""
    if parameter is not seen.parameter or (is_stepped and parameter.requires_grad):
        return False
    return seen.writes is not None and seen.writes == _writes_to(parameter)


def _has_values_of(parameter: nn.Parameter, seen: _Seen) -> bool:
    """Whether a parameter's values are those that were seen, as far as they can be read."""
    if not is_readable(parameter):
        return True
    is_of_shape = parameter.shape == seen.parameter.shape
    return is_of_shape and same_when_rounded(sampled(parameter), seen.sample)
