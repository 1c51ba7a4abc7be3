r"""LoRA layers: plain PyTorch layers with a trainable low-rank update of a frozen weight.

    "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al., 2021), section 4.1:

        h  =  W x  +  (alpha / r) · B A x

                          h                    out numbers
                          ^
                          |
                          + <-- · alpha / r ---------.
                          |                          |
                 .--------+--------.         .-------+-------.
                 |                 |          \      B      /    out × r, zero at the start
                 |        W        |           '-----+-----'     r numbers: all that passes
                 |   frozen, in    |           .-----+-----.
                 |  half precision |          /      A      \    r × in, random at the start
                 |  if one likes   |         '-------+-------'
                 |                 |                 |
                 |    out × in     |                 |  dropout, in training
                 '--------+--------'                 |
                          |                          |
                          x -------------------------'         in numbers

`MergedLinear` computes several equal slices of h with one W (a transformer's query, key and value),
and updates some of them: A and B are stacks with one such pair for each updated slice.

The frozen weight is only read. In training mode (`layer.train()`) the right-hand branch is computed
and added in place to the left-hand one's result. In evaluation mode (`layer.eval()`), unless
`merge_weights=False`, one product with a merged copy W + (alpha / r) · B A takes the place of both;
`layer.merged` tells which mode is in effect. The copy is neither parameter nor buffer, so
`state_dict()` is the same in both modes. It takes as much memory as W, is made at the first forward
that needs it, made again when the tensors it came from have changed, and dropped by `train()`. On a
CPU, changes to A and B are seen at once, because their values are compared. On other devices they
are seen through PyTorch's version counters: writes through `parameter.data` are missed until the
next step of any optimizer, `train()` or `eval()`. The same holds for W on every device; on a CPU
with A, B and W all frozen, only `train()` or `eval()` lets such a write to W take effect.

Some cases take the right-hand branch in evaluation mode as well, with the same result to rounding:
a forward that autograd records for the sake of A, B or W, because the copy has no gradient; one
under `torch.compile` or `torch.jit.trace` (`loralib.merge` makes a plain model for these); one
within a `TorchDispatchMode`; and one whose tensors are not the layer's own parameters, or are no
plain ones: sharded by FSDP or as DTensors, offloaded by hooks, parametrized, quantized.

Layers compute in their input's dtype, or autocast's. W may be held in half precision while A, B and
the bias stay in float32: those are cast as they are used, and get their gradients in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import as_flag, as_flags
from .functional import Delta, variant_of
from .lora_layer import LoRALayer, cast
from .nn.fast_paths import needs_public_operations
from .nn.products import check_dense, linear, product_dtype

__all__ = [
    *("Conv1d", "Conv2d", "Conv3d", "ConvLoRA"),
    *("Embedding", "Linear", "LoRALayer", "MergedLinear"),
]


def _keep_encoder_off_fast_path(layer: nn.Module, inputs: tuple) -> None:
    """A hook that does nothing: it has PyTorch's encoder call the layer in evaluation mode as well.

    An `nn.TransformerEncoderLayer` otherwise computes with the weights of its layers, unless one of
    them has a hook. `add_lora` and `mark_only_lora_as_trainable` tell it so in another way, see
    in_place.py, but neither need have been called where a trained model is only used.
    """


class _SlicedLinear(LoRALayer, nn.Linear):
    """`Linear` and `MergedLinear`: a linear layer with an update for some slices of its output.

    Args:
        enabled: one bool for each of the equal slices that the output consists of.
    """

    fan_in_fan_out: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        r: int,
        lora_alpha: float,
        lora_dropout: float,
        enabled: Sequence[bool],
        fan_in_fan_out: bool,
        merge_weights: bool,
        variant: str,
        initialization: str,
        freeze_A: bool,
        **kwargs: Any,
    ):
        nn.Linear.__init__(self, in_features, out_features, **kwargs)
        LoRALayer.__init__(
            self, r, lora_alpha, lora_dropout, merge_weights, variant, initialization, freeze_A
        )
        self._add_slices(enabled)
        if self.r > 0:
            self.register_forward_pre_hook(_keep_encoder_off_fast_path)
        # A second time, as 0.1.2 does: a seed then gives the same weights.
        self.reset_parameters()
        self.fan_in_fan_out = as_flag("fan_in_fan_out", fan_in_fan_out)
        if self.fan_in_fan_out:
            self._transpose_weight()

    def _add_slices(self, enabled: Sequence[bool], dtype: torch.dtype | None = None) -> None:
        """Creates the parameters of the slices' updates."""
        if self.r > 0:
            self._set_starts(enabled)
            width, count = self.out_features // len(enabled), len(self._starts)
            self._add_lora_parameters(
                (self.r * count, self.in_features), (width * count, self.r), dtype
            )

    def _set_starts(self, enabled: Sequence[bool]) -> None:
        width = self.out_features // len(enabled)
        self._starts = tuple(i * width for i, on in enumerate(enabled) if on)

    def _complete_old_state(self, was_merged: bool) -> None:
        super()._complete_old_state(was_merged)
        if self.r > 0 and not self._forward_pre_hooks:
            self.register_forward_pre_hook(_keep_encoder_off_fast_path)

    def _transpose_weight(self) -> None:
        self.weight.data = self.weight.data.t().contiguous()

    def reset_parameters(self) -> None:
        """Initializes all parameters: W and b as `nn.Linear` does, A likewise, B with zeros."""
        if self.fan_in_fan_out:
            self._transpose_weight()
        nn.Linear.reset_parameters(self)
        if self.fan_in_fan_out:
            self._transpose_weight()
        self.reset_lora_parameters()

    @property
    def matrix(self) -> Tensor:
        """The frozen weight, (out, in)."""
        return self._as_matrix(self.weight)

    def _as_matrix(self, weight: Tensor) -> Tensor:
        """The weight as (out, in), however it is held."""
        return weight.t() if self.fan_in_fan_out else weight

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features) -> (…, out_features)."""
        x = input
        if self.r == 0:
            return linear(x, self._as_matrix(self.weight), self.bias)
        dtype = product_dtype(x)
        merged = self._merged_weight()
        if merged is None or x.layout is not torch.jagged:  # of which PyTorch has products
            check_dense(x)
        if merged is not None:
            weight, bias = self._as_matrix(merged).to(dtype), cast(self.bias, dtype)
            return linear(x.to(dtype), weight, bias)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        dropped = self.lora_dropout(rows)
        out = self._delta(dtype).linear(
            rows,
            None if dropped is rows else dropped,
            self._as_matrix(self.weight).to(dtype),
            cast(self.bias, dtype),
        )
        return out.view(*x.shape[:-1], self.out_features)

    def merged_layer(self) -> nn.Linear:
        """An `nn.Linear` with the update merged into its weight, (out, in) in any case."""
        layer = nn.Linear(self.in_features, self.out_features, device="meta")
        if self.r > 0 or self.fan_in_fan_out:
            weight = self._merge() if self.r > 0 else self.weight.detach()
            layer.weight = nn.Parameter(
                self._as_matrix(weight).contiguous(), requires_grad=self.weight.requires_grad
            )
        else:
            layer.weight = self.weight
        layer.bias = self.bias
        return layer.train(self.training)


class Linear(_SlicedLinear):
    """`nn.Linear` with a low-rank update: h = W x + b + (lora_alpha / r) · B A dropout(x).

    Args:
        in_features: size of each input.
        out_features: size of each output.
        r: rank of the update; 0 makes this an `nn.Linear`.
        lora_alpha: the update is scaled by lora_alpha / r.
        lora_dropout: dropout on the update's input.
        fan_in_fan_out: `weight` is held as (in, out), as GPT-2's checkpoints hold it.
        merge_weights: evaluation mode computes with the merged weight.
        variant: of the update, as for `LoRALayer`.
        initialization: likewise.
        freeze_A: likewise.
        **kwargs: for `nn.Linear` (bias, device, dtype).

    Shapes:
        weight (out, in), lora_A (r, in), lora_B (out, r); input (…, in), output (…, out).

    Raises:
        ValueError: r is not an integer or is negative; lora_dropout lies outside [0, 1].

    Source: section 4.1 of the paper.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        fan_in_fan_out: bool = False,
        merge_weights: bool = True,
        *,
        variant: str = "lora",
        initialization: str = "default",
        freeze_A: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            in_features,
            out_features,
            r,
            lora_alpha,
            lora_dropout,
            (True,),
            fan_in_fan_out,
            merge_weights,
            variant,
            initialization,
            freeze_A,
            **kwargs,
        )


