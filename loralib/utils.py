"""Chooses what is trained and what is saved, and merges updates into their weights for good."""

import copy
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .adapted_layers import owner_of_weight
from .arguments import ABOVE_0, AT_LEAST_0, as_number, check_model
from .functional import variant_of
from .in_place import disable_fast_paths, is_in_place, merge_in_place, was_converted
from .initialization import initializes, start_is_deferred
from .layers import Embedding
from .lora_layer import LoRALayer, lora_layers
from .model_checks import check_there, check_whole, weights_with_updates
from .positions import lora_reaches_positions, unshare_positions
from .quantized_layers import QuantizedLayer, check_unpacked, not_merged
from .steps import forget_steps, trained_along
from .tensor_kinds import is_fake, is_sharded
from .text import in_short, module_label
from .tied_words import tied_words, warn_of_untied
from .trained import forget_trained, note_buffers, note_frozen, note_trained
from .wrappers import contains
from .zero3 import check_gathered

logger = logging.getLogger(__name__)

_BIAS_CHOICES = ("none", "all", "lora_only")


def check_bias(bias: str) -> None:
    """Checks that `bias` is one of the choices of `mark_only_lora_as_trainable`.

    Raises:
        ValueError: it is not.
    """
    if bias not in _BIAS_CHOICES:
        raise ValueError(f"bias must be one of {', '.join(_BIAS_CHOICES)}, got {bias!r}")


def mark_only_lora_as_trainable(model: nn.Module, bias: str = "none") -> None:
    """Freezes every parameter without `lora_` in its name, then unfreezes biases as asked.

    If all LoRA parameters are frozen, as after `model.requires_grad_(False)`, they are unfrozen. A
    model without any is frozen, except for the selected biases, and a warning is logged. From then
    on, PyTorch's own encoders call their layers instead of taking their fast path, see in_place.py.

    Args:
        model: changed in place.
        bias: which biases stay trainable: "none"; "all", every parameter with `bias` in its name;
            or "lora_only", those of the layers that have an update (r > 0).

    Raises:
        ValueError: `bias` is none of these.
    """
    check_model(model)
    check_bias(bias)
    freeze_base(model)
    _unfreeze_lora(model)
    train_biases(model, bias)
    disable_fast_paths(model)
    if not any("lora_" in name for name, _ in model.named_parameters()):
        logger.warning(
            "%s has no LoRA parameters: all of it but the selected biases is frozen now",
            type(model).__name__,
        )


def freeze_base(model: nn.Module) -> None:
    """Freezes every parameter without `lora_` in its name, and the A of layers with `freeze_A`.

    Their gradients are dropped: an optimizer that holds the parameters would still apply them.
    """
    frozen = [parameter for name, parameter in model.named_parameters() if "lora_" not in name]
    frozen += [layer.lora_A for layer in lora_layers(model).values() if layer.freeze_A]
    for parameter in frozen:
        parameter.requires_grad = False
        parameter.grad = None
    note_frozen(model)


def _unfreeze_lora(model: nn.Module) -> None:
    """Unfreezes a model's LoRA parameters if all of them are frozen, except A with `freeze_A`.

    If some are trained, the others may have been frozen by hand, as A is in LoRA-FA.
    """
    named = model.named_parameters()
    added = [p for name, p in named if any(part.startswith("lora_") for part in name.split("."))]
    if any(parameter.requires_grad for parameter in added):
        return
    to_stay = {layer.lora_A for layer in lora_layers(model).values() if layer.freeze_A}
    for parameter in added:
        parameter.requires_grad = parameter.is_floating_point() and parameter not in to_stay


def train_biases(model: nn.Module, bias: str) -> None:
    """Unfreezes biases; `bias` is one of the choices of `mark_only_lora_as_trainable`."""
    meant: set[Any] = set()
    if bias == "lora_only":
        meant = {layer.base_bias for layer in lora_layers(model).values()}
    for name, parameter in model.named_parameters():
        in_name = bias == "all" and "bias" in name and "lora_" not in name
        if in_name or parameter in meant:
            parameter.requires_grad = True
            note_trained(model, [name])


