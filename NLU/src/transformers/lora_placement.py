"""Resolves an encoder's settings of LoRA (targets, layers, patterns) to modules.

A target is a name in `LORA_TARGETS`, such as "output", which stands for the same projection of
every layer in all families; or anything that loralib/targets.py knows: the end of a module's name,
a glob, or "all-linear".
"""

import difflib
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loralib import targets
from loralib.adapters.metadata import is_alpha, is_rank
from loralib.adapters.names import within_layer
from loralib.initialization import check_initialization

from .models.registry import SUPPORTED

if TYPE_CHECKING:
    from .configuration_encoder import EncoderConfig


class Projection(NamedTuple):
    """A projection that LoRA can adapt.

    Args:
        layer: the number of its layer.
        name: its name in `LORA_TARGETS`.
        width: the smaller of its two dimensions.
    """

    layer: int
    name: str
    width: int


class Placed(NamedTuple):
    """The rank and alpha of a projection's LoRA."""

    rank: int
    alpha: float


def by_layer(config: "EncoderConfig") -> list[dict[str, Placed]]:
    """Returns, for each layer, the projections that LoRA adapts, by their names in `LORA_TARGETS`.

    Raises:
        ValueError: as `by_module`.
    """
    layers: list[dict[str, Placed]] = [{} for _ in range(config.num_hidden_layers)]
    projections = _projections(config)
    for module, placed in by_module(config).items():
        layers[projections[module].layer][projections[module].name] = placed
    return layers


def by_module(config: "EncoderConfig") -> dict[str, Placed]:
    """Returns the modules that LoRA adapts, by their names in a model with a head.

    Raises:
        ValueError: a target, a layer or a pattern matches nothing, or a module cannot have its rank
            or alpha.
    """
    if not config.apply_lora:
        return {}
    every = _projections(config)
    layers = _layers(config)
    within = [module for module, projection in every.items() if projection.layer in layers]
    meant: set[str] = set()
    for word in config.lora_targets:
        meant.update(_matched(config, "lora_targets", word, within))
    modules = [module for module in within if module in meant]
    ranks = _by_pattern(config, "lora_rank_pattern", config.lora_rank_pattern, modules)
    alphas = _by_pattern(config, "lora_alpha_pattern", config.lora_alpha_pattern, modules)
    placed = {}
    for module in modules:
        rank, alpha = ranks.get(module, config.lora_r), alphas.get(module, config.lora_alpha)
        if rank > every[module].width:
            setting = "lora_rank_pattern" if module in ranks else "lora_r"
            raise ValueError(
                f"{setting}: rank {rank} is larger than the smaller dimension of {module}, "
                f"{every[module].width}"
            )
        try:
            check_initialization(config.lora_init, rank)
        except ValueError as error:
            raise ValueError(f"lora_init: {error} ({module})") from error
        placed[module] = Placed(rank, alpha)
    return placed


def _projections(config: "EncoderConfig") -> dict[str, Projection]:
    """Returns all projections that LoRA can adapt, by their modules' names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    widths = dict.fromkeys(("intermediate", "output"), min(hidden, inner))
    start = SUPPORTED[config.model_type].family.layers
    return {
        f"{start}{layer}.{module}": Projection(layer, name, widths.get(name, hidden))
        for layer in range(config.num_hidden_layers)
        for name, module in config.lora_modules.items()
    }


def _layers(config: "EncoderConfig") -> Collection[int]:
    every = range(config.num_hidden_layers)
    if config.lora_layers is None:
        return every
    if not config.lora_layers:
        raise ValueError("lora_layers names no layer")
    for layer in config.lora_layers:
        if layer not in every:
            raise ValueError(f"lora_layers: the model has layers 0 to {every[-1]}, not {layer}")
    return config.lora_layers


def _matched(config: "EncoderConfig", setting: str, word: str, modules: list[str]) -> list[str]:
    """Returns the modules that a target matches; it is an error if there are none."""
    if word == targets.ALL_LINEAR:
        return modules
    target: targets.Target = word
    if word in config.lora_modules:
        target = re.compile(rf".+\.\d+\.{re.escape(config.lora_modules[word])}")
    found = [module for module in modules if targets.matches(module, target)]
    if not found:
        inside = set(map(within_layer, modules))
        names = [name for name, module in config.lora_modules.items() if module in inside]
        near = difflib.get_close_matches(word, [*names, *inside], n=4, cutoff=0.4) or names
        what = "projection" if setting == "lora_targets" else "projection that LoRA adapts"
        raise ValueError(f"{setting}: '{word}' matches no {what}; similar names: {', '.join(near)}")
    return found


def _by_pattern(
    config: "EncoderConfig", setting: str, pattern: Mapping[str, Any], modules: list[str]
) -> dict[str, Any]:
    """Returns the value that a pattern gives each module; the first target that matches counts."""
    is_sound = is_rank if setting == "lora_rank_pattern" else is_alpha
    values: dict[str, Any] = {}
    for word, value in pattern.items():
        if not is_sound(value):
            must = "a positive integer" if is_sound is is_rank else "a positive number"
            raise ValueError(f"{setting}: '{word}' has to be {must}, not {value}")
        for module in _matched(config, setting, word, modules):
            values.setdefault(module, value)
    return values
