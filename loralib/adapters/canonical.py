"""The canonical names of an adapter's tensors: those that this project's models have for them."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from torch import Tensor

from ..errors import CheckpointError
from ..io.tensors import same_tensor
from .families import Family, family_of, in_known_backbone, registered

_DDP_PREFIX = "module."


def canonical_names(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """An adapter's tensors, or a full checkpoint's, under their canonical names.

    Replaced are the earlier names of registered families. Tensors that such a family ties to
    another one are left out.

    Raises:
        CheckpointError: two tensors have one name, or tied ones differ.
    """
    families = [family for family in registered() if _has_names_of(family, tensors)]
    rename = partial(_newest_name, families=families)
    return _without_tied(_renamed(tensors, rename, source), source)


def without_ddp_prefix(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The tensors of a file that may have been written of a DDP wrapper, without its ``module.``.

    A model may have a module of that name itself. So it is the wrapper's where all names begin so,
    or the name of a registered family's backbone follows it.

    Raises:
        CheckpointError: two tensors have one name.
    """
    if not has_ddp_prefix(tensors):
        return dict(tensors)
    return _renamed(tensors, lambda name: name.removeprefix(_DDP_PREFIX), source)


def has_ddp_prefix(names: Collection[str]) -> bool:
    """Whether the names that begin with ``module.`` would be a DDP wrapper's, by that rule."""
    wrapped = [name.removeprefix(_DDP_PREFIX) for name in names if name.startswith(_DDP_PREFIX)]
    is_known = any(in_known_backbone(_newest_name(name)) for name in wrapped)
    return is_known or len(wrapped) == len(names) > 0


def _renamed(
    tensors: Mapping[str, Tensor], rename: Callable[[str], str], source: str
) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in renamed:
            raise CheckpointError(f"{source}: holds {new} under two names")
        renamed[new] = tensor
    return renamed


def _has_names_of(family: Family, names: Iterable[str]) -> bool:
    """Whether names may be earlier ones of this family: not where its layers would be another's."""
    newest = [_newest_name(name, [family]) for name in names]
    inside = [name for name in newest if name.startswith(family.layers)]
    return not inside or family.has_layers_of(inside)


def _newest_name(name: str, families: Iterable[Family] | None = None) -> str:
    for family in registered() if families is None else families:
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
