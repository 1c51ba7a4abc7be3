"""Turns one module or stack of a model into its LoRA layer, with the given settings.

The table at the top of inject.py lists which module becomes which layer.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .adapted_layers import (
    AdaptedConv1d,
    AdaptedConv2d,
    AdaptedConv3d,
    AdaptedProjection,
    MultiheadAttention,
    ScaledEmbedding,
)
from .errors import UnsupportedLayerError
from .experts import AdaptedStack, adapted_stacks, with_stacks
from .in_place import convert_in_place, restore, set_class, unparametrized_class, was_converted
from .layer_kinds import added_attributes, computes_like, is_conv1d, scales_rows
from .layers import Embedding, Linear, MergedLinear
from .lora_layer import LoRALayer
from .quantized_layers import around, is_quantized_class, is_quantized_linear
from .stacks import Stack, layer_of_stack, stacks_in


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """The settings that one module is adapted with; the fields are arguments of `add_lora`.

    Args:
        enable_lora: for each of the equal slices of a linear layer's output, whether it has an
            update, as for `MergedLinear`.
    """

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    variant: str = "lora"
    initialization: str = "default"
    freeze_A: bool = False
    enable_lora: tuple[bool, ...] = (True,)

    def of_layer(self) -> dict[str, Any]:
        """Returns the keyword arguments for `LoRALayer`."""
        settings = asdict(self) | {"merge_weights": True}
        del settings["enable_lora"]
        return settings


def builder_of(module: nn.Module) -> Callable[[Any, LayerSettings], None]:
    """Returns the function that adapts a module of this class.

    Raises:
        UnsupportedLayerError: there is no such function.
    """
    kind = unparametrized_class(module)
    if kind is nn.MultiheadAttention or _is_without_update(module):
        return _adapt_attention
    if is_conv1d(module) or is_quantized_class(kind):
        return _adapt_linear
    if scales_rows(module):
        return _adapt_with(ScaledEmbedding)
    for plain, build in _BUILDERS.items():
        # A subclass works too, unless it has a forward of its own, or additional attributes that
        # the model may use.
        if not issubclass(kind, plain) or added_attributes(kind, plain):
            continue
        if computes_like(kind, plain):
            return build
    raise UnsupportedLayerError(f"{kind.__module__}.{kind.__qualname__}, which has no LoRA layer")


def _is_without_update(module: nn.Module) -> bool:
    """Returns whether this is an adapted attention in which only out_proj has an update so far."""
    is_adapted = isinstance(module, MultiheadAttention) and module.r == 0
    return is_adapted and "q_proj" not in module._modules


def _adapt_linear(module: Any, settings: LayerSettings) -> None:
    fan_in_fan_out = is_conv1d(module)
    sliced = len(settings.enable_lora) > 1
    if fan_in_fan_out:
        in_features, out_features = module.weight.shape
    kind: type[Any] = MergedLinear if sliced else Linear
    if is_quantized_linear(module):
        kind = around(unparametrized_class(module), kind)
    _convert(module, kind, settings)
    module.fan_in_fan_out = fan_in_fan_out
    if fan_in_fan_out:
        module.in_features, module.out_features = in_features, out_features
    if sliced:
        module.enable_lora = list(settings.enable_lora)
    module._add_slices(settings.enable_lora, _update_dtype(module))
    module.reset_lora_parameters()


def _adapt_with(kind: type[LoRALayer]) -> Callable[[Any, LayerSettings], None]:
    def adapt_module(module: Any, settings: LayerSettings) -> None:
        _convert(module, kind, settings)
        module._add_update(_update_dtype(module))
        module.reset_lora_parameters()

    return adapt_module


def _adapt_attention(module: Any, settings: LayerSettings) -> None:
    if module._qkv_same_embed_dim:
        _adapt_with(MultiheadAttention)(module, settings)
        return
    convert_attention(module)
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = AdaptedProjection(module, f"{name}_weight", **settings.of_layer())
        projection._add_update(_update_dtype(projection))
        projection.reset_lora_parameters()
        module.add_module(name, projection.train(module.training))


def convert_attention(module: nn.Module) -> None:
    """Turns an attention into one that computes with the updates of its projections."""
    _convert(module, MultiheadAttention, LayerSettings(r=0, lora_alpha=1))


def adapt_stack(stack: Stack, settings: LayerSettings) -> None:
    """Adapts a stack of matrices: changes its module's class, and adds the stack's LoRA layer."""
    owner: Any = stack.owner
    name = stack.parameter
    if not was_converted(owner):
        convert_in_place(owner, with_stacks(unparametrized_class(owner), stacks_in(owner)))
    elif name not in owner._stacks:  # registered after the class was made
        set_class(owner, with_stacks(unparametrized_class(owner), [name]))
    layer: Any = AdaptedStack(owner, name, **settings.of_layer())
    layer._add_update(_update_dtype(layer))
    layer.reset_lora_parameters()
    owner.add_module(layer_of_stack(name), layer.train(owner.training))


def drop_stack(stack: Stack) -> None:
    """Undoes `adapt_stack`, even one that failed halfway."""
    owner, name = stack
    owner._modules.pop(layer_of_stack(name), None)
    if was_converted(owner) and not adapted_stacks(owner):
        restore(owner)


_BUILDERS: dict[type[nn.Module], Callable[[Any, LayerSettings], None]] = {
    nn.Linear: _adapt_linear,
    nn.Embedding: _adapt_with(Embedding),
    nn.Conv1d: _adapt_with(AdaptedConv1d),
    nn.Conv2d: _adapt_with(AdaptedConv2d),
    nn.Conv3d: _adapt_with(AdaptedConv3d),
}


def _convert(module: nn.Module, kind: type[Any], settings: LayerSettings) -> None:
    """Turns a module into a LoRA layer of class `kind`, still without its update's parameters."""
    if not was_converted(module):
        convert_in_place(module, kind)
    LoRALayer.__init__(module, **settings.of_layer())  # type: ignore[arg-type]
    module.train(module.training)


def _update_dtype(layer: LoRALayer) -> torch.dtype:
    """Returns the dtype of an update's parameters: the frozen weight's, but at least float32."""
    return torch.promote_types(layer.frozen_weight.dtype, torch.float32)
