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
and updates some of them: A and B stack one pair of factors for each updated slice.

The frozen weight is never written to. In training mode (`layer.train()`), both branches are
computed, and the right one's result is added in place to the left one's. In evaluation mode
(`layer.eval()`), unless `merge_weights=False`, a single product with a merged copy of the weight,
W + (alpha / r) · B A, replaces both; `layer.merged` tells which mode is in effect. The copy is
neither a parameter nor a buffer, so `state_dict()` is the same in both modes. It takes as much
memory as W. It is made by the first forward that needs it, made again when the tensors it was
computed from have changed, and dropped by `train()` and `eval()`.

On a CPU, every change to A and B is noticed, because their values are compared. On other devices,
changes are noticed through PyTorch's version counters: a write through `parameter.data` is missed
until the next step of any optimizer, `train()` or `eval()`. The same holds for W on every device.
On a CPU with A, B and W all frozen, such a write to W takes effect only at `train()` or `eval()`.

In these cases, both branches are computed in evaluation mode as well, with the same result up to
rounding:

- Autograd records the forward because A, B or W requires gradients, and the copy passes none on.
- The forward runs under `torch.compile` or `torch.jit.trace` (for these, get a plain model from
  `loralib.merge`), within a `TorchDispatchMode`, or in a transform of `torch.func`.
- The tensors are not the layer's own parameters, or are not plain tensors: sharded by FSDP or as
  DTensors, offloaded by hooks, parametrized, quantized, or inference tensors.

If `layer.lora_dropout` alone is put into training mode again, as for Monte Carlo dropout, both
branches are computed as well, with dropout.

Layers compute in their input's dtype, or in autocast's. W may be stored in half precision while A,
B and the bias stay in float32: these are cast when they are used, and their gradients are float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import as_flag, as_flags
from .functional import Delta, variant_of
from .lora_layer import LoRALayer, cast, drawn_as_a_whole
from .nn.fast_paths import needs_public_operations
from .nn.products import check_dense, linear, product_dtype
from .tensor_kinds import is_sharded

__all__ = [
    *("Conv1d", "Conv2d", "Conv3d", "ConvLoRA"),
    *("Embedding", "Linear", "LoRALayer", "MergedLinear"),
]


def _keep_encoder_off_fast_path(layer: nn.Module, inputs: tuple) -> None:
    """Does nothing, but as a hook it makes PyTorch's encoder call the layer in evaluation mode too.

    Unless one of its layers has a hook, an `nn.TransformerEncoderLayer` in evaluation mode computes
    with their weights instead of calling them. `add_lora` and `mark_only_lora_as_trainable` prevent
    this in another way (see in_place.py), but a program that only uses a trained model may have
    called neither.
    """


def _in_shape(rows: Tensor, shape: torch.Size) -> Tensor:
    """Returns a new matrix in the shape that is asked for: (n, out) -> (*shape, out).

    To autograd, the result is no view. If a view is changed in place, FSDP2 loses the hook that it
    has put on it, and the backward pass fails.
    """
    if len(shape) == 1:  # as packed tokens have
        return rows
    if torch.jit.is_tracing():  # of that operator, it would record the numbers in the shape
        return rows.view(*shape, rows.shape[-1])
    return torch.ops.aten._unsafe_view(rows, (*shape, rows.shape[-1]))


