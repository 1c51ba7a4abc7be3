"""The families of models that this package carries: what the Auto classes and adapters ask."""

import importlib
from dataclasses import dataclass
from typing import Any

from loralib.adapters import families
from loralib.adapters.families import Family


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A family and its classes, which are imported when they are first asked for.

    Args:
        family: what the library needs to know of its adapters.
        package: the folder's package, in which the classes are, as ``module.Class``.
        config: its settings.
        tokenizer, tokenizer_fast: its tokenizers: of ids alone, and with their alignment.
        base: what its models have in common.
        backbone, masked_lm, sequence_classification: its models.
    """

    family: Family
    package: str
    config: str
    tokenizer: str
    tokenizer_fast: str
    base: str
    backbone: str
    masked_lm: str
    sequence_classification: str

    def load(self, role: str) -> Any:
        """The class of a role, such as "config"."""
        module, _, name = getattr(self, role).partition(".")
        return getattr(importlib.import_module(f".{module}", self.package), name)


_ROLES = (
    "config",
    "tokenizer",
    "tokenizer_fast",
    "base",
    "backbone",
    "masked_lm",
    "sequence_classification",
)

# By model type, in the order of registration.
CARRIED: dict[str, Carried] = {}


def carry(family: Family, **classes: str) -> Carried:
    """Registers a family with its classes, here and in loralib; for the fields see `Carried`."""
    carried = Carried(family=families.register(family), **classes)
    CARRIED[family.name] = carried
    return carried


def modules_of_classes() -> dict[str, str]:
    """The names of all families' classes -> their modules, from this package's root on."""
    classes = [
        (carried.package.partition(".")[2], *getattr(carried, role).split("."))
        for carried in CARRIED.values()
        for role in _ROLES
    ]
    return {name: f".{package}.{module}" for package, module, name in classes}
