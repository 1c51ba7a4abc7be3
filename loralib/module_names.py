"""Names of a model's modules: how they are joined, and which of several names is a module's first.

A module that is used in several places has several names.
"""

import re

from torch import nn


def joined(owner: str, last: str) -> str:
    """Returns the model's name for what the module `owner` calls `last`; "" is the model itself."""
    return f"{owner}.{last}" if owner else last


def owner_of(tensor: str) -> str:
    """Returns the name of the module that has a tensor; a parametrization's has all of its tensors.

    For example ``head.parametrizations.weight`` for the vectors of a spectral norm, which are in a
    module inside it.
    """
    of_parametrization = re.match(r"(.*\bparametrizations\.[^.]+)\.", tensor)
    return of_parametrization[1] if of_parametrization else tensor.rpartition(".")[0]


def first_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of a model's modules to that module's first name, in the model's order.

    State dicts list a module's tensors under all of its names, `named_parameters` only under the
    first.
    """
    first: dict[nn.Module, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    return {name: first.setdefault(module, name) for name, module in modules if name}


def other_places(model: nn.Module) -> dict[str, list[str]]:
    """Maps the first name of each module that a model uses in several places to its other names.

    A module whose second name only comes from a second name of a block around it has no other
    place.
    """
    found: dict[str, list[str]] = {}
    for name, first in first_names(model).items():
        if name == first:
            continue
        (owner, _, last), (first_owner, _, first_last) = name.rpartition("."), first.rpartition(".")
        is_same = model.get_submodule(owner) is model.get_submodule(first_owner)
        if last != first_last or not is_same:
            found.setdefault(first, []).append(name)
    return found


def layer_of(name: str) -> int | None:
    """Returns the number of a module's layer: the first number in its name, if there is one."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None
