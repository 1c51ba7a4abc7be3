"""Layers that `add_lora` makes of a model's own, beyond those in layers.py.

They keep the names of the module that they are made of: `weight` and `bias` of a convolution,
`in_proj_weight` and `out_proj` of an `nn.MultiheadAttention`. The layers in layers.py that have the
release's names and shapes, such as `Conv2d` with its `conv.weight`, are for models that are built
with them.
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
from .wrappers import is_sharded, unwrapped, without_checkpoint


class _AdaptedConv(LoRALayer):
    """`AdaptedConv1d`, `AdaptedConv2d` and `AdaptedConv3d`: a convolution with a low-rank update.

    h = conv(x, W) + b + s · conv(conv(dropout(x), A), B): A is a convolution like W with r output
    channels, B one of 1 × 1. Their product is a kernel of W's shape. (With groups it is that kernel
    that x is convolved with.)

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

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def _factors(self) -> tuple[Tensor, Tensor]:
        A, B = super()._factors()
        return A.flatten(1), B.flatten(1)

    def forward(self, input: Tensor) -> Tensor:
        """(batch, in_channels, …) -> (batch, out_channels, …)."""
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
    """An embedding of upstream's that multiplies the rows it looks up by its `embed_scale`."""

    embed_scale: Any

    def forward(self, input: Tensor) -> Tensor:
        """(…) of row numbers -> (…, embedding_dim)."""
        return times_scale(self, super().forward(input))


def times_scale(embedding: Any, rows: Tensor) -> Tensor:
    """Rows of such an embedding, scaled; the scale is a number, or a tensor of another dtype."""
    scale = embedding.embed_scale
    return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


_POINTWISE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolved_update(conv: Any, x: Tensor, delta: Delta) -> Tensor:
    """What an update adds to a convolution's result: s · conv(conv(x, A), B), without a gain.

    Args:
        conv: the convolution, plain or adapted.
        x: (batch, in_channels, …), of the delta's dtype.
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
        name: of the weight there, such as ``q_proj_weight``.
    """

    def __init__(self, owner: nn.Module, name: str, **settings: Any):
        nn.Module.__init__(self)
        # In a tuple the owner is not a child of its child.
        self._owner, self.frozen_name = (owner,), name
        LoRALayer.__init__(self, **settings)

    @property
    def base(self) -> nn.Module:
        """The attention."""
        return self._owner[0]

    @property
    def frozen_weight(self) -> nn.Parameter:
        """The attention's."""
        return getattr(self.base, self.frozen_name)

    @property
    def base_bias(self) -> None:
        """The bias is the attention's."""
        return None

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight

    def _add_update(self, dtype: torch.dtype | None = None) -> None:
        """Creates the parameters of the update."""
        out, width = self.frozen_weight.shape
        self._add_lora_parameters((self.r, width), (out, self.r), dtype)

    def forward(self, weight: Tensor) -> Any:
        """What the attention computes with in this weight's place: the weight with its update.

        It is called as any module is, for what loads A and B when they are needed: hooks, FSDP.
        """
        return _with_update(self, weight)


class MultiheadAttention(LoRALayer, nn.MultiheadAttention):
    """`nn.MultiheadAttention` with low-rank updates of its projections.

    in_proj, of which query, key and value are thirds, has one update over its whole output (PEFT's
    shapes), the attention's own lora_A and lora_B; where the inputs have different sizes, `q_proj`,
    `k_proj` and `v_proj` have one each. out_proj is a `Linear` of this library.

    PyTorch's attention takes weights, so that the merged ones are computed in each forward pass:
    r multiplications for each of their elements. They are in the base's dtype: in half precision,
    updates that are small beside the weight are rounded away. Dropout on an update's input is not
    possible.

    Shapes:
        in_proj_weight (3·embed, embed), lora_A (r, embed), lora_B (3·embed, r).
    """

    frozen_name = "in_proj_weight"

    @property
    def frozen_weight(self) -> nn.Parameter:
        """in_proj's."""
        return self.in_proj_weight

    @property
    def base_bias(self) -> nn.Parameter | None:
        """in_proj's."""
        return self.in_proj_bias

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight

    def _add_update(self, dtype: torch.dtype | None = None) -> None:
        """Creates the parameters of in_proj's update."""
        out, width = self.in_proj_weight.shape
        self._add_lora_parameters((self.r, width), (out, self.r), dtype)

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
        """As `nn.MultiheadAttention.forward`; PyTorch's fused evaluation path is not taken."""
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
    """The weight of a separate projection, with its update if it has one."""
    weight, projection = getattr(attention, f"{name}_weight"), attention._modules.get(name)
    if projection is None or not contains(projection, AdaptedProjection):
        return weight
    return without_checkpoint(projection)(weight)


def _out_proj(attention: MultiheadAttention, query: Tensor) -> Any:
    """The projection with whose weight and bias an attention computes, without its wrappers.

    Raises:
        RuntimeError: it has an update, and is wrapped or sharded apart from the attention.
    """
    layer: Any = unwrapped(attention.out_proj)
    is_apart = is_sharded(layer.weight) > is_sharded(query) or not isinstance(layer, LoRALayer)
    if is_apart and contains(layer, LoRALayer):
        raise RuntimeError(
            "the out_proj of an nn.MultiheadAttention is wrapped or sharded apart from it, which "
            "computes with its weight and does not call it: wrap the attention as a whole"
        )
    return layer


def contains(module: nn.Module, kind: type[Any]) -> bool:
    """Whether a module is of a kind, or something around a module of that kind."""
    return any(isinstance(each, kind) for each in module.modules())


def _with_update(layer: Any, weight: Tensor) -> Tensor:
    """A layer's weight with its update merged into it, if it has one; gradients reach A and B."""
    if not isinstance(layer, LoRALayer) or layer.r == 0:
        return weight
    merged = layer._merged_weight()
    if merged is not None:
        return merged
    delta = layer._delta(weight.dtype)
    if needs_public_operations(weight, delta.A, delta.B):
        return delta.merged(weight)
    return delta.merge_(weight.clone())