class _SlicedLinear(LoRALayer, nn.Linear):
    """Base class of `Linear` and `MergedLinear`: updates some slices of a linear layer's output.

    Args:
        enabled: for each of the equal slices of the output, whether it has an update.
        update: the arguments of `LoRALayer`.
    """

    fan_in_fan_out: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        enabled: Sequence[bool],
        fan_in_fan_out: bool,
        update: tuple[Any, ...],
        **kwargs: Any,
    ):
        nn.Linear.__init__(self, in_features, out_features, **kwargs)
        LoRALayer.__init__(self, *update)
        if self.r > 0:
            self._add_slices(enabled)
            self.register_forward_pre_hook(_keep_encoder_off_fast_path)
        # Initialized a second time, as in 0.1.2, so that a seed gives the same weights as there.
        self.reset_parameters()
        self.fan_in_fan_out = as_flag("fan_in_fan_out", fan_in_fan_out)
        if self.fan_in_fan_out:
            self._transpose_weight()

    def _add_slices(self, enabled: Sequence[bool], dtype: torch.dtype | None = None) -> None:
        """Creates the parameters of the slices' updates."""
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
        """Returns the weight as (out, in), even if it is stored as (in, out)."""
        return weight.t() if self.fan_in_fan_out else weight

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features) -> (…, out_features)."""
        x = input
        if self.r == 0:
            return linear(x, self._as_matrix(self.weight), self.bias)
        dtype = product_dtype(x)
        merged = self._merged_weight()
        if merged is None or not x.is_nested:  # PyTorch can multiply nested tensors
            check_dense(x)
        if merged is not None:
            weight, bias = self._as_matrix(merged).to(dtype), cast(self.bias, dtype)
            return linear(x.to(dtype), weight, bias)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        dropped = self.lora_dropout(rows)
        out = self._delta().linear(
            rows,
            None if dropped is rows else dropped,
            self._as_matrix(self.weight).to(dtype),
            cast(self.bias, dtype),
        )
        return _in_shape(out, x.shape[:-1])

    def merged_layer(self) -> nn.Linear:
        """Returns an `nn.Linear` with the update merged into its weight, always (out, in)."""
        layer = nn.Linear(self.in_features, self.out_features, device="meta")
        layer.weight = self._merged_parameter()
        if self.r > 0 or self.fan_in_fan_out:
            matrix = self._as_matrix(layer.weight.detach()).contiguous()
            layer.weight = nn.Parameter(matrix, self.weight.requires_grad)
        layer.bias = self.bias
        return layer.train(self.training)


class Linear(_SlicedLinear):
    """`nn.Linear` with a low-rank update: h = W x + b + (lora_alpha / r) · B A dropout(x).

    Args:
        in_features: size of each input.
        out_features: size of each output.
        r: rank of the update; 0 makes this an `nn.Linear`.
        lora_alpha: the update is scaled by lora_alpha / r.
        lora_dropout: dropout probability on the update's input.
        fan_in_fan_out: `weight` is stored as (in, out), as in GPT-2's checkpoints.
        merge_weights: evaluation mode computes with the merged weight.
        variant: variant of the update, see `LoRALayer`.
        initialization: initialization of A and B, see `LoRALayer`.
        freeze_A: whether A is kept at its initial values, see `LoRALayer`.
        **kwargs: passed on to `nn.Linear` (bias, device, dtype).

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
        update = r, lora_alpha, lora_dropout, merge_weights, variant, initialization, freeze_A
        super().__init__(in_features, out_features, (True,), fan_in_fan_out, update, **kwargs)


class MergedLinear(_SlicedLinear):
    """Several linear layers of one input, stored as one weight; some have a low-rank update.

    Args:
        in_features: size of each input.
        out_features: size of each output, all slices together.
        r: rank of each slice's update; 0 makes this an `nn.Linear`.
        lora_alpha: the updates are scaled by lora_alpha / r.
        lora_dropout: dropout probability on the updates' input.
        enable_lora: for each slice of the output, whether it has an update: [True, False, True]
            updates the query and the value of a transformer's (query, key, value).
        fan_in_fan_out: `weight` is stored as (in, out), as in GPT-2's checkpoints.
        merge_weights: evaluation mode computes with the merged weight.
        variant: variant of the updates, see `LoRALayer`.
        initialization: initialization of A and B, see `LoRALayer`.
        freeze_A: whether A is kept at its initial values, see `LoRALayer`.
        **kwargs: passed on to `nn.Linear` (bias, device, dtype).

    Shapes:
        With n slices, e of them enabled: weight (out, in), lora_A (r·e, in), lora_B (out/n·e, r);
        input (…, in), output (…, out).

    Raises:
        ValueError: as for `Linear`; or out_features is not a multiple of enable_lora's length, or
            r > 0 and no slice is enabled.

    Source: section 4.2 of the paper (on which of a transformer's projections to adapt).
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
        update = r, lora_alpha, lora_dropout, merge_weights, variant, initialization, freeze_A
        super().__init__(in_features, out_features, enabled, fan_in_fan_out, update, **kwargs)
        self.enable_lora = enabled

    def merge_AB(self) -> Tensor:
        """Returns B A of all slices as in 0.1.2: in the shape of `weight`, and not scaled.

        The rows of slices without an update are zero. Gradients reach A and B.
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
        """Returns what `LoRALayer` shows, and which slices have an update."""
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
        variant: variant of the update, see `LoRALayer`.
        initialization: initialization of A and B, see `LoRALayer`.
        freeze_A: whether A is kept at its initial values, see `LoRALayer`.
        **kwargs: passed on to `nn.Embedding` (padding_idx, scale_grad_by_freq, sparse, device,
            dtype, …). The row at padding_idx gives no gradient to A or to DoRA's magnitudes.
            sparse applies to W's gradient; A's is always dense.

    Shapes:
        weight (num_embeddings, embedding_dim), lora_A (r, num_embeddings), lora_B (embedding_dim,
        r); input (…) of integers, output (…, embedding_dim) in the weight's dtype.

    Raises:
        ValueError: r is not an integer or is negative; r > 0 with max_norm, which would rewrite
            the frozen weight; or r > 0 with freeze_A and the default initialization, which would
            freeze A at zero.
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
        if self.r > 0:
            self.check_update(self.max_norm, self.freeze_A, self.initialization)
            self._add_update()
        if kwargs.get("_weight") is None:
            # Initialized a second time, as in 0.1.2, so that a seed gives the same weights.
            self.reset_parameters()
        else:
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
            raise ValueError(
                "freeze_A would freeze an embedding's A at zero: leave freeze_A out, or choose "
                "another initialization"
            )

    def _reset_factors(self) -> None:
        nn.init.zeros_(self.lora_A)
        with drawn_as_a_whole(self.lora_B) as B:
            nn.init.normal_(B)

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

    def _check_rows(self) -> None:
        rows, with_update = len(self.weight), self.lora_A.shape[1]
        if rows != with_update:
            raise RuntimeError(
                f"the embedding has {rows} rows now, and its LoRA {with_update}: resize it before "
                "add_lora"
            )

    def _merge(self) -> Tensor:
        if not self._set_merged:
            self._check_rows()
        return super()._merge()

    def forward(self, input: Tensor) -> Tensor:
        """(…) of row numbers -> (…, embedding_dim)."""
        x = input
        if self.r == 0:
            return nn.Embedding.forward(self, x)
        merged = self._merged_weight()
        if merged is not None:
            return self._rows(x, merged, self.sparse)
        self._check_rows()
        ids = x.flatten()
        out = self._rows(ids, self.weight, self.sparse)
        delta = self._delta()
        z = self._rows(ids, delta.A.t(), sparse=False)
        delta, z = replace(delta, B=delta.B.to(out.dtype)), z.to(out.dtype)
        # PyTorch cannot add in place to rows that are yet to be summed over the processes.
        if is_sharded(out) or needs_public_operations(out, z, delta.B):
            out = delta.expanded(out, z)
        else:
            delta.expand_into(out, z)
        gain = delta.gain(self._as_matrix(self.weight))
        if gain is not None:
            if self.padding_idx is not None:
                is_padding = (ids == self.padding_idx)[:, None]
                gain = torch.where(is_padding, gain.detach(), gain)
            out = out * gain.to(out.dtype)
        return _in_shape(out, x.shape)

    def merged_layer(self) -> nn.Embedding:
        """Returns an `nn.Embedding` with the update merged into its weight."""
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
        layer.weight = self._merged_parameter()
        return layer.train(self.training)