class MergedLinear(_SlicedLinear):
    """Several linear layers of one input in one weight, of which some have a low-rank update.

    Args:
        in_features: size of each input.
        out_features: size of each output, of all slices together.
        r: rank of each slice's update; 0 makes this an `nn.Linear`.
        lora_alpha: the updates are scaled by lora_alpha / r.
        lora_dropout: dropout on the updates' input.
        enable_lora: for each slice of the output whether it has an update, such as
            [True, False, True] for the query and value of a transformer's (query, key, value).
        fan_in_fan_out: `weight` is held as (in, out), as GPT-2's checkpoints hold it.
        merge_weights: evaluation mode computes with the merged weight.
        variant: of the update, as for `LoRALayer`.
        initialization: likewise.
        freeze_A: likewise.
        **kwargs: for `nn.Linear` (bias, device, dtype).

    Shapes:
        with n slices, e of them enabled: weight (out, in), lora_A (r·e, in), lora_B (out/n·e, r);
        input (…, in), output (…, out).

    Raises:
        ValueError: as for `Linear`; or out_features is not a multiple of enable_lora's length, or
            r > 0 and no slice is enabled.

    Source: section 4.2 of the paper (which of a transformer's projections to adapt).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        enable_lora: Sequence[bool] = (False,),
        fan_in_fan_out: bool = False,
        merge_weights: bool = True,
        *,
        variant: str = "lora",
        initialization: str = "default",
        freeze_A: bool = False,
        **kwargs: Any,
    ):
        enabled = list(as_flags("enable_lora", enable_lora))
        if not enabled or out_features % len(enabled) != 0:
            raise ValueError(
                f"enable_lora must split out_features={out_features} into equal slices, "
                f"got {len(enabled)} of them: {enable_lora!r}"
            )
        if r and not any(enabled):
            raise ValueError(f"enable_lora enables no slice for r={r!r}, got {enable_lora!r}")
        super().__init__(
            in_features,
            out_features,
            r,
            lora_alpha,
            lora_dropout,
            enabled,
            fan_in_fan_out,
            merge_weights,
            variant,
            initialization,
            freeze_A,
            **kwargs,
        )
        self.enable_lora = enabled

    def merge_AB(self) -> Tensor:
        """B A of all slices as 0.1.2 computes it: in the shape of `weight`, and not scaled.

        Rows of slices without an update are zero. Gradients reach A and B.
        """
        rows = self.out_features // len(self.enable_lora)
        blank = self._zeros((rows, self.in_features), None)
        blocks = Delta(*self._factors(), 1.0, self._starts).blocks()
        products = (block.B @ block.A for block in blocks)
        return self._as_matrix(
            torch.cat([next(products) if on else blank for on in self.enable_lora])
        )

    def _complete_old_state(self, was_merged: bool) -> None:
        super()._complete_old_state(was_merged)
        self._set_starts(self.enable_lora)

    def _shown_of_update(self) -> list[str]:
        """As of any layer, and which slices have an update."""
        shown = super()._shown_of_update()
        return [*shown, f"enable_lora={self.enable_lora}"] if shown else []


class Embedding(LoRALayer, nn.Embedding):
    """`nn.Embedding` with a low-rank update: row i is W[i] + (lora_alpha / r) · B A[:, i].

    Args:
        num_embeddings: number of rows.
        embedding_dim: size of a row.
        r: rank of the update; 0 makes this an `nn.Embedding`.
        lora_alpha: the update is scaled by lora_alpha / r.
        merge_weights: evaluation mode looks rows up in the merged weight.
        variant: of the update, as for `LoRALayer`.
        initialization: likewise.
        freeze_A: likewise.
        **kwargs: for `nn.Embedding` (padding_idx, scale_grad_by_freq, sparse, device, dtype, …).
            The row at padding_idx gives A and magnitudes no gradient; sparse is for W's gradient,
            A's is dense.

    Shapes:
        weight (num_embeddings, embedding_dim), lora_A (r, num_embeddings), lora_B (embedding_dim,
        r); input (…) of integers, output (…, embedding_dim) in the weight's dtype.

    Raises:
        ValueError: r is not an integer or is negative; r > 0 with max_norm, which would rewrite
            the frozen weight.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        r: int = 0,
        lora_alpha: float = 1,
        merge_weights: bool = True,
        *,
        variant: str = "lora",
        initialization: str = "default",
        freeze_A: bool = False,
        **kwargs: Any,
    ):
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, **kwargs)
        LoRALayer.__init__(
            self, r, lora_alpha, 0.0, merge_weights, variant, initialization, freeze_A
        )
        self._add_update()
        if kwargs.get("_weight") is None:
            # A second time, as 0.1.2 does: a seed then gives the same weights.
            nn.Embedding.reset_parameters(self)
        self.reset_lora_parameters()

    @staticmethod
    def check_update(max_norm: float | None, freeze_A: bool, initialization: str) -> None:
        """Checks that an embedding can have an update.

        Raises:
            ValueError: it cannot.
        """
        if max_norm is not None:
            raise ValueError(
                f"max_norm={max_norm} rewrites an embedding's weight, which LoRA keeps frozen"
            )
        if freeze_A and initialization == "default":
            raise ValueError("freeze_A would freeze an embedding's A at zero: train it")

    def _add_update(self, dtype: torch.dtype | None = None) -> None:
        """Creates the parameters of the update."""
        if self.r == 0:
            return
        self.check_update(self.max_norm, self.freeze_A, self.initialization)
        self._add_lora_parameters(
            (self.r, self.num_embeddings), (self.embedding_dim, self.r), dtype
        )

    def _reset_factors(self) -> None:
        nn.init.zeros_(self.lora_A)
        nn.init.normal_(self.lora_B)

    def reset_parameters(self) -> None:
        """Initializes all parameters: W as `nn.Embedding` does, A zero, B standard normal."""
        nn.Embedding.reset_parameters(self)
        self.reset_lora_parameters()

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight.t()

    def _rows(self, ids: Tensor, weight: Tensor, sparse: bool) -> Tensor:
        return F.embedding(
            ids, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=sparse
        )

    def forward(self, input: Tensor) -> Tensor:
        """(…) of row numbers -> (…, embedding_dim)."""
        x = input
        if self.r == 0:
            return nn.Embedding.forward(self, x)
        merged = self._merged_weight()
        if merged is not None:
            return self._rows(x, merged, self.sparse)
        ids = x.flatten()
        out = self._rows(ids, self.weight, self.sparse)
        delta = self._delta()
        z = self._rows(ids, delta.A.t(), sparse=False)
        delta, z = replace(delta, B=delta.B.to(out.dtype)), z.to(out.dtype)
        if needs_public_operations(out, z, delta.B):
            out = delta.expanded(out, z)
        else:
            delta.expand_into(out, z)
        gain = delta.gain(self._as_matrix(self.weight))
        if gain is not None:
            if self.padding_idx is not None:
                is_padding = (ids == self.padding_idx)[:, None]
                gain = torch.where(is_padding, gain.detach(), gain)
            out = out * gain.to(out.dtype)
        return out.view(*x.shape, self.embedding_dim)

    def merged_layer(self) -> nn.Embedding:
        """An `nn.Embedding` with the update merged into its weight."""
        layer = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
            device="meta",
        )
        if self.r > 0:
            layer.weight = nn.Parameter(self._merge(), requires_grad=self.weight.requires_grad)
        else:
            layer.weight = self.weight
        return layer.train(self.training)


