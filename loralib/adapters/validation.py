"""Checks that an adapter's tensors are valid and agree with its metadata."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..arguments import ABOVE_0, as_number
from ..errors import AlphaError, CheckpointError, FullModelError
from ..model_checks import DTYPES, DTYPES_OF_BUFFERS
from .adapter import LORA, Adapter, base_biases, bias_of, in_words, lora_metadata
from .checks import warn_of_alpha
from .deltas import MAGNITUDE, PARTS, START_A, START_B, rank_of, ranks_of
from .families import family_of, in_known_backbone
from .metadata import LoraMetadata, is_alpha
from .names import lora_targets

logger = logging.getLogger(__name__)


def check_lora(adapter: Adapter, lora_alpha: float | None = None) -> Adapter:
    """Checks a LoRA adapter as `read_adapter` does, and returns it with its alpha.

    Args:
        adapter: the adapter, as read from its file.
        lora_alpha: the alpha that it was trained with, if it does not record it. A warning then
            says that the alpha cannot be checked.

    Raises:
        AlphaError: it records another alpha.
        FullModelError: its tensors are those of a full model.
        CheckpointError: it is damaged, or its metadata contradicts its tensors.
    """
    says_alpha = adapter.metadata is not None
    adapter = _with_alpha(adapter, lora_alpha)
    check_names(adapter)
    check_values(adapter)
    if lora_alpha is not None and not says_alpha:
        warn_of_alpha(adapter.source, lora_alpha)
    if family_of(adapter.tensors) is None:
        # A file without metadata leaves more unknown than others.
        level = logging.WARNING if adapter.format in ("release", "plain") else logging.INFO
        logger.log(
            level,
            "%s is for a kind of model that is not known here, whose layers may share a weight or "
            "stack updates",
            adapter.source,
        )
    return adapter


def _with_alpha(adapter: Adapter, alpha: float | None) -> Adapter:
    if alpha is None:
        return adapter
    alpha = as_number("lora_alpha", alpha, ABOVE_0.what)
    if not is_alpha(alpha):
        raise AlphaError(adapter.source, given=alpha)
    if adapter.metadata is not None:
        if adapter.lora.alpha != alpha:
            raise AlphaError(adapter.source, adapter.lora.alpha, alpha)
        return adapter
    rank = rank_of(adapter.tensors, adapter.source)
    return replace(adapter, metadata=lora_metadata(adapter.tensors, rank, alpha))


def check_names(adapter: Adapter) -> None:
    """Checks that an adapter has all LoRA tensors, none of the base's, and what its metadata says.

    Raises:
        FullModelError: some tensors belong to the base.
        CheckpointError: tensors are missing, unknown, or contradict the metadata.
    """
    tensors, source = adapter.tensors, adapter.source
    ranks, biases = ranks_of(tensors, source), base_biases(tensors)
    parts = {f"{module}.{part}" for module in ranks for part in PARTS}
    weights = ("weight", "conv.weight", "in_proj_weight")
    of_adapted = {f"{module}.{weight}" for module in ranks for weight in weights}
    for name in tensors:
        if LORA.part in name and name not in parts:
            raise CheckpointError(f"{source}: {name} is not the name of a low-rank update")
        is_of_base = in_known_backbone(name) and name not in biases
        if (is_of_base and name not in parts) or name in of_adapted:
            if adapter.format == "peft":
                raise CheckpointError(
                    f"{source}: holds {name}, a weight of the base, which adapters here cannot "
                    "hold: merge it with PEFT"
                )
            raise FullModelError(source, name)
    metadata = None if adapter.metadata is None else adapter.lora
    _check_parts(tensors, ranks, metadata, source)
    if metadata is None:
        rank_of(tensors, source)  # an adapter without metadata must have a single rank
    else:
        _check_said(metadata, tensors, ranks, source)


def _check_parts(
    tensors: Mapping[str, Tensor],
    modules: Collection[str],
    metadata: LoraMetadata | None,
    source: str,
) -> None:
    """Checks which tensors each module has besides A and B, by its variant and initialization."""
    expected = {
        MAGNITUDE: metadata is not None and metadata.has_magnitude,
        START_A: metadata is not None and metadata.has_start,
        START_B: metadata is not None and metadata.has_start,
    }
    for part, is_expected in expected.items():
        for name in (f"{module}.{part}" for module in modules):
            if is_expected and name not in tensors:
                raise CheckpointError(f"{source}: lacks {name}, which {_kind_of(metadata)} has")
            if name in tensors and not is_expected:
                raise CheckpointError(
                    f"{source}: holds {name}, which {_kind_of(metadata)} does not have"
                )
            if is_expected:
                _check_shape(tensors, name, source)


def _kind_of(metadata: LoraMetadata | None) -> str:
    if metadata is None:
        return "LoRA in a file that records neither variant nor initialization"
    variant, initialization = metadata.variant or "lora", metadata.initialization or "default"
    return f"LoRA of the variant {variant} and the initialization {initialization}"


def _check_shape(tensors: Mapping[str, Tensor], name: str, source: str) -> None:
    module, _, part = name.rpartition(".")
    A, B = tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]
    needed = {MAGNITUDE: (len(B),), START_A: tuple(A.shape), START_B: tuple(B.shape)}[part]
    if tensors[name].shape != needed:
        raise CheckpointError(
            f"{source}: {name} is {tuple(tensors[name].shape)}, but its module needs {needed}"
        )


def _check_said(
    metadata: LoraMetadata, tensors: Mapping[str, Tensor], ranks: Mapping[str, int], source: str
) -> None:
    """Checks the metadata against what the tensors show."""
    targets, bias = lora_targets(ranks), bias_of(tensors)
    if {*metadata.targets} != {*targets}:  # in any order
        raise _contradiction(source, f"targets {in_words(metadata.targets)}", in_words(targets))
    if metadata.bias != bias:
        raise _contradiction(source, f"bias {metadata.bias}", bias)
    differ = metadata.rank_pattern or len({*ranks.values()}) > 1
    for module, found in ranks.items():
        if metadata.rank_of(module) != found:
            where = f" in {module}" if differ else ""
            raise _contradiction(source, f"rank {metadata.rank_of(module)}{where}", str(found))
    for what in ("rank_pattern", "alpha_pattern", "embeddings", "slices", "stacks"):
        unknown = sorted(set(getattr(metadata, what) or ()) - ranks.keys())
        if unknown:
            raise _contradiction(source, f"{what} of {unknown[0]}", "no such update")


def _contradiction(source: str, said: str, found: str) -> CheckpointError:
    return CheckpointError(f"{source}: damaged: it says {said}, its tensors have {found}")


def check_values(adapter: Adapter) -> None:
    """Checks that an adapter's values are finite, and of a dtype that adapter files can hold.

    Raises:
        CheckpointError: some are not.
    """
    for name, tensor in adapter.tensors.items():
        may_be_buffer = tensor.dtype in DTYPES_OF_BUFFERS and LORA.part not in name
        if tensor.dtype not in DTYPES and not may_be_buffer:
            raise CheckpointError(
                f"{adapter.source}: {name} is of {tensor.dtype}, which adapters cannot hold: "
                "convert it to float32, float64, float16 or bfloat16"
            )
    check_finite(adapter)


def check_finite(adapter: Adapter) -> None:
    """Checks that all of an adapter's values are finite.

    Raises:
        CheckpointError: some are not.
    """
    for name, tensor in adapter.tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{adapter.source}: {name} holds values that are not finite")
