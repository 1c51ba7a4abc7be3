"""What of a model is adapted and what is trained, in words."""

from torch import nn

from ..io.console import share_in_words
from ..lora_layer import names_of_updates
from .adapter import plain
from .names import lora_targets


def lora_in_words(model: nn.Module) -> str | None:
    """Such as "rank 8, alpha 16, in 24 modules: query, value"; None for a model without LoRA."""
    names = names_of_updates(model)
    if not names:
        return None
    layers = [model.get_submodule(name) for name in names]
    ranks, alphas = ({getattr(layer, key) for layer in layers} for key in ("r", "lora_alpha"))
    where = f"in {len(names)} modules: {plain(lora_targets(names))}"
    return f"{_each('rank', ranks)}, {_each('alpha', alphas)}, {where}"


def trained_in_words(model: nn.Module) -> str:
    """Such as "1,000 of 4,000 (25.00 %) parameters"."""
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return f"{share_in_words(trained, sum(p.numel() for p in parameters))} parameters"


def _each(what: str, values: set[float]) -> str:
    listed = ", ".join(f"{value:g}" for value in sorted(values))
    return f"{what}{'s' if len(values) > 1 else ''} {listed}"
