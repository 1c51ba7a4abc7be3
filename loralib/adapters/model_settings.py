"""Reads a model's settings: those of its LoRA layers, as metadata record them, and its config's."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..arguments import as_python
from ..errors import CheckpointError
from ..experts import AdaptedStack
from ..functional import variant_of
from ..initialization import starts_from_weight
from ..layers import MergedLinear
from ..lora_layer import LoRALayer, lora_layers
from ..positions import lora_reaches_positions
from ..stacks import layer_of_stack, stacked_weights
from .families import enabled_slices
from .metadata import usual
from .names import lora_targets


def lora_settings(model: nn.Module) -> dict[str, Any]:
    """Returns the settings of a model's LoRA layers, by their names in `LoraMetadata`.

    Args:
        model: a model with LoRA layers. They may differ in rank and alpha, and in settings that
            have no effect once they are trained.

    Raises:
        CheckpointError: they differ in other settings, or a layer's scaling is not the one that
            follows from its alpha and rank.
    """
    layers = lora_layers(model)
    for name, layer in layers.items():
        expected = variant_of(layer.variant).scale(layer.lora_alpha, layer.r)
        if isinstance(layer.scaling, nn.Parameter):
            raise CheckpointError(
                f"{name} has a scaling that is a parameter, which adapters cannot hold: delete it, "
                "set scaling to its value, and set lora_alpha to match"
            )
        scaling = float(layer.scaling)
        if not math.isclose(scaling, expected, rel_tol=1e-6):
            raise CheckpointError(
                f"{name} has the scaling {scaling:g}, but lora_alpha {layer.lora_alpha:g} makes "
                f"it {expected:g}: change scaling and lora_alpha together"
            )
    rank, ranks = usual({name: layer.r for name, layer in layers.items()})
    alpha, alphas = usual({name: as_python(layer.lora_alpha) for name, layer in layers.items()})
    embeddings = tuple(sorted(n for n, each in layers.items() if isinstance(each, nn.Embedding)))
    of_stacks = map(layer_of_stack, stacked_weights(model))
    return {
        "rank": rank,
        "alpha": alpha,
        "targets": lora_targets(layers),
        "positions": lora_reaches_positions(model),
        "variant": _common(layers, "variant"),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "initialization": _initialization(layers),
        "freeze_A": all(layer.freeze_A for layer in layers.values()),
        "embeddings": embeddings,
        "slices": _own_slices(layers),
        "stacks": tuple(n for n in of_stacks if isinstance(layers.get(n), AdaptedStack)),
    }


def _common(layers: Mapping[str, LoRALayer], setting: str) -> object:
    """Returns the value of a setting that all layers must have in common."""
    values = {name: getattr(layer, setting) for name, layer in layers.items()}
    common, others = usual(values)
    for name, value in others.items():
        raise CheckpointError(
            f"the model's LoRA is of several kinds, but an adapter records only one: {name} has "
            f"{setting} {value}, others have {common}; merge the model, and save it"
        )
    return common


def _initialization(layers: Mapping[str, LoRALayer]) -> object | None:
    """Returns the layers' initialization, or None if they differ and no update depends on it."""
    values = {layer.initialization for layer in layers.values()}
    if len(values) == 1 or any(map(starts_from_weight, values)):
        return _common(layers, "initialization")
    return None


def _own_slices(layers: Mapping[str, LoRALayer]) -> dict[str, tuple[bool, ...]]:
    """Returns the slices that stacked updates reach, if they are not the family's."""
    slices = {
        name: tuple(layer.enable_lora)
        for name, layer in layers.items()
        if isinstance(layer, MergedLinear)
    }
    return {name: own for name, own in slices.items() if own != enabled_slices(name)}


def takes_dropout(model: nn.Module, name: str, module: object) -> bool:
    """Returns whether the update with this name can have dropout.

    The updates of attentions' projections, of embeddings and of stacks cannot. A stack is only
    recognized if `module` is its LoRA layer.

    Args:
        model: the model.
        name: the update's name.
        module: the module whose weight is updated, or the one that has the update.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    takes_weights = any(isinstance(each, nn.MultiheadAttention) for each in (module, owner))
    return not takes_weights and not isinstance(module, nn.Embedding | AdaptedStack)


def dropout_of(layer: LoRALayer) -> float:
    """Returns a layer's probability of dropout. Embeddings and attentions have none."""
    return getattr(layer.lora_dropout, "p", 0.0)


def setting_of(config: Any, name: str) -> Any:
    """Returns a setting of a model's config, or None if it has none of this name.

    A config may be of any class. One whose attributes are its items raises KeyError for others.
    """
    try:
        return getattr(config, name, None)
    except LookupError:
        return None
