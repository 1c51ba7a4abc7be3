"""Checks an adapter against its base, a model's positions, and the other adapters of its run."""

import itertools
import logging
from collections.abc import Collection, Sequence

import torch

from ..errors import CheckpointError, MissingPartError, SettingsError, WrongBaseError
from .adapter import Adapter, lora_modules
from .families import Family, family_of
from .fingerprint import are_of_one_base

logger = logging.getLogger(__name__)


def check_family(adapter: Adapter, family: Family) -> None:
    """Checks that a LoRA adapter may belong to a family's models, by the modules that it adapts.

    Raises:
        CheckpointError: it belongs to another family, or adapts no module of this one.
    """
    modules = lora_modules(adapter.tensors)
    found = family_of(modules)
    if family.has_layers_of(modules) or (found is None and _may_be_of(family, modules)):
        return
    theirs = f"holds an adapter of {found.title if found else min(modules)}"
    raise CheckpointError(
        f"{adapter.source}: {theirs}, but the layers of {family.title} are called "
        f"{family.layers}0, …: give an adapter that was trained on a {family.title}"
    )


def _may_be_of(family: Family, modules: Collection[str]) -> bool:
    """Returns whether modules may be a family's, under any prefix."""
    parts = {part for module in modules for part in module.split(".")}
    return not modules or not parts.isdisjoint(family.top_modules)


def check_together(adapters: Sequence[Adapter]) -> None:
    """Checks that adapters of several kinds belong to one model.

    Raises:
        MissingPartError: one of them was trained together with an adapter that is missing.
        CheckpointError: their heads differ.
    """
    here = {adapter.kind.switch for adapter in adapters}
    for adapter in adapters:
        for switch in (adapter.metadata and adapter.metadata.trained_with) or ():
            if switch not in here:
                raise MissingPartError(adapter.source, switch)
    for first, second in itertools.combinations(adapters, 2):
        for name in sorted(first.tensors.keys() & second.tensors.keys()):
            if not torch.equal(first.tensors[name], second.tensors[name]):
                raise CheckpointError(
                    f"{second.source}: does not belong to the same run as {first.source}: their "
                    f"{name} differ"
                )


def check_positions(adapter: Adapter, reached: bool | None = None) -> None:
    """Checks that an adapter of shared projections records whether it reaches positions.

    An adapter without metadata is assumed to be the release's, which does not reach them.

    Args:
        adapter: LoRA for a model in which contents and positions share projections.
        reached: whether that model's LoRA reaches positions. None if it has no LoRA.

    Raises:
        CheckpointError: the adapter does not record it, or records the opposite of `reached`.
    """
    theirs = adapter.lora.positions if adapter.metadata else False
    if theirs is None:
        raise CheckpointError(
            f"{adapter.source}: adapts projections that positions share, but does not record "
            "whether its update reaches positions (lora_positions); train it again, or set that "
            "in its metadata"
        )
    if reached is not None and theirs != reached:
        raise SettingsError(adapter.source, "lora_positions", theirs, reached)


def warn_of_alpha(source: str | None, alpha: float) -> None:
    """Warns that the alpha that was given for a file cannot be checked."""
    logger.warning("%s does not record its alpha: cannot check that it is %g", source, alpha)


def warn_of_base(source: str | None, base: str | None) -> None:
    """Warns that it cannot be checked whether a file was trained on this base."""
    logger.warning(
        "%s does not record its base's fingerprint: cannot check that its base is %s", source, base
    )


def check_base(adapter: Adapter, base_fingerprint: str | None) -> None:
    """Checks that an adapter was trained on the base with this fingerprint, if both are known.

    Raises:
        WrongBaseError: it was trained on another base.
    """
    metadata = adapter.metadata
    if metadata is None or metadata.base_fingerprint is None or base_fingerprint is None:
        return
    theirs = metadata.base_fingerprint
    if not are_of_one_base(theirs, base_fingerprint):
        raise WrongBaseError(adapter.source, metadata.base, theirs, base_fingerprint)


def check_possible_base(adapter: Adapter, fingerprints: Sequence[str]) -> None:
    """Checks what `check_base` does, for a base that has several possible fingerprints, or none.

    If there is nothing to compare, it logs a warning.
    """
    theirs = adapter.lora.base_fingerprint
    if not theirs:
        warn_of_base(adapter.source, "this model")
    elif not fingerprints:
        logger.warning(
            "%s: a model in float16, or quantized or offloaded in part, has no fingerprint: "
            "cannot check that it is the adapter's base",
            adapter.source,
        )
    elif not any(are_of_one_base(theirs, each) for each in fingerprints):
        check_base(adapter, fingerprints[0])
