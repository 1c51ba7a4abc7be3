"""Copies an adapter into a model, after all checks.

`load_into` takes a model that was built with LoRA layers. `load_adapter` takes any model, and adds
them.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..adaptation import LayerSettings
from ..arguments import check_model, check_not_scripted
from ..errors import CheckpointError, MissingLayersError, SettingsError, trained_with
from ..in_place import is_in_place
from ..initialization import deferring_start, starts_from_weight
from ..inject import adapt
from ..inject_warnings import warn_of_reads
from ..io.tensors import same_when_rounded
from ..lora_layer import LoRALayer, lora_layers
from ..model_checks import check_no_peft_layers, check_there, check_whole, tensors_of
from ..positions import shared_projections
from ..quantized_layers import check_unpacked, is_quantized_linear, needs_weight
from ..stacks import stack_of_layer, stacked_weights
from ..targets import first_names_of_targets
from ..text import counted, listed
from ..tied_words import let_note_untied
from ..trained import note_trained, note_untied, noted
from ..utils import freeze_base
from ..wrappers import without_wrappers
from ..zero3 import check_not_copied
from .adapted_weights import AdaptedWeight, adapted_modules, base_to_give
from .adapter import LORA, Adapter, adapter_tensors, base_biases, lora_modules
from .checks import check_base, check_positions, check_possible_base
from .deltas import has_slices, slices_in
from .families import backbone_prefixes, top_module
from .fingerprint import possible_fingerprints
from .formats import read_adapter_for
from .merging import named_tensors, untied_by
from .metadata import LoraMetadata
from .model_settings import lora_settings, setting_of, takes_dropout
from .names import more_layers
from .validation import check_finite

logger = logging.getLogger(__name__)

# PyTorch's name in a state dict for what a module's `get_extra_state` returns.
_EXTRA_STATE = "_extra_state"


def load_into(
    model: nn.Module,
    adapter: Adapter,
    base_fingerprint: str | None = None,
    backbones: Iterable[str] | None = None,
    new_head: bool = False,
    settings: Mapping[str, Any] | None = None,
    known: Collection[str] = (),
) -> list[str]:
    """Copies an adapter's tensors into `model`, after checking all that can be checked.

    Args:
        model: a model that already has the LoRA layers, or the parts that the adapter's kind needs.
        adapter: the adapter, as `read_adapter` returned it.
        base_fingerprint: `fingerprint` of the model's base, compared with the adapter's.
        backbones: prefixes of the names that belong to the base. None means the backbones of the
            registered families.
        new_head: whether tensors of the model's head are left as they are if the adapter's have
            another shape, so that the adapter is the start for another task. If False, such an
            adapter is refused.
        settings: the settings that the model was built with, by their names in the metadata. They
            are compared with the adapter's. LoRA's settings are read from the layers instead.
        known: the names of the tensors that the model got from its base. A head's module among them
            may stay as it is if the adapter has no tensors of it.

    Returns:
        The names of the adapter's head tensors that were not copied.

    Raises:
        MissingLayersError: the model has no layers of the adapter's kind.
        WrongBaseError: the adapter was trained on another base.
        CheckpointError: rank, alpha, targets, names or shapes do not fit. Nothing is copied.
    """
    starts = backbone_prefixes() if backbones is None else tuple(backbones)
    state = model.state_dict()
    expected = adapter_tensors(state, starts, adapter.kind)
    if adapter.kind == LORA:
        # Biases that were trained with LoRA replace the base's.
        expected |= {name: state[name] for name in base_biases(adapter.tensors) & state.keys()}
        if not lora_layers(model):
            raise MissingLayersError(adapter.source, LORA.name, LORA.switch)
        settings = lora_settings(model)
    _check_metadata(adapter, settings or {}, base_fingerprint)
    brought = {top_module(name) for name in adapter.tensors}
    expected = {
        name: tensor
        for name, tensor in expected.items()
        if adapter.kind.holds(name, starts) or name not in known or top_module(name) in brought
    }
    _check_names(adapter, expected, starts, state.keys())
    if settings and settings.get("positions") is not None:
        # Only in this case: an adapter of another family does not record positions, and cannot.
        check_positions(adapter, settings["positions"])
    skipped = _check_shapes(adapter, expected, starts, new_head)
    check_finite(adapter)
    with torch.no_grad():
        for name, tensor in adapter.tensors.items():
            if name not in skipped:
                expected[name].copy_(tensor)
    return skipped


def _check_metadata(
    adapter: Adapter, settings: Mapping[str, Any], base_fingerprint: str | None
) -> None:
    metadata = adapter.metadata
    if metadata is None:
        return
    check_base(adapter, base_fingerprint)  # first: a wrong base explains other differences, too
    if isinstance(metadata, LoraMetadata):
        _check_lora_settings(adapter, metadata, LoraMetadata(**settings))
    else:
        for what, ours in settings.items():
            theirs = getattr(metadata, what)
            if theirs != ours:
                raise SettingsError(adapter.source, what, theirs, ours)


def _check_lora_settings(adapter: Adapter, theirs: LoraMetadata, ours: LoraMetadata) -> None:
    """Checks all settings that change what a model computes with the adapter's tensors."""
    both = theirs, ours
    by_module = any(each.rank_pattern or each.alpha_pattern for each in both)
    adapted = sorted(lora_modules(adapter.tensors))
    for module in adapted:
        for what, one, other in (
            ("rank", theirs.rank_of(module), ours.rank_of(module)),
            ("alpha", theirs.alpha_of(module), ours.alpha_of(module)),
        ):
            if one != other:
                where = module if by_module else ""
                raise SettingsError(adapter.source, what, one, other, where)
    if {*theirs.targets} != {*ours.targets}:
        raise SettingsError(adapter.source, "targets", theirs.targets, ours.targets)
    for setting, said, built in (
        ("variant", theirs.variant or "lora", ours.variant or "lora"),
        ("initialization", _start_of(theirs), _start_of(ours)),
        ("embeddings", theirs.embeddings, ours.embeddings),
        ("stacks", theirs.stacks, ours.stacks),
    ):
        if said != built:
            raise SettingsError(adapter.source, setting, said, built)
    for module in adapted:
        slices = [slices_in(each, module) for each in both]
        # If neither the adapter's metadata nor a family says its slices, they cannot be compared.
        if slices[0] and slices[0] != slices[1]:
            theirs_of, ours_of = map(list, slices)
            raise SettingsError(adapter.source, f"slices of {module}", theirs_of, ours_of)