def start_from_weights(model: nn.Module) -> None:
    """Initializes what is computed from the base's weights, in every LoRA layer; see `LoRALayer`.

    Call it after a base, and before an adapter, is loaded into a model that was built with DoRA, or
    with an initialization that uses the weights. Call it as well for any model that was adapted on
    the meta device and has got memory since (`to_empty`): A and B then get their first values,
    unless both have already been loaded or written to.

    Rows of zeros in weights that DoRA adapts cause a warning in the log. `add_lora` refuses these,
    but cannot see them before the weights are loaded. Here they are no error, because memory that
    is yet to be loaded into may be zero as well.
    """
    check_model(model)
    note_buffers(model)
    for layer in model.modules():
        if isinstance(layer, LoRALayer):
            layer.start_from_weight()
    if start_is_deferred() or not initializes():  # the weights are yet to be loaded
        return
    zero = {name: layer for name, layer in lora_layers(model).items() if _has_zero_norms(layer)}
    if zero:
        variant = next(iter(zero.values())).variant
        logger.warning(
            "there are rows of zeros in the weight of %s, which have no direction for %s: if "
            "weights are loaded later, load lora_magnitude_vector with them, or call "
            "start_from_weights again; otherwise remove_lora(model), then leave it out of targets, "
            "or choose another variant",
            in_short(map(module_label, zero), at_most=4),
            variant,
        )


def _has_zero_norms(layer: LoRALayer) -> bool:
    """Returns whether DoRA's magnitudes, now the norms of a weight's rows, have zeros."""
    if not variant_of(layer.variant).has_magnitude:
        return False
    norms: Any = layer.lora_magnitude_vector
    if norms.is_meta or is_fake(norms):
        return False
    return not (norms.full_tensor() if is_sharded(norms) else norms).all()


