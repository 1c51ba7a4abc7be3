"""Copies an adapter into a model that has its layers, after all checks."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, MissingLayersError
from ..layers import LoRALayer, MergedLinear
from ..nn.positions import lora_reaches_positions
from .adapter import LORA, Adapter, adapter_tensors, base_biases, trained_with
from .checks import check_base, check_finite, check_positions
from .families import backbone_prefixes, enabled_slices
from .metadata import LoraMetadata, usual
from .names import are_targets, lora_targets


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    """The layers of `model` that have a low-rank update, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoRALayer) and module.r > 0
    }


def lora_settings(model: nn.Module) -> dict[str, Any]:
    """What a model's LoRA was built with, by the names that `LoraMetadata` has for it.

    Args:
        model: it has LoRA layers; they may differ in rank and alpha alone.

    Raises:
        CheckpointError: they differ in more.
    """
    layers = lora_layers(model)
    rank, ranks = usual({name: layer.r for name, layer in layers.items()})
    alpha, alphas = usual({name: layer.lora_alpha for name, layer in layers.items()})
    embeddings = tuple(sorted(n for n, each in layers.items() if isinstance(each, nn.Embedding)))
    return {
        "rank": rank,
        "alpha": alpha,
        "targets": lora_targets(layers),
        "positions": lora_reaches_positions(model),
        "variant": _common(layers, "variant", "lora"),
        "rank_pattern": ranks or None,
        "alpha_pattern": alphas or None,
        "initialization": _common(layers, "initialization", "default"),
        "freeze_A": _common(layers, "freeze_A", False),
        "embeddings": embeddings or None,
        "slices": _own_slices(layers) or None,
    }


def _common(layers: Mapping[str, LoRALayer], setting: str, default: object) -> object | None:
    """A setting that all layers have; None for the default."""
    values = {name: getattr(layer, setting, default) for name, layer in layers.items()}
    common, others = usual(values)
    for name, value in others.items():
        raise CheckpointError(
            f"the model's LoRA is of several kinds, which no file holds: {name} has {setting} "
            f"{value}, others have {common}"
        )
    return None if common == default else common


def _own_slices(layers: Mapping[str, LoRALayer]) -> dict[str, tuple[bool, ...]]:
    """The slices that stacked updates reach, where no family says them."""
    slices = {
        name: tuple(layer.enable_lora)
        for name, layer in layers.items()
        if isinstance(layer, MergedLinear)
    }
    return {name: own for name, own in slices.items() if own != enabled_slices(name)}


def load_into(
    model: nn.Module,
    adapter: Adapter,
    base_fingerprint: str | None = None,
    backbones: Iterable[str] | None = None,
    new_head: bool = False,
    settings: Mapping[str, object] | None = None,
    known: Collection[str] = (),
) -> list[str]:
    """Copies an adapter's tensors into `model`, after checking all that can be checked.

    Args:
        model: a model with the LoRA layers, or what else the adapter is of, in place.
        adapter: what `read_adapter` read.
        base_fingerprint: `fingerprint` of the model's base, compared with the adapter's.
        backbones: names that start so belong to the base; None for those of registered families.
        new_head: a head of another shape is left as it is instead of refused: the adapter then is
            the start for another task.
        settings: what the model was built with, by the metadata's names for it; compared with the
            adapter's. LoRA's are seen from its layers.
        known: the model's tensors that its base has brought: of these, a head's module may stay as
            it is where the adapter has nothing of it.

    Returns:
        The names of the head's tensors that were left as they are.

    Raises:
        MissingLayersError: the model has no layers of the adapter's kind.
        WrongBaseError: the adapter was trained on another base.
        CheckpointError: rank, alpha, targets, names or shapes do not fit. Nothing is copied.
    """
    starts = backbone_prefixes() if backbones is None else tuple(backbones)
    state = model.state_dict()
    own = adapter_tensors(state, starts, adapter.kind)
    if adapter.kind is LORA:
        # Biases that were trained with it take the place of the base's.
        own |= {name: state[name] for name in base_biases(adapter.tensors) & state.keys()}
        if not lora_layers(model):
            raise MissingLayersError(adapter.source, LORA.name, LORA.switch)
        settings = lora_settings(model)
    _check_metadata(adapter, settings or {}, base_fingerprint)
    brought = {name.partition(".")[0] for name in adapter.tensors}
    own = {
        name: tensor
        for name, tensor in own.items()
        if adapter.kind.holds(name, starts)
        or name not in known
        or name.partition(".")[0] in brought
    }
    _check_names(adapter, own, starts)
    skipped = _check_shapes(adapter, own, starts, new_head)
    check_finite(adapter)
    with torch.no_grad():
        for name, tensor in adapter.tensors.items():
            if name not in skipped:
                own[name].copy_(tensor)
    return skipped