def _start_of(metadata: LoraMetadata) -> str:
    """Returns the initialization, or "default" if a trained adapter does not depend on it."""
    return metadata.initialization if metadata.initialization and metadata.has_start else "default"


def _check_names(
    adapter: Adapter,
    expected: Mapping[str, Tensor],
    starts: tuple[str, ...],
    names: Collection[str],
) -> None:
    """Checks that an adapter has exactly the expected tensors. `names` are all of the model's."""
    kind = adapter.kind
    theirs = {name for name in adapter.tensors if kind.holds(name, starts)}
    ours = {name for name in expected if kind.holds(name, starts)}
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
    lacking = expected.keys() - adapter.tensors.keys()
    unknown = adapter.tensors.keys() - expected.keys()
    layers = more_layers(unknown, names)
    lacks = f"lacks {counted(len(lacking), 'tensor')}"
    has = f"has {counted(len(unknown), 'tensor')} that the model does not have"
    if layers:
        raise CheckpointError(
            f"{adapter.source}: {has}: "
            f"{listed(unknown, at_most=1)}: {base_to_give(adapter, layers)}"
        )
    for what, some in ((lacks, lacking), (has, unknown)):
        if some:
            raise CheckpointError(f"{adapter.source}: {what}: {listed(some)}")


def _check_shapes(
    adapter: Adapter, expected: Mapping[str, Tensor], starts: tuple[str, ...], new_head: bool
) -> list[str]:
    skipped = []
    for name, tensor in adapter.tensors.items():
        if tensor.shape == expected[name].shape:
            continue
        if new_head and not adapter.kind.holds(name, starts):
            skipped.append(name)
            continue
        shapes = f"{tuple(tensor.shape)} in the file, {tuple(expected[name].shape)} in the model"
        hint, (ending, size) = "", adapter.kind.sized_by
        if ending and name.endswith(ending):
            hint = f": {size} {tensor.shape[0]}, not {expected[name].shape[0]}"
            if tensor.shape[1:] != expected[name].shape[1:]:
                hint = ": a base of another size"
        raise CheckpointError(f"{adapter.source}: {name} is {shapes}{hint}")
    return skipped


