"""Deltas on the devices of their modules, which a bank's hooks add to the modules' outputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapted_layers import convolved_update, times_scale
from ..adapters.adapted_weights import AdaptedWeight
from ..functional import Delta
from ..layer_kinds import out_in, scales_rows
from ..model_checks import check_there


class DeviceDelta:
    """A delta on its module's device, which a forward hook adds to the module's output.

    Args:
        name: the module's name.
        adapted: the delta, as the adapter holds it, and its module.
        positions: whether the delta reaches positions, if the module projects these as well.
    """

    def __init__(self, name: str, adapted: AdaptedWeight, positions: bool):
        self.name, self.positions = name, positions
        self.module: Any = adapted.module
        weight = adapted.weight
        # A copy, because tensors may be mapped from a file, or may be written to by their owner.
        moved = adapted.delta.to(weight.device, copy=True)
        self._delta = moved.with_gain(out_in(adapted.module, weight))
        self._cast: dict[torch.dtype, Delta] = {}
        if weight.dtype in (torch.float16, torch.bfloat16):
            # Now, because in a compiled model the result would be its graph's.
            self._in(weight.dtype)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Turns `out`, the module's output for x, into the adapted one, in place.

        `out` has to be contiguous, unless the module is a convolution.
        """
        raise NotImplementedError

    def _in(self, dtype: torch.dtype) -> Delta:
        """Returns the delta in a dtype; it is cast once for each."""
        if dtype not in self._cast:
            with torch.inference_mode(False):
                self._cast[dtype] = self._delta.to(dtype)
        return self._cast[dtype]

    def _bias_beside_gain(self) -> Tensor | None:
        """Returns the module's bias, which a gain must not scale; None without a gain or a bias.

        Raises:
            ValueError: hooks have offloaded the bias before the bank's hook is called.
        """
        bias = getattr(self.module, "bias", None) if self._delta.has_magnitude else None
        if bias is not None and bias.is_meta:
            check_there([(f"the bias of {self.name}", bias)], "a bank uses an adapter with DoRA")
        return bias


class LinearDelta(DeviceDelta):
    """A linear layer's delta: x (…, in), out (…, out_features)."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Does what `Delta.add_to` does."""
        x = x.reshape(-1, x.shape[-1]).to(out.dtype)
        weight, bias = out_in(self.module, self.module.weight), self._bias_beside_gain()
        self._in(out.dtype).add_to(out.view(-1, out.shape[-1]), x, weight, bias)


class EmbeddingDelta(DeviceDelta):
    """An embedding's delta: x (…) of row numbers, out (…, embedding_dim)."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += s · B A[:, x], scaled as the module scales rows; then times the gain, if any."""
        delta = self._in(out.dtype)
        z = F.embedding(x.flatten(), delta.A.t())
        if scales_rows(self.module):
            z = times_scale(self.module, z)
        delta.expand_into(out.view(-1, out.shape[-1]), z)
        gain = delta.gain(self.module.weight.t())
        if gain is not None:
            out.mul_(gain.to(out.dtype))


class ConvolutionDelta(DeviceDelta):
    """A convolution's delta: x (batch, in_channels, …), out (batch, out_channels, …)."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += conv(x, s · B A), with B A as a kernel; then all but the bias times the gain."""
        delta, module = self._in(out.dtype), self.module
        per_channel = (-1, *[1] * (module.weight.dim() - 2))
        gain = delta.gain(module.weight.flatten(1))
        bias = self._bias_beside_gain()
        if bias is not None:
            out.sub_(bias.view(per_channel))
        out.add_(convolved_update(module, x.to(out.dtype), delta))
        if gain is not None:
            out.mul_(gain.to(out.dtype).view(per_channel))
        if bias is not None:
            out.add_(bias.view(per_channel))


def device_delta(name: str, adapted: AdaptedWeight, positions: bool) -> DeviceDelta:
    """Returns the `DeviceDelta` for a module's kind; arguments as for that class."""
    if isinstance(adapted.module, nn.Embedding):
        return EmbeddingDelta(name, adapted, positions)
    if adapted.weight.dim() > 2:
        return ConvolutionDelta(name, adapted, positions)
    return LinearDelta(name, adapted, positions)