class ConvLoRA(LoRALayer, nn.Module):
    """The base class of `Conv1d`, `Conv2d` and `Conv3d`: a kernel with a low-rank update.

    h = conv(x, W) + conv(dropout(x), (lora_alpha / r) · B A), with B A reshaped to W's shape.
    Without dropout, this is computed as one convolution with the sum of both kernels.

    Args:
        conv_module: class of the plain convolution, set by the derived classes. It has to be one of
            PyTorch's three, except in a subclass with its own forward, which may use another one,
            such as a transposed convolution.
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: k, the kernel's length in each of its d dimensions; an integer.
        r: rank of the update; 0 makes this the plain convolution.
        lora_alpha: the update is scaled by lora_alpha / r.
        lora_dropout: dropout probability on the update's input. (0.1.2 accepts and ignores it.)
        merge_weights: evaluation mode computes with the merged kernel.
        variant: variant of the update, see `LoRALayer`; those with DoRA are refused.
        initialization: initialization of A and B, see `LoRALayer`.
        freeze_A: whether A is kept at its initial values, see `LoRALayer`.
        **kwargs: passed on to the plain convolution (stride, padding, dilation, groups, bias,
            padding_mode, device, dtype).

    Shapes:
        conv.weight (out, in/groups, k, …); lora_A (r·k, in·k); lora_B (out/groups·k^(d-1), r·k).

    Attributes:
        conv: the plain convolution, which holds the frozen weight and the bias.

    Raises:
        ValueError: r or kernel_size is not an integer, r is negative, or lora_dropout lies outside
            [0, 1]; the variant is one with DoRA; conv_module is not one of PyTorch's three, and
            the class has no forward of its own; or a parameter is assigned to `weight` or `bias`
            of the layer itself, instead of `conv`'s.
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
        # Initialized a second time, as in 0.1.2, so that a seed gives the same weights as there.
        self.reset_parameters()

    def _check_forward(self) -> None:
        """Checks that forward fits the convolution: the one here fits only PyTorch's three."""
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

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuses `layer.weight = …`, which is right for `Linear`, and would have no effect here.

        A subclass may compute with such a parameter.
        """
        if name in ("weight", "bias") and param is not None and type(self).__module__ == __name__:
            raise ValueError(
                f"a {type(self).__name__} computes with its conv.{name}: assign that instead of "
                f"its {name}"
            )
        super().register_parameter(name, param)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Also accepts the names of a plain convolution, which strict=False would otherwise ignore.

        `state_dict` is PyTorch's copy of the caller's dict. `conv` loads from the same copy next.
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
            kernel = delta.merged(self._as_matrix(weight))
            return self.conv._conv_forward(x, kernel.view(weight.shape), bias)
        out = self.conv._conv_forward(x, weight, bias)
        kernel = delta.product().view(weight.shape)
        return out + self.conv._conv_forward(dropped, kernel, None)

    def merged_layer(self) -> nn.Module:
        """Returns the plain convolution with the update merged into its weight."""
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
        layer.weight = self._merged_parameter()
        layer.bias = conv.bias
        return layer.train(self.training)


class _ConvNd(ConvLoRA):
    """Base class of `Conv1d`, `Conv2d` and `Conv3d`: sets conv_module; else as `ConvLoRA`."""

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