# ------------------------------------------------------------------------------------------------
# Any model
# ------------------------------------------------------------------------------------------------


def load_adapter(
    model: nn.Module,
    source: str | PathLike,
    *,
    lora_alpha: float | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | bool | None = None,
) -> tuple[str, ...]:
    """Loads an adapter of any format into a model, and adds the LoRA layers that it needs.

    Everything that the adapter brings can be trained further: its LoRA, and its head and biases,
    which replace the model's. If the model had no LoRA, the rest is frozen.

    Args:
        model: the base, plain or with LoRA layers that have the adapter's settings. In the latter
            case it may be wrapped, as by DDP.
        source: a file, a folder, or the name of a repository on the hub, see `read_adapter`.
        lora_alpha: the alpha that the adapter was trained with, if it does not record it.
        revision: for the hub, as in `read_adapter`.
        cache_dir: for the hub, as in `read_adapter`.
        token: for the hub, as in `read_adapter`.

    Returns:
        The names of the adapted modules, in the model's order.

    Raises:
        TypeError: the model is not a module, as if the arguments are swapped.
        WrongBaseError: it was trained on another base.
        CheckpointError: there is no such adapter, it is damaged, or it does not fit the model.
        ValueError, UnsupportedLayerError: a module cannot be adapted, as for `add_lora`. In all
            cases the model is left as it was.
        OSError: the hub cannot be reached.
    """
    check_model(model, source)
    check_not_scripted(model)
    where = {"cache_dir": cache_dir, "revision": revision, "token": token}
    with without_wrappers(model) as plain:
        adapter = read_adapter_for(stacked_weights(plain), source, LORA, lora_alpha, where)
        if plain is not model and not lora_layers(plain):
            # DDP and torch.compile fix what they share or compile when they wrap a model.
            raise ValueError(
                f"the model is wrapped or compiled already ({type(model).__name__}): load the "
                "adapter before that"
            )
        return _load(plain, adapter)


def _load(model: nn.Module, adapter: Adapter) -> tuple[str, ...]:
    """Does the work of `load_adapter`, for a model without wrappers."""
    check_no_peft_layers(model)
    check_not_copied(
        model,
        "which would overwrite an adapter: load it before deepspeed.initialize",
        written=adapter.tensors,
    )
    check_whole(model, "an adapter is loaded")
    check_unpacked(model)
    weights = adapted_modules(model, adapter)
    touched = adapter.besides.keys() | adapter.base_weights.keys()
    check_there(tensors_of(model, touched), "it gets an adapter")
    present = lora_layers(model)
    settings = _settings_of(model, adapter, weights)
    _check_trained_with(model, adapter)
    _check_quantized(adapter, weights, settings)
    _check_present(adapter, present, settings)
    _check_besides(model, adapter)
    _check_base_weights(model, adapter)
    if shared_projections(model) & weights.keys():
        check_positions(adapter, _would_reach_positions(model, weights))
    check_possible_base(adapter, possible_fingerprints(model, weights, adapter.besides))
    missing = {name: own for name, own in settings.items() if name not in present}
    added = _add_layers(model, weights, missing)
    if not present:
        freeze_base(model)
    _copy(model, adapter)
    warn_of_reads(model, added, are_loaded=True)
    return tuple(lora_layers(model))


