"""Names of adapted modules within a layer, and what names tell of the number of layers."""

import re
from collections.abc import Collection, Iterable

from ..targets import layer_of

# What several modules of one layer are called: their last name alone does not tell which it is.
AMBIGUOUS = ("dense", "c_proj")


def within_layer(module: str) -> str:
    """What follows the layer's number in a module's name: ``a.0.attn.query`` -> ``attn.query``."""
    return re.split(r"\.\d+\.", module)[-1]


def lora_targets(modules: Iterable[str]) -> tuple[str, ...]:
    """Which modules of a layer these are, each once, sorted: ``a.0.query, a.1.query`` -> ``query``.

    The last part of a module's name says it, unless that is ambiguous: then it takes all that
    follows the layer's number, as in ``attention.output.dense``.
    """
    return tuple(sorted({_target(module) for module in modules}))


def are_targets(targets: Iterable[str], modules: Iterable[str]) -> bool:
    """Whether targets, as a file says them, are those of these modules, and of all of them."""
    return set(targets) == set(lora_targets(modules))


def _target(module: str) -> str:
    last = module.rpartition(".")[2]
    return within_layer(module) if last in AMBIGUOUS else last


def more_layers(theirs: Iterable[str], ours: Collection[str]) -> tuple[int, int] | None:
    """The numbers of layers of two models, if names differ because the first one has more.

    Args:
        theirs: names of modules or tensors. All that are not `ours` have to be of further layers.
        ours: the other model's.
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
