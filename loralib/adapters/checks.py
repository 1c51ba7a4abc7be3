"""Checks of an adapter against itself, its base and the adapters beside it."""

import itertools
from collections.abc import Sequence

import torch

from ..errors import CheckpointError
from .adapter import KINDS, Adapter, plain


def check_together(adapters: Sequence[Adapter]) -> None:
    """Sees that files of several kinds are those of one model.

    Raises:
        CheckpointError: one was trained beside another that is not here, or their heads differ.
    """
    here = {adapter.kind for adapter in adapters}
    for adapter in adapters:
        beside = (adapter.metadata and adapter.metadata.trained_with) or ()
        for kind in KINDS:
            if kind.switch in beside and kind not in here:
                raise CheckpointError(
                    f"{adapter.source}: was trained with --{kind.switch} as well, which has a file "
                    f"of its own: give that as {kind.flag}"
                )
    for first, second in itertools.combinations(adapters, 2):
        for name in sorted(first.tensors.keys() & second.tensors.keys()):
            if not torch.equal(first.tensors[name], second.tensors[name]):
                raise CheckpointError(
                    f"{second.source}: is not of the same run as {first.source}: their {name} "
                    "differ"
                )


def check_positions(adapter: Adapter, reached: bool | None = None) -> None:
    """Checks that an adapter of shared projections says whether it reaches positions.

    Args:
        adapter: LoRA, for a model with shared projections.
        reached: whether that model's LoRA reaches positions, where it has LoRA; an adapter that
            says nothing of itself is the release's, which does not.

    Raises:
        CheckpointError: it does not say it, or it says the opposite.
    """
    theirs = adapter.metadata.positions if adapter.metadata else False
    if theirs is None:
        raise CheckpointError(
            f"{adapter.source}: adapts projections that positions share, and does not say whether "
            "its update reaches positions (lora_positions); train it again, or set it in its info"
        )
    if reached is not None and theirs != reached:
        raise CheckpointError(_trained_with(adapter, "lora_positions", theirs, reached))


def check_finite(adapter: Adapter) -> None:
    """Sees that all of an adapter's values are numbers.

    Raises:
        CheckpointError: some are not.
    """
    for name, tensor in adapter.tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{adapter.source}: {name} holds values that are not finite")


def alpha_is_missing(source: str) -> CheckpointError:
    """The error of LoRA whose alpha nobody has said."""
    return CheckpointError(
        f"{source}: does not say with what alpha it was trained; give it as lora_alpha "
        "(--lora_alpha)"
    )


def check_base(adapter: Adapter, base_fingerprint: str | None) -> None:
    """Sees that an adapter was trained on the base of this fingerprint, as far as both are known.

    Raises:
        CheckpointError: it was trained on another.
    """
    theirs = adapter.metadata.base_fingerprint if adapter.metadata else None
    if theirs and base_fingerprint and theirs != base_fingerprint:
        raise CheckpointError(
            f"{adapter.source}: was trained on another base than the one given: "
            f"'{adapter.metadata.base}' (fingerprint {theirs}), not one of fingerprint "
            f"{base_fingerprint}; give that one (--model_name_or_path, --init_checkpoint, --base)"
        )


def _trained_with(adapter: Adapter, what: str, theirs: object, ours: object) -> str:
    return (
        f"{adapter.source}: was trained with {what} {plain(theirs)}, "
        f"the model was built with {plain(ours)}"
    )
