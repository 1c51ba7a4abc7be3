"""Names of adapted modules within a layer."""

import re
from collections.abc import Iterable

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
