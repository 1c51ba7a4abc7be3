"""The LoRA layers that `add_lora` makes from a model's modules, besides those in layers.py.

They keep the parameter names of the module that they are made from: `weight` and `bias` of a
convolution, `in_proj_weight` and `out_proj` of an `nn.MultiheadAttention`. The convolutions in
layers.py have the names and shapes of loralib 0.1.2 instead, such as `conv.weight`. They are for
models that are built with them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functional import Delta
from .layers import Embedding
from .lora_layer import LoRALayer, cast
from .nn.fast_paths import needs_public_operations
from .nn.products import product_dtype
from .tensor_kinds import is_sharded
from .wrappers import contains, unwrapped, without_checkpoint


class _AdaptedConv(LoRALayer):
    """`AdaptedConv1d`, `AdaptedConv2d` and `AdaptedConv3d`: a convolution with a low-rank update.

    h = conv(x, W) + b + s · conv(conv(dropout(x), A), B): A is a convolution like W with r output
    channels, B a 1 × 1 convolution. Their product is a kernel of W's shape. If the convolution has
    groups, x is convolved with that product instead.

    Shapes:
        weight (out, in/groups, k, …); lora_A (r, in/groups, k, …); lora_B (out, r, 1, …).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    groups: int
    _conv_forward: Any

    def _add_update(self, dtype: torch.dtype | None = None) -> None:
        """Creates the parameters of the update."""
        out, *inner = self.weight.shape
        ones = [1] * (len(inner) - 1)
        self._add_lora_parameters((self.r, *inner), (out, self.r, *ones), dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuses a bias where there was none: a batch norm is folded into W, without the update.

        PyTorch's `fuse_conv_bn_eval` does so, as do other libraries when they evaluate a model.
        """
        had_none = self._parameters.get(name, param) is None
        if name == "bias" and had_none and param is not None:
            kind = type(self).__name__.removeprefix("Adapted")
            raise ValueError(
                f"a {kind} with LoRA, but without a bias, gets one, as when a batch norm is folded "
                "into its weight, which leaves out the update: load the model again, unless this "
                "is a copy, and call lora.merge before that"
            )
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Initializes all parameters: W and b as the plain convolution does, and the update's."""
        super().reset_parameters()
        self.reset_lora_parameters()

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def _factors(self) -> tuple[Tensor, Tensor]:
        A, B = super()._factors()
        return A.flatten(1), B.flatten(1)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (batch, in_channels, …) to (batch, out_channels, …)."""
        dtype = product_dtype(input)
        x, bias = input.to(dtype), cast(self.bias, dtype)
        merged = self._merged_weight()
        if merged is not None:
            return self._conv_forward(x, merged.to(dtype), bias)
        weight, delta = self.weight.to(dtype), self._delta(dtype)
        out = self._conv_forward(x, weight, None)
        out = out + convolved_update(self, self.lora_dropout(x), delta)
        per_channel = (-1, *[1] * (weight.dim() - 2))
        gain = delta.gain(self._as_matrix(weight))
        if gain is not None:
            out = out * gain.to(dtype).view(per_channel)
        return out if bias is None else out + bias.view(per_channel)


class AdaptedConv1d(_AdaptedConv, nn.Conv1d):
    """`nn.Conv1d` with a low-rank update, as `_AdaptedConv` describes."""


class AdaptedConv2d(_AdaptedConv, nn.Conv2d):
    """`nn.Conv2d` with a low-rank update, as `_AdaptedConv` describes."""


class AdaptedConv3d(_AdaptedConv, nn.Conv3d):
    """`nn.Conv3d` with a low-rank update, as `_AdaptedConv` describes."""


class ScaledEmbedding(Embedding):
    """Hugging Face's embedding that multiplies the rows it looks up by `embed_scale`, with LoRA."""

    embed_scale: Any

    def forward(self, input: Tensor) -> Tensor:
        """Maps row numbers (…) to scaled rows (…, embedding_dim)."""
        return times_scale(self, super().forward(input))


def times_scale(embedding: Any, rows: Tensor) -> Tensor:
    """Returns rows times the embedding's scale, a number or a tensor of possibly another dtype."""
    scale = embedding.embed_scale
    return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


_POINTWISE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolved_update(conv: Any, x: Tensor, delta: Delta) -> Tensor:
    """Returns what an update adds to a convolution's output, s · conv(conv(x, A), B), without gain.

    Args:
        conv: the convolution, plain or adapted.
        x: (batch, in_channels, …), in the delta's dtype.
        delta: A (r, in/groups·k·…), B (out, r).
    """
    kernel = conv.weight.shape
    if conv.groups > 1:
        return conv._conv_forward(x, delta.product().view(kernel), None)
    z = conv._conv_forward(x, delta.A.view(-1, *kernel[1:]), None)
    dimensions = len(kernel) - 2
    B = (delta.scaling * delta.B).unflatten(1, (-1, *[1] * dimensions))
    return _POINTWISE[dimensions](z, B)


class AdaptedProjection(LoRALayer, nn.Module):
    """The update of a projection whose weight is a parameter of its `nn.MultiheadAttention`.

    Args:
        owner: the attention.
        name: the name of the weight in it, such as ``q_proj_weight``.
    """

    def __init__(self, owner: nn.Module, name: str, **settings: Any):
        nn.Module.__init__(self)
        # A tuple keeps nn.Module from registering the owner as a child of this module.
        self._owner, self.frozen_name = (owner,), name
        LoRALayer.__init__(self, **settings)

    @property
    def base(self) -> nn.Module:
        """The module that owns the weight."""
        return self._owner[0]

    @property
    def base_bias(self) -> None:
        """None: any bias belongs to that module."""
        return None

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight

    def forward(self, weight: Tensor) -> Any:
        """Returns the weight with its update, for the attention to compute with.

        It is called like any module, so that hooks and FSDP can load A and B when they are needed.
        """
        return _with_update(self, weight)


def owner_of_weight(name: str, layer: LoRALayer) -> str:
    """Returns the name of the module that has a layer's frozen weight, for the layer's own name."""
    return name.rpartition(".")[0] if isinstance(layer, AdaptedProjection) else name


class MultiheadAttention(LoRALayer, nn.MultiheadAttention):
    """`nn.MultiheadAttention` with low-rank updates of its projections.

    in_proj computes query, key and value, a third of its output each. One update covers the whole
    output, with PEFT's shapes: lora_A and lora_B of the attention itself. If the inputs have
    different sizes, the weights are separate, and `q_proj`, `k_proj` and `v_proj` have an update
    each. out_proj is a `Linear` of this library.

    PyTorch's attention function takes weights, so each forward pass in training computes the merged
    ones, with r multiplications per element. They are in the base's dtype: in half precision,
    updates that are small compared with the weight are rounded away. Dropout on an update's input
    is not possible.

    Shapes:
        in_proj_weight (3·embed, embed), lora_A (r, embed), lora_B (3·embed, r).
    """

    frozen_name = "in_proj_weight"

    @property
    def base_bias(self) -> nn.Parameter | None:
        """The bias of in_proj, if it has one."""
        return self.in_proj_bias

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes `nn.MultiheadAttention.forward`, without PyTorch's fused evaluation path."""
        turned = self.batch_first and query.dim() == 3
        if turned:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        packed = self._qkv_same_embed_dim
        names = () if packed else ("q_proj", "k_proj", "v_proj")
        separate = {f"{name}_weight": _weight_of(self, name) for name in names}
        out_proj = _out_proj(self, query)
        out, weights = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            _with_update(self, self.in_proj_weight) if packed else None,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            _with_update(out_proj, out_proj.weight),
            out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not packed,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            **separate,
        )
        return (out.transpose(0, 1) if turned else out), weights