def _check_metadata(
    adapter: Adapter, settings: Mapping[str, Any], base_fingerprint: str | None
) -> None:
    metadata = adapter.metadata
    if settings.get("positions") is not None:
        check_positions(adapter, settings["positions"])
    if metadata is None:
        return
    if isinstance(metadata, LoraMetadata):
        _check_lora_settings(adapter, metadata, LoraMetadata(**settings))
    else:
        for what, ours in settings.items():
            theirs = getattr(metadata, what)
            if theirs != ours:
                raise CheckpointError(f"{adapter.source}: {trained_with(what, theirs, ours)}")
    check_base(adapter, base_fingerprint)


def _check_lora_settings(adapter: Adapter, theirs: LoraMetadata, ours: LoraMetadata) -> None:
    """Checks all that changes what a model computes with the adapter's tensors."""
    by_module = any((theirs.rank_pattern, theirs.alpha_pattern))
    by_module = by_module or any((ours.rank_pattern, ours.alpha_pattern))
    adapted = {name.rpartition(".")[0] for name in adapter.tensors if LORA.part in name}
    for module in sorted(adapted):
        for what, one, other in (
            ("rank", theirs.rank_of(module), ours.rank_of(module)),
            ("alpha", theirs.alpha_of(module), ours.alpha_of(module)),
        ):
            if one != other:
                where = f" (in {module})" if by_module else ""
                raise CheckpointError(f"{adapter.source}: {trained_with(what, one, other)}{where}")
    if not are_targets(theirs.targets, ours.targets):
        difference = trained_with("targets", theirs.targets, ours.targets)
        raise CheckpointError(f"{adapter.source}: {difference}")
    for setting, said, built in (
        ("variant", theirs.variant, ours.variant),
        ("initialization", _start_of(theirs), _start_of(ours)),
        # Files of earlier versions do not say what follows.
        ("embeddings", theirs.embeddings, theirs.embeddings and ours.embeddings),
        ("slices", theirs.slices, theirs.slices and ours.slices),
    ):
        if said != built:
            raise CheckpointError(f"{adapter.source}: {trained_with(setting, said, built)}")


def _start_of(metadata: LoraMetadata) -> str | None:
    """The initialization, if a trained adapter depends on it."""
    return metadata.initialization if metadata.has_start else None


def _check_names(adapter: Adapter, own: Mapping[str, Tensor], starts: tuple[str, ...]) -> None:
    kind = adapter.kind
    theirs = {name for name in adapter.tensors if kind.holds(name, starts)}
    ours = {name for name in own if kind.holds(name, starts)}
    if not ours:
        raise MissingLayersError(adapter.source, kind.name, kind.switch)
    if not theirs & ours:
        raise CheckpointError(
            f"{adapter.source}: matches no layer of the model: it has '{min(theirs, default='')}', "
            f"…, the model has '{min(ours)}', …"
        )
    mismatch = kind.mismatch(theirs, ours)
    if mismatch:
        raise CheckpointError(f"{adapter.source}: {mismatch}")
    lacking, unknown = own.keys() - adapter.tensors.keys(), adapter.tensors.keys() - own.keys()
    for what, some in (("lacks", lacking), ("has, unknown to the model,", unknown)):
        if some:
            listed = ", ".join(sorted(some)[:4]) + (", …" if len(some) > 4 else "")
            raise CheckpointError(f"{adapter.source}: {what} {len(some)} tensors: {listed}")


def _check_shapes(
    adapter: Adapter, own: Mapping[str, Tensor], starts: tuple[str, ...], new_head: bool
) -> list[str]:
    skipped = []
    for name, tensor in adapter.tensors.items():
        if tensor.shape == own[name].shape:
            continue
        if new_head and not adapter.kind.holds(name, starts):
            skipped.append(name)
            continue
        shapes = f"{tuple(tensor.shape)} in the file, {tuple(own[name].shape)} in the model"
        hint, (ending, size) = "", adapter.kind.sized_by
        if ending and name.endswith(ending):
            hint = f": {size} {tensor.shape[0]}, not {own[name].shape[0]}"
            if tensor.shape[1:] != own[name].shape[1:]:
                hint = ": a base of another size"
        raise CheckpointError(f"{adapter.source}: {name} is {shapes}{hint}")
    return skipped
