"""The families of models that this package carries: what the Auto classes and adapters ask."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loralib.adapters import families
from loralib.adapters.families import Family


@dataclass(frozen=True, kw_only=True)
class SupportedFamily:
    """A family and its classes, which are imported when they are first asked for.

    Args:
        family: what the library needs to know of its adapters.
        package: the folder's package, in which the classes are.
        classes: by role, as ``module.Class``: "config", "tokenizer" and "tokenizer_fast" (of ids
            alone, and with their alignment), "base" (what its models have in common), "backbone",
            and a model for each of the family's heads.
    """

    family: Family
    package: str
    classes: Mapping[str, str]

    def load(self, role: str) -> Any:
        """The class of a role, such as "config".

        Raises:
            ValueError: the family has none.
        """
        if role not in self.classes:
            raise ValueError(f"there is no {self.family.title} for {role}, here or in 4.4")
        module, _, name = self.classes[role].partition(".")
        return getattr(importlib.import_module(f".{module}", self.package), name)


# By model type, in the order of registration.
SUPPORTED: dict[str, SupportedFamily] = {}


def carry(family: Family, package: str, **classes: str) -> SupportedFamily:
    """Registers a family with its classes, here and in loralib; for the fields see `SupportedFamily`."""
    carried = SupportedFamily(family=families.register(family), package=package, classes=classes)
    SUPPORTED[family.name] = carried
    return carried


def modules_of_classes() -> dict[str, str]:
    """The names of all families' classes -> their modules, from this package's root on."""
    return {
        name: f".{carried.package.partition('.')[2]}.{module}"
        for carried in SUPPORTED.values()
        for module, name in (each.split(".") for each in carried.classes.values())
    }


def head_of_class(name: str) -> str | None:
    """The head that models of this class have, such as "token_classification"; None for others."""
    for carried in SUPPORTED.values():
        for role, each in carried.classes.items():
            if role in carried.family.heads and each.endswith(f".{name}"):
                return role
    return None
