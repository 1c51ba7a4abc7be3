"""Gives an adapter's tensors their canonical names: the names that this project's models use."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from torch import Tensor

from ..errors import CheckpointError
from ..io.tensors import same_tensor
from .families import Family, family_of, in_known_backbone, registered

_DDP_PREFIX = "module."
# What `torch.compile` adds to names, before those of a model or of a compiled part of it.
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")


def canonical_names(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Returns the tensors of an adapter or of a full checkpoint under their canonical names.

    Earlier names in registered families are replaced. Tensors that such a family ties to another
    one are left out.

    Raises:
        CheckpointError: two tensors get the same name, or tied tensors differ.
    """
    families = [family for family in registered() if _has_names_of(family, tensors)]
    rename = partial(_newest_name, families=families)
    return _without_tied(renamed(tensors, rename, source), source)


def names_without_wrappers(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Removes what DDP and `torch.compile` add to names: ``module.`` and ``_orig_mod.``.

    A model may have a module called ``module`` itself. The prefix is taken for DDP's only if all
    names have it, or if the backbone of a registered family follows it.

    Raises:
        CheckpointError: two tensors get the same name.
    """
    tensors = renamed(tensors, uncompiled, source)
    if not has_ddp_prefix(tensors):
        return tensors
    return renamed(tensors, lambda name: name.removeprefix(_DDP_PREFIX), source)


def uncompiled(name: str) -> str:
    """Returns the name that a tensor has in the model that was given to `torch.compile`."""
    return _COMPILED.sub("", name)


def has_ddp_prefix(names: Collection[str]) -> bool:
    """Returns whether `names_without_wrappers` takes a ``module.`` prefix for a DDP wrapper's."""
    wrapped = [name.removeprefix(_DDP_PREFIX) for name in names if name.startswith(_DDP_PREFIX)]
    is_known = any(in_known_backbone(_newest_name(name)) for name in wrapped)
    return is_known or len(wrapped) == len(names) > 0


def renamed(
    tensors: Mapping[str, Tensor], rename: Callable[[str], str], source: str
) -> dict[str, Tensor]:
    """Returns tensors under other names.

    Raises:
        CheckpointError: two tensors get the same name.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in found:
            raise CheckpointError(f"{source}: holds {new} under two names")
        found[new] = tensor
    return found


def _has_names_of(family: Family, names: Iterable[str]) -> bool:
    """Returns whether names may be this family's earlier ones, not those of another's layers."""
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
        elif not (family.may_untie and in_known_backbone(kept)):
            raise CheckpointError(
                f"{source}: holds {name} as a separate head weight, but in {family.title} it is "
                f"tied to {kept}"
            )
    return tensors
