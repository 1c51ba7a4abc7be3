"""The base that a bank's adapters were checked against, and whether the model still is that one.

PyTorch counts what is written to a parameter, as by `load_state_dict`; not what fused steps of
optimizers write, nor what is written through ``.data``, which is not seen. Where a count has
changed, values are compared: the same weights may have been loaded again.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from ..adapters.families import top_module
from ..adapters.fingerprint import is_readable, sampled
from ..adapters.loading import same_when_rounded
from ..steps import latest_step


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
        self._places = [
            (held_in, name, value)
            for module in model.modules()
            for held_in in (module._modules, module._parameters)
            for name, value in held_in.items()
        ]
        self._counted = [p for p in model.parameters() if not p.is_inference()]
        self._writes = [parameter._version for parameter in self._counted]

    def may_differ(self) -> bool:
        """Whether there was a step, a write to a parameter, or something put into a place since."""
        return (
            bool(self._differing)
            or self._step is not latest_step()
            or [parameter._version for parameter in self._counted] != self._writes
            or any(_holds_another(*place) for place in self._places)
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


def _holds_another(held_in: dict[str, Any], name: str, value: Any) -> bool:
    return held_in.get(name) is not value