def _check_trained_with(model: nn.Module, adapter: Adapter) -> None:
    """Checks that a model has what an adapter was trained with, and what is in other files."""
    for switch in adapter.lora.trained_with or ():
        if not setting_of(getattr(model, "config", None), switch):
            raise CheckpointError(
                f"{adapter.source}: was trained with {switch} as well, which the model lacks: "
                f"build the model with both, as by from_pretrained(…, {switch}=True)"
            )


def _check_quantized(
    adapter: Adapter, weights: Mapping[str, AdaptedWeight], settings: Mapping[str, LayerSettings]
) -> None:
    """Checks that no update of an adapter needs the value of a quantized weight."""
    for name, own in settings.items():
        reader = needs_weight(own.variant, own.initialization)
        if reader is None or not is_quantized_linear(weights[name].module):
            continue
        way_out = "load the base in float16 or bfloat16"
        # In a PEFT folder the update is plain LoRA, and its initialization needs no weight.
        if needs_weight(own.variant, "default") is None:
            way_out += ", or write the adapter as a PEFT folder and load that: "
            way_out += "lora.write_adapter(path, lora.read_adapter(source), 'peft')"
        raise CheckpointError(
            f"{adapter.source}: has {reader}, which needs the weight of {name}, but that is "
            f"quantized: {way_out}"
        )


def _settings_of(
    model: nn.Module, adapter: Adapter, weights: Mapping[str, AdaptedWeight]
) -> dict[str, LayerSettings]:
    """Returns the settings that an adapter's layers are built with, by module."""
    metadata, settings = adapter.lora, {}
    for name, adapted in weights.items():
        dropout = metadata.dropout or 0.0
        has_dropout = takes_dropout(model, name, adapted.module) and not adapted.is_stack
        is_of_slices = has_slices(adapter, name, adapted.delta)
        settings[name] = LayerSettings(
            r=metadata.rank_of(name),
            lora_alpha=metadata.alpha_of(name),
            lora_dropout=dropout if has_dropout else 0.0,
            variant=metadata.variant or "lora",
            initialization=metadata.initialization or "default",
            freeze_A=metadata.freeze_A or False,
            enable_lora=slices_in(metadata, name) if is_of_slices else (True,),
        )
    return settings


def _check_present(
    adapter: Adapter, present: Mapping[str, LoRALayer], settings: Mapping[str, LayerSettings]
) -> None:
    """Checks that a model's LoRA layers have the settings that the adapter was trained with."""
    for name, layer in present.items():
        if name not in settings:
            raise CheckpointError(
                f"{adapter.source}: does not adapt {name}, which has LoRA here: {_way_out(layer)}"
            )
        if layer.is_update_in_weight:
            raise CheckpointError(
                f"{adapter.source}: the weight of {name} contains its present update, as its "
                f"{type(layer).__name__} says by merged = True: call model.train() first"
            )
        needed = settings[name]
        pairs = {
            "rank": (needed.r, layer.r),
            "alpha": (needed.lora_alpha, layer.lora_alpha),
            "variant": (needed.variant, layer.variant),
            "initialization": tuple(
                each if starts_from_weight(each) else "default"
                for each in (needed.initialization, layer.initialization)
            ),
            "enable_lora": (list(needed.enable_lora), list(getattr(layer, "enable_lora", [True]))),
        }
        for what, (theirs, ours) in pairs.items():
            if theirs != ours:
                difference = trained_with(what, theirs, ours)
                raise CheckpointError(f"{adapter.source}: {difference} ({name}): {_way_out(layer)}")


def _way_out(layer: LoRALayer) -> str:
    """Returns advice on how to get LoRA with other settings than this layer's."""
    if is_in_place(layer):
        return "remove_lora first"
    return "build the model with the adapter's settings"