def _weight_of(attention: MultiheadAttention, name: str) -> Tensor:
    """Returns the weight of a separate projection, with its update if it has one."""
    weight, projection = getattr(attention, f"{name}_weight"), attention._modules.get(name)
    if projection is None or not contains(projection, AdaptedProjection):
        return weight
    return without_checkpoint(projection)(weight)


def _out_proj(attention: MultiheadAttention, query: Tensor) -> Any:
    """Returns an attention's output projection without its wrappers, for its weight and bias.

    Raises:
        RuntimeError: it has an update, and is wrapped or sharded separately from the attention.
    """
    layer: Any = unwrapped(attention.out_proj)
    is_apart = is_sharded(layer.weight) > is_sharded(query) or not isinstance(layer, LoRALayer)
    if is_apart and contains(layer, LoRALayer):
        raise RuntimeError(
            "the out_proj of an nn.MultiheadAttention is wrapped or sharded apart from it, which "
            "computes with its weight and does not call it: wrap the attention as a whole"
        )
    return layer


def _with_update(layer: Any, weight: Tensor) -> Tensor:
    """Returns a layer's weight with its update, if any, merged into it. Gradients reach A and B."""
    if not isinstance(layer, LoRALayer) or layer.r == 0:
        return weight
    merged = layer._merged_weight()
    if merged is not None:
        return merged
    delta = layer._delta(weight.dtype)
    if needs_public_operations(weight, delta.A, delta.B):
        return delta.merged(weight)
    return delta.merge_(weight.clone())
