"""The registry of this package's model families, for the Auto classes and adapters."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loralib.adapters import families
from loralib.adapters.families import Family


@dataclass(frozen=True, kw_only=True)
class SupportedFamily:
    """A family and its classes, which are imported on first use.

    Args:
        family: what loralib needs to know about the family's adapters.
        package: the package that holds the classes' modules.
        classes: role -> ``module.Class``. The roles are "config", "tokenizer" (gives ids alone),
            "tokenizer_fast" (also aligns them with the text), "base" (the base class of the
            models), "backbone", and the name of each of the family's heads.
    """

    family: Family
    package: str
    classes: Mapping[str, str]

    def load(self, role: str) -> Any:
        """Returns the class of a role, such as "config".

        Raises:
            ValueError: the family has no class for it.
        """
        if role not in self.classes:
            raise ValueError(
                f"{self.family.title} has no model for {role}, neither here nor in Transformers 4.4"
            )
        module, _, name = self.classes[role].partition(".")
        return getattr(importlib.import_module(f".{module}", self.package), name)


# By model type, in the order of registration.
SUPPORTED: dict[str, SupportedFamily] = {}


def register_family(family: Family, package: str, **classes: str) -> SupportedFamily:
    """Registers a family with its classes, here and in loralib; see `SupportedFamily`."""
    supported = SupportedFamily(family=families.register(family), package=package, classes=classes)
    SUPPORTED[family.name] = supported
    return supported


def modules_of_classes() -> dict[str, str]:
    """Returns class name -> module, relative to this package's root, for all families."""
    return {
        name: f".{family.package.partition('.')[2]}.{module}"
        for family in SUPPORTED.values()
        for module, name in (each.split(".") for each in family.classes.values())
    }


def head_of_class(name: str) -> str | None:
    """Returns the head of a class's models, such as "token_classification", or None."""
    for supported in SUPPORTED.values():
        for role, each in supported.classes.items():
            if role in supported.family.heads and each.endswith(f".{name}"):
                return role
    return None
