"""The base that a bank's adapters were checked against, and whether the model still is that one.

PyTorch counts what is written to a parameter, as by `load_state_dict`; not what fused steps of
optimizers write, nor what is written through ``.data``, which is not seen. Where a count has
changed, values are compared: the same weights may have been loaded again.
"""

from collections.abc import Collection
from operator import attrgetter, is_
from typing import Any

from torch import nn

from ..adapters.families import top_module
from ..adapters.fingerprint import is_readable, sampled
from ..adapters.loading import same_when_rounded
from ..steps import latest_step

_writes_to = attrgetter("_version")


class CheckedBase:
    """A sample of each of a model's parameters that can be read, and where all of them are.

    Args:
        model: it, without wrappers.
    """

    def __init__(self, model: nn.Module):
        named = model.named_parameters()
        self._samples = {name: sampled(p).clone() for name, p in named if is_readable(p)}
        self._differing: list[str] = []

    def note_state(self, model: nn.Module) -> None:
        """Notes the counts, parameters and modules of a model that was compared, with wrappers."""
        self._step = latest_step()
        places: list[tuple[dict[str, Any], str]] = [
            (held_in, name)
            for module in model.modules()
            for held_in in (module._modules, module._parameters)
            for name in held_in
        ]
        self._owners = [held_in for held_in, _ in places]
        self._names = [name for _, name in places]
        self._held = list(map(dict.get, self._owners, self._names))
        self._counted = [p for p in model.parameters() if not p.is_inference()]
        self._writes = list(map(_writes_to, self._counted))

    def may_differ(self) -> bool:
        """Whether there was a step, a write to a parameter, or something put into a place since."""
        return (
            bool(self._differing)
            or self._step is not latest_step()
            or list(map(_writes_to, self._counted)) != self._writes
            or not all(map(is_, map(dict.get, self._owners, self._names), self._held))
        )

    def difference(self, model: nn.Module, heads: Collection[str]) -> str | None:
        """Which parameters of a model have other values than before, in words; None if none has.

        Args:
            model: without wrappers.
            heads: the top modules in whose place adapters have their own, whatever their values.
        """
        self._differing = [name for name in self._samples if not self._is_same(model, name)]
        differing = [name for name in self._differing if top_module(name) not in heads]
        if not differing:
            return None
        more = f" and {len(differing) - 1} more have" if len(differing) > 1 else " has"
        return f"{differing[0]}{more} other values than before"

    def _is_same(self, model: nn.Module, name: str) -> bool:
        """Whether a parameter is there, with its values as far as they can be read."""
        try:
            parameter = model.get_parameter(name)
        except AttributeError:
            return False
        if not is_readable(parameter):
            return True
        sample = self._samples[name]
        now = sampled(parameter)
        return now.shape == sample.shape and same_when_rounded(now, sample)