def _check_besides(model: nn.Module, adapter: Adapter) -> None:
    """Checks that the model has all that an adapter brings besides LoRA, in the same shapes.

    Also checks that it replaces everything that an adapter loaded before has brought.
    """
    besides, state = adapter.besides, model.state_dict()
    for name, source in noted(model).items():
        if source is not None and name not in besides:
            raise CheckpointError(
                f"{adapter.source}: lacks {name}, which the model has from {source}: load the "
                "adapter into the original base"
            )
    unknown = besides.keys() - state.keys()
    if unknown:
        raise CheckpointError(
            f"{adapter.source}: has tensors that the model does not have: {listed(unknown)}: "
            f"{base_to_give(adapter)}"
        )
    differing = [
        f"{name} is {_kind(tensor)} in the file, {_kind(state[name])} in the model"
        for name, tensor in sorted(besides.items())
        if _kind(tensor) != _kind(state[name])
    ]
    if differing:
        raise CheckpointError(
            f"{adapter.source}: {'; '.join(differing[:4])}: build the model to match the file"
        )


def _kind(tensor: Tensor) -> str:
    """Formats a tensor's shape, with its dtype if that is not a floating one."""
    dtype = "" if tensor.is_floating_point() else f" of {tensor.dtype}"
    return f"{tuple(tensor.shape)}{dtype}"


def _check_base_weights(model: nn.Module, adapter: Adapter) -> None:
    """Checks that the base weights in an adapter's file equal the model's, in either's dtype."""
    state = model.state_dict()
    for name, theirs in adapter.base_weights.items():
        ours = state.get(name)
        if ours is None or not same_when_rounded(theirs, ours):
            raise CheckpointError(
                f"{adapter.source}: holds the {name} that it was trained with, which differs from "
                "the model's: give it the base that has that weight"
            )


def _would_reach_positions(model: nn.Module, adapted: Collection[str]) -> bool:
    """Returns whether LoRA in these projections, which positions share, would reach positions."""
    name = min(shared_projections(model) & set(adapted))
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    return owner.lora_positions


def _add_layers(
    model: nn.Module, weights: Mapping[str, AdaptedWeight], settings: Mapping[str, LayerSettings]
) -> list[str]:
    """Adds LoRA layers to the modules of these names.

    For the separate projections of an attention, the attention is adapted. For stacks of matrices,
    the parameters are.

    Returns:
        The first names of the modules and stacks that are adapted.
    """
    by_module, first = {}, first_names_of_targets(model)
    for name, own in settings.items():
        is_own = weights[name].name in ("weight", "in_proj_weight")
        at = name if is_own else name.rpartition(".")[0]
        by_module[stack_of_layer(name) if weights[name].is_stack else at] = own
    if by_module:
        # untie: an adapter belongs to the module that it names, even if others share its weight.
        # from_file: PEFT's adapters may have any rank.
        with deferring_start():  # the adapter brings what would be computed from the weights
            adapt(model, by_module, untie=True, from_file=True)
    return list(dict.fromkeys(first[name] for name in by_module))


@torch.no_grad()
def _copy(model: nn.Module, adapter: Adapter) -> None:
    """Copies all tensors of an adapter into a model that has their names and shapes."""
    # The model's own tensors, as those in a state dict may be copies.
    tensors = model.state_dict(keep_vars=True) | named_tensors(model)
    untied = untied_by(model, adapter)
    for name, tensor in adapter.tensors.items():
        owner, _, last = name.rpartition(".")
        if last == _EXTRA_STATE:
            model.get_submodule(owner).set_extra_state(tensor.clone())
            continue
        own = tensors[name]
        if name in untied:
            logger.warning(
                "%s: %s no longer shares its weight with %s",
                adapter.source,
                name,
                ", ".join(untied[name]),
            )
            own = nn.Parameter(torch.empty_like(own))
            setattr(model.get_submodule(owner), last, own)
            note_untied(model.get_submodule(owner))
        own.copy_(tensor)
        if LORA.part not in name and isinstance(own, nn.Parameter):
            own.requires_grad = True
            note_trained(model, [name], adapter.source)
    if untied:
        let_note_untied(model)
    for layer in lora_layers(model).values():
        layer.note_filled()