def parameter_groups(
    model: nn.Module, lr: float, lora_plus_ratio: float = 1.0, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Returns a model's trained parameters as groups for an optimizer.

    LoRA+ trains B with a higher learning rate than A, so that in a wide model both contribute to
    learning features. Embeddings keep `lr` for both, because there it is A that starts as zero.

    Args:
        model: a model with LoRA layers.
        lr: learning rate of all parameters but B.
        lora_plus_ratio: B's learning rate divided by `lr`; 1 for plain LoRA. The paper recommends
            about 16.
        weight_decay: weight decay of all parameters; by default, that of the optimizer itself.

    Raises:
        ValueError: a rate is not a number above 0, or the decay is below 0; nothing is trained; or
            the model has no LoRA layers.

    Source: "LoRA+: Efficient Low Rank Adaptation of Large Models" (Hayou et al., 2024),
    arXiv:2402.12354, section 4.
    """
    check_model(model)
    lr, lora_plus_ratio = _rate("lr", lr), _rate("lora_plus_ratio", lora_plus_ratio)
    if not contains(model, LoRALayer):
        raise ValueError(f"{type(model).__name__} has no LoRA layers: call add_lora first")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model is trained")
    group: dict[str, Any] = {"params": trained}
    if weight_decay is not None:
        group["weight_decay"] = as_number("weight_decay", weight_decay, *AT_LEAST_0)
    return with_lora_plus(model, [group], lr, lora_plus_ratio)


def _rate(name: str, value: Any) -> Any:
    """Returns a rate, checked to be above 0. It may be a tensor, as for PyTorch's optimizers."""
    is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
    if is_number and 0 < value < math.inf:
        return value
    return as_number(name, value, *ABOVE_0)


def with_lora_plus(
    model: nn.Module, groups: Sequence[dict[str, Any]], lr: float, lora_plus_ratio: float
) -> list[dict[str, Any]]:
    """Returns an optimizer's groups with their rates, split for LoRA+; see `parameter_groups`.

    Args:
        model: a model with LoRA layers.
        groups: groups as an optimizer takes them, without rates.
        lr: learning rate of all parameters but B.
        lora_plus_ratio: B's learning rate divided by `lr`.

    Returns:
        The groups without B, in their order, followed by those of B.
    """
    faster = set()
    if lora_plus_ratio != 1:
        layers = lora_layers(model).values()
        faster = {id(layer.lora_B) for layer in layers if not isinstance(layer, Embedding)}
    divided = []
    for is_faster, rate in ((False, lr), (True, lr * lora_plus_ratio)):
        for group in groups:
            params = [p for p in group["params"] if (id(p) in faster) is is_faster]
            if params:
                divided.append({**group, "params": params, "lr": rate})
    return divided


def lora_state_dict(model: nn.Module, bias: str = "none") -> dict[str, Tensor]:
    """Returns the part of `model.state_dict()` that `mark_only_lora_as_trainable` does not freeze.

    A warning is logged if the model has no LoRA parameters, or if others were trained with them
    that are not returned, such as a head's.

    Args:
        model: a model with LoRA layers.
        bias: which biases to include: "none"; "all", every entry with `bias` in its name; or
            "lora_only", those of the layers that have an update.

    Returns:
        Names and tensors, which share their memory with the model's.

    Raises:
        ValueError: `bias` is none of these; bitsandbytes has packed a layer for evaluation; or a
            parameter is partitioned by DeepSpeed's ZeRO 3.
    """
    check_model(model)
    check_bias(bias)
    check_unpacked(model)
    state = model.state_dict()
    if not any("lora_" in name for name in state):
        logger.warning(
            "%s has no LoRA parameters: its lora_state_dict holds none", type(model).__name__
        )
    names = {name for name in state if "lora_" in name or (bias == "all" and "bias" in name)}
    if bias == "lora_only":
        # A convolution's bias belongs to its submodule.
        layers = {name.rpartition("lora_")[0] for name in names}
        own = ("bias", "conv.bias", "in_proj_bias")
        names |= {layer + bias for layer in layers for bias in own}
        names |= {f"{layer}base.bias" for layer in layers if f"{layer}weight" not in state}
    parameters = model.named_parameters(remove_duplicate=False)
    returned = [each for each in parameters if each[0] in names]
    check_gathered(returned, "its state is taken")
    held = {id(parameter) for _, parameter in returned}
    left_out = [name for name, p in trained_along(model).items() if id(p) not in held]
    if left_out:
        logger.warning(
            "lora_state_dict(…, bias=%r) leaves out %s, trained along with LoRA: save that as "
            "well, or all together by save_adapter",
            bias,
            in_short(left_out, at_most=2),
        )
    return {name: tensor for name, tensor in state.items() if name in names}


@torch.inference_mode(False)  # inference tensors could not be trained or adapted again
def merge(module: nn.Module) -> nn.Module:
    """Merges low-rank updates into their weights for good, which leaves plain PyTorch layers.

    The sums are computed in float32 or wider and rounded once, to the weight's dtype. The frozen
    weight itself keeps its bits: the plain layer gets a new weight, (out, in) even if the LoRA
    layer stored it as (in, out), and shares the bias. The entries of `state_dict()` get the plain
    layers' names. Modules that `add_lora` has adapted in place become what they were. What was
    frozen stays frozen, and `model.requires_grad_(True)` unfreezes it.

    If LoRA does not reach positions that share its weight, the positions first get projections of
    their own, see positions.py. That does not happen if a layer is merged alone and then put into
    its model by hand.

    Args:
        module: a LoRA layer, which is left as it is; or a model, whose LoRA layers are replaced in
            place.

    Returns:
        The plain layer; or the model.

    Raises:
        TypeError: a subclass of `LoRALayer` in another package has a forward of its own, and does
            not say how to merge it.
        ValueError: there is no LoRA to merge; or the parameters are sharded over several processes,
            are not there (offloaded, or on the meta device), or are quantized.
    """
    check_model(module)
    _check_mergeable(module)
    if isinstance(module, LoRALayer):
        if not was_converted(module):
            return module.merged_layer()
        plain = copy.deepcopy(module)
        merge_in_place(plain)
        return plain
    finite = [
        owner_of_weight(name, layer)
        for name, layer in lora_layers(module).items()
        if _is_finite_float16(layer)
    ]
    earlier, tied = list(module.parameters()), tied_words(module)
    merge_in_place(module)
    forget_trained(module)
    forget_steps(module)
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
    _warn_of_overflow(module, finite, {id(parameter) for parameter in earlier})
    warn_of_untied(module, tied)
    return module


def _check_mergeable(module: nn.Module) -> None:
    """Checks that a module has LoRA, and that all of it can be merged; see `merge` for errors."""
    if not contains(module, LoRALayer):
        raise ValueError(
            "the model has no LoRA to merge: load its adapter first, unless it is merged already"
        )
    check_whole(module, "LoRA is merged")
    for name, layer in lora_layers(module).items():
        if isinstance(layer, QuantizedLayer):
            raise ValueError(not_merged(name))
    check_there(weights_with_updates(module), "merging")
    for part in module.modules():
        if isinstance(part, LoRALayer) and not is_in_place(part):
            part.check_merged_layer()


def _is_finite_float16(layer: LoRALayer) -> bool:
    """Returns whether a layer's frozen weight is in float16 and finite."""
    weight = getattr(layer, "frozen_weight", None)  # layers of other packages may have none
    return weight is not None and weight.dtype is torch.float16 and bool(weight.isfinite().all())


def _warn_of_overflow(model: nn.Module, merged: Iterable[str], earlier: Collection[int]) -> None:
    """Warns of merged weights whose sums are too large for float16.

    Args:
        model: the merged model.
        merged: the names of merged modules whose weights were finite, in float16.
        earlier: the ids of the parameters that the model had before it was merged.
    """
    starts = tuple(f"{name}." if name else "" for name in merged)
    for name, weight in model.named_parameters():
        if not name.startswith(starts) or id(weight) in earlier:
            continue
        if not weight.isfinite().all():
            logger.warning(
                "%s: the merged weight is too large for float16: convert the model to float32 or "
                "bfloat16 before it is merged",
                name,
            )