class ConvLoRA(LoRALayer, nn.Module):
    """The base class of `Conv1d`, `Conv2d` and `Conv3d`: a kernel with a low-rank update.

    h = conv(x, W) + conv(dropout(x), (lora_alpha / r) · B A), the product being read as a kernel of
    W's shape. Without dropout it is one convolution with the sum of both kernels.

    Args:
        conv_module: the class of the plain convolution; the derived classes set it. A subclass with
            a forward of its own may have others than PyTorch's three, such as a transposed one.
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: k, the kernel's length in each of its d dimensions; an integer.
        r: rank of the update; 0 makes this the plain convolution.
        lora_alpha: the update is scaled by lora_alpha / r.
        lora_dropout: dropout on the update's input. (0.1.2 takes it and does not apply it.)
        merge_weights: evaluation mode computes with the merged kernel.
        variant: of the update, as for `LoRALayer`.
        initialization: likewise.
        freeze_A: likewise.
        **kwargs: for the plain convolution (stride, padding, dilation, groups, bias, padding_mode,
            device, dtype).

    Shapes:
        conv.weight (out, in/groups, k, …); lora_A (r·k, in·k); lora_B (out/groups·k^(d-1), r·k).

    Attributes:
        conv: the plain convolution, which holds the frozen weight and the bias.

    Raises:
        ValueError: r or kernel_size is not an integer, r is negative, lora_dropout lies outside
            [0, 1]; conv_module is another class, without such a forward.
    """

    conv: Any

    def __init__(
        self,
        conv_module: Callable[..., nn.Module],
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        merge_weights: bool = True,
        *,
        variant: str = "lora",
        initialization: str = "default",
        freeze_A: bool = False,
        **kwargs: Any,
    ):
        if not isinstance(kernel_size, int):
            raise ValueError(
                f"kernel_size must be an integer, got {kernel_size!r}: give its length, if it is "
                "the same in all dimensions, or use add_lora on a plain convolution"
            )
        nn.Module.__init__(self)
        self.conv = conv_module(in_channels, out_channels, kernel_size, **kwargs)
        LoRALayer.__init__(
            self, r, lora_alpha, lora_dropout, merge_weights, variant, initialization, freeze_A
        )
        if variant_of(variant).has_magnitude:
            raise ValueError(
                f"the release's factors of a kernel have no row for each output channel, as "
                f"{variant} needs: use add_lora on a plain convolution"
            )
        if self.r > 0:
            self._check_forward()
            dimensions = self.conv.weight.dim() - 2
            out_rows = out_channels // self.conv.groups * kernel_size ** (dimensions - 1)
            self._add_lora_parameters(
                (r * kernel_size, in_channels * kernel_size), (out_rows, r * kernel_size)
            )
        # A second time, as 0.1.2 does: a seed then gives the same weights.
        self.reset_parameters()

    def _check_forward(self) -> None:
        """Checks that somebody computes what the convolution does, here only PyTorch's three."""
        plain = [kind.forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]
        if type(self.conv).forward not in plain and not self._computes_elsewhere():
            raise ValueError(
                "conv_module must be nn.Conv1d, nn.Conv2d or nn.Conv3d, got "
                f"{type(self.conv).__name__}: derive a class with a forward for it"
            )

    @property
    def base(self) -> nn.Module:
        """The plain convolution."""
        return self.conv

    def reset_parameters(self) -> None:
        """Initializes all parameters: W, b and A as the plain convolution does, B with zeros."""
        self.conv.reset_parameters()
        self.reset_lora_parameters()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Also takes the names of a plain convolution: otherwise strict=False would pass them over.

        What is given is a copy, from which the convolution gets its part next.
        """
        for name in ("weight", "bias"):
            is_own = name in self._parameters or name in self._buffers
            if is_own or self.conv._parameters.get(name) is None:
                continue
            if f"{prefix}conv.{name}" not in state_dict and f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}conv.{name}"] = state_dict.pop(f"{prefix}{name}")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(len(self.lora_B), -1)

    def forward(self, input: Tensor) -> Tensor:
        """(batch, in_channels, …) -> (batch, out_channels, …)."""
        if self.r == 0:
            return self.conv(input)
        dtype = product_dtype(input)
        x, bias = input.to(dtype), cast(self.conv.bias, dtype)
        merged = self._merged_weight()
        if merged is not None:
            return self.conv._conv_forward(x, merged.to(dtype), bias)
        weight, delta = self.conv.weight.to(dtype), self._delta(dtype)
        dropped = self.lora_dropout(x)
        if dropped is x:
            kernel = delta.merged(weight.reshape(len(self.lora_B), -1))
            return self.conv._conv_forward(x, kernel.view(weight.shape), bias)
        out = self.conv._conv_forward(x, weight, bias)
        kernel = delta.product().view(weight.shape)
        return out + self.conv._conv_forward(dropped, kernel, None)

    def merged_layer(self) -> nn.Module:
        """The plain convolution with the update merged into its weight."""
        conv = self.conv
        transposed = {"output_padding": conv.output_padding} if conv.transposed else {}
        layer = type(conv)(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
            device="meta",
            **transposed,
        )
        if self.r > 0:
            layer.weight = nn.Parameter(self._merge(), requires_grad=conv.weight.requires_grad)
        else:
            layer.weight = conv.weight
        layer.bias = conv.bias
        return layer.train(self.training)


class _ConvNd(ConvLoRA):
    """`Conv1d`, `Conv2d` and `Conv3d`: a `ConvLoRA` of one class; arguments as there."""

    _conv_module: type[nn.Module]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        merge_weights: bool = True,
        **kwargs: Any,
    ):
        super().__init__(
            self._conv_module,
            in_channels,
            out_channels,
            kernel_size,
            r,
            lora_alpha,
            lora_dropout,
            merge_weights,
            **kwargs,
        )


class Conv1d(_ConvNd):
    """`nn.Conv1d` with a low-rank update of its kernel, as `ConvLoRA` describes."""

    _conv_module = nn.Conv1d


class Conv2d(_ConvNd):
    """`nn.Conv2d` with a low-rank update of its kernel, as `ConvLoRA` describes."""

    _conv_module = nn.Conv2d


class Conv3d(_ConvNd):
    """`nn.Conv3d` with a low-rank update of its kernel, as `ConvLoRA` describes."""

    _conv_module = nn.Conv3d
