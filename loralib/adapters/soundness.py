"""Whether an adapter is sound in itself: its tensors, and what its metadata says of them."""

import logging
from dataclasses import replace

import torch

from ..errors import AlphaError, CheckpointError, FullModelError
from .adapter import LORA, Adapter, base_biases, lora_metadata, plain
from .checks import check_finite
from .deltas import lora_pairs, rank_of
from .families import family_of, in_known_backbone
from .metadata import is_alpha
from .names import are_targets

logger = logging.getLogger(__name__)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_lora(adapter: Adapter, lora_alpha: float | None = None) -> Adapter:
    """A LoRA adapter with its alpha, after the checks that `read_adapter` makes.

    Args:
        adapter: as it was read.
        lora_alpha: the alpha that it was trained with, where it does not say it itself.

    Raises:
        AlphaError: it says another alpha.
        FullModelError: its tensors are those of a full model.
        CheckpointError: it is damaged, or says something else than its tensors.
    """
    adapter = _with_alpha(adapter, lora_alpha)
    check_names(adapter)
    check_values(adapter)
    if family_of(adapter.tensors) is None:
        # A file that says nothing of itself leaves more open than the others.
        level = logging.WARNING if adapter.format in ("release", "plain") else logging.INFO
        logger.log(
            level,
            "%s: of no registered family: handled as an adapter of any model, whatever its layers "
            "share or stack; importing the package that has its models registers the family",
            adapter.source,
        )
    return adapter


def _with_alpha(adapter: Adapter, alpha: float | None) -> Adapter:
    if alpha is None:
        return adapter
    if not is_alpha(alpha):
        raise AlphaError(adapter.source, given=alpha)
    if adapter.metadata is not None:
        if adapter.lora.alpha != alpha:
            raise AlphaError(adapter.source, adapter.lora.alpha, alpha)
        return adapter
    rank = rank_of(adapter.tensors, adapter.source)
    return replace(adapter, metadata=lora_metadata(adapter.tensors, rank, alpha))


def check_names(adapter: Adapter) -> None:
    """Checks that LoRA's tensors are complete, without the base's, and what its metadata says.

    Raises:
        FullModelError: some belong to the base.
        CheckpointError: they are not.
    """
    tensors, source = adapter.tensors, adapter.source
    rank, biases = rank_of(tensors, source), base_biases(tensors)
    pairs = lora_pairs(tensors, source)
    halves = {f"{module}.lora_{ab}" for module in pairs for ab in "AB"}
    for name in tensors:
        if LORA.part in name and name not in halves:
            raise CheckpointError(f"{source}: {name} is not the name of a low-rank update")
        is_of_base = in_known_backbone(name) and name not in biases
        # A convolution's frozen weight is its submodule's.
        module = name.removesuffix(".weight").removesuffix(".conv")
        is_adapted = name.endswith(".weight") and f"{module}.lora_A" in halves
        if (is_of_base and name not in halves) or is_adapted:
            raise FullModelError(source, name)
    if adapter.metadata is None:
        return
    metadata = adapter.lora
    seen = lora_metadata(tensors, rank, metadata.alpha)
    for what, is_so in (
        ("rank", metadata.rank == rank),
        ("targets", are_targets(metadata.targets, pairs)),
        ("bias", metadata.bias == seen.bias),
    ):
        if not is_so:
            said, found = (plain(getattr(each, what)) for each in (metadata, seen))
            raise CheckpointError(
                f"{source}: damaged: it says {what} {said}, its tensors have {found}"
            )


def check_values(adapter: Adapter) -> None:
    """Checks that an adapter's values are finite, and of a floating type that files hold.

    Raises:
        CheckpointError: some are not.
    """
    for name, tensor in adapter.tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{adapter.source}: {name} is of {tensor.dtype}, not of a floating type"
            )
    check_finite(adapter)
