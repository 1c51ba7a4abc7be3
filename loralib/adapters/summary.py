"""Describes in words which modules of a model are adapted and how much of it is trained."""

from torch import nn

from ..io.console import share_in_words
from ..lora_layer import lora_layers
from .adapter import in_words
from .names import lora_targets


def lora_in_words(model: nn.Module) -> str | None:
    """Returns text like "rank 8, alpha 16, in 24 modules: query, value", or None without LoRA."""
    layers = lora_layers(model)
    if not layers:
        return None
    ranks = _each("rank", {layer.r for layer in layers.values()})
    alphas = _each("alpha", {layer.lora_alpha for layer in layers.values()})
    return f"{ranks}, {alphas}, in {len(layers)} modules: {in_words(lora_targets(layers))}"


def trained_in_words(model: nn.Module) -> str:
    """Returns text like "1,000 of 4,000 (25.00 %) parameters"."""
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return f"{share_in_words(trained, sum(p.numel() for p in parameters))} parameters"


def _each(what: str, values: set[float]) -> str:
    listed = ", ".join(f"{value:g}" for value in sorted(values))
    return f"{what}{'s' if len(values) > 1 else ''} {listed}"
