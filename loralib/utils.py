"""What to train, what to save, and how to merge an update into its weight for good."""

import logging

from torch import Tensor, nn

from .layers import LoRALayer
from .nn.positions import lora_reaches_positions, unshare_positions

logger = logging.getLogger(__name__)

_BIAS_CHOICES = ("none", "all", "lora_only")


def _check_bias(bias: str) -> None:
    if bias not in _BIAS_CHOICES:
        raise ValueError(f"bias must be one of {', '.join(_BIAS_CHOICES)}, got {bias!r}")


def mark_only_lora_as_trainable(model: nn.Module, bias: str = "none") -> None:
    """Freezes every parameter without `lora_` in its name, then unfreezes biases as asked.

    A model without LoRA parameters is frozen entirely, with a warning in the log.

    Args:
        model: changed in place.
        bias: which biases stay trainable: "none"; "all", every parameter with `bias` in its name;
            or "lora_only", those of the layers that have an update (r > 0).

    Raises:
        ValueError: `bias` is none of these.
    """
    _check_bias(bias)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.requires_grad = bias == "all" and "bias" in name
    if bias == "lora_only":
        for layer in model.modules():
            if isinstance(layer, LoRALayer) and layer.r > 0:
                own_bias = getattr(layer.base, "bias", None)
                if own_bias is not None:
                    own_bias.requires_grad = True
    if not any("lora_" in name for name, _ in model.named_parameters()):
        logger.warning(
            "%s has no LoRA parameters: all of it that is not a bias asked for is frozen now",
            type(model).__name__,
        )


def lora_state_dict(model: nn.Module, bias: str = "none") -> dict[str, Tensor]:
    """The part of `model.state_dict()` that `mark_only_lora_as_trainable` leaves to be trained.

    Args:
        model: a model with LoRA layers.
        bias: which biases to include: "none"; "all", every entry with `bias` in its name; or
            "lora_only", those of the layers that have an update.

    Returns:
        Names and tensors, which share their memory with the model's.

    Raises:
        ValueError: `bias` is none of these.
    """
    _check_bias(bias)
    state = model.state_dict()
    names = {name for name in state if "lora_" in name or (bias == "all" and "bias" in name)}
    if bias == "lora_only":
        # A convolution's bias belongs to its submodule.
        layers = {name.rpartition("lora_")[0] for name in names}
        names |= {layer + bias for layer in layers for bias in ("bias", "conv.bias")}
    return {name: tensor for name, tensor in state.items() if name in names}


def merge(module: nn.Module) -> nn.Module:
    """Merges low-rank updates into their weights for good: plain PyTorch layers, for export.

    The sums are computed in float32 or wider and rounded once, to the weight's dtype. A frozen
    weight itself keeps its bits: the plain layer gets a weight of its own, (out, in) even if the
    LoRA layer held it as (in, out), and shares the bias. Names of the entries in `state_dict()` are
    the plain layers' own. Where LoRA is kept from positions that share its weight, those first get
    projections of their own, see positions.py; a layer that is merged alone, and put in by hand,
    knows nothing of that.

    Args:
        module: a LoRA layer, which is left as it is; or a model, whose LoRA layers are replaced in
            place.

    Returns:
        The plain layer; or the model.

    Raises:
        TypeError: a subclass of `LoRALayer` in another package does not say how to merge it.
    """
    if isinstance(module, LoRALayer):
        return module.merged_layer()
    layers = {
        name: layer
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, LoRALayer)
    }
    merged = {layer: layer.merged_layer() for layer in set(layers.values())}
    if lora_reaches_positions(module) is False:
        unshare_positions(module, layers)
    for name, layer in layers.items():
        module.set_submodule(name, merged[layer])
    return module
