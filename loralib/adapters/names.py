"""Derives targets from the names of adapted modules, and numbers of layers from any names."""

import re
from collections.abc import Collection, Iterable

from ..module_names import layer_of

# Last parts of names that several modules of one layer have, so that they do not identify one.
AMBIGUOUS = ("dense", "c_proj")


def within_layer(module: str) -> str:
    """Returns what follows the layer's number in a name: ``a.0.attn.query`` -> ``attn.query``."""
    return re.split(r"\.\d+\.", module)[-1]


def lora_targets(modules: Iterable[str]) -> tuple[str, ...]:
    """Returns the targets of modules, each once, sorted: ``a.0.query, a.1.query`` -> ``query``.

    A target is the last part of a module's name. If that is ambiguous, it is everything after the
    layer's number, as in ``attention.output.dense``.
    """
    return tuple(sorted({_target(module) for module in modules}))


def _target(module: str) -> str:
    last = module.rpartition(".")[2]
    return within_layer(module) if last in AMBIGUOUS else last


def more_layers(theirs: Iterable[str], ours: Collection[str]) -> tuple[int, int] | None:
    """Returns the numbers of layers of two models, if names differ because the first has more.

    Args:
        theirs: names of the first model's modules or tensors. All that are not in `ours` must
            belong to additional layers, otherwise None is returned.
        ours: the second model's names.
    """
    unknown = set(theirs).difference(ours)
    known = 1 + max(map(_layer, ours), default=-1)
    alike = {_in_any_layer(name) for name in ours}
    if not unknown or any(_layer(n) < known or _in_any_layer(n) not in alike for n in unknown):
        return None
    return 1 + max(map(_layer, unknown)), known


def _layer(name: str) -> int:
    number = layer_of(name)
    return -1 if number is None else number


def _in_any_layer(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1#", name, count=1)
