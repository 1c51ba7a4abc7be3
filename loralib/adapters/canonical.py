"""The canonical names of an adapter's tensors: those that this project's models have for them."""

import re
from collections.abc import Mapping

from torch import Tensor

from ..errors import CheckpointError
from ..io.tensors import same_tensor
from .families import family_of, registered


def canonical_names(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """An adapter's tensors, or a full checkpoint's, under their canonical names.

    Replaced are DDP's ``module.`` and the earlier names of registered families. Tensors that such a
    family ties to another one are left out.

    Raises:
        CheckpointError: two tensors have one name, or tied ones differ.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = _canonical_name(name)
        if own in renamed:
            raise CheckpointError(f"{source}: holds {own} under two names")
        renamed[own] = tensor
    return _without_tied(renamed, source)


def _canonical_name(name: str) -> str:
    name = name.removeprefix("module.")
    for family in registered():
        for old, new in family.old_names.items():
            name = re.sub(old, new, name)
    return name


def _without_tied(tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    family = family_of(tensors)
    if family is None:
        return tensors
    for name, kept in family.tied.items():
        tied = tensors.get(name)
        is_tied = tied is None or (kept in tensors and same_tensor(tied, tensors[kept]))
        if is_tied:
            tensors.pop(name, None)
        elif not family.may_untie:
            raise CheckpointError(
                f"{source}: brings {name}, a head of its own; {family.title}'s is {kept}"
            )
    return tensors
