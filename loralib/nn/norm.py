"""Layer normalization that stays in half precision if its weight is in half precision."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that stays in half precision if its weight is in half precision.

    On a GPU, autocast would compute it, and with it the whole residual stream, in float32. The
    statistics are computed in float32 in any case.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        if self.weight.dtype == torch.float32:
            return super().forward(x)
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return self._in_half(x)
        with torch.autocast(device, enabled=False):
            return self._in_half(x)

    def _in_half(self, x: Tensor) -> Tensor:
        x, bias = x.to(self.weight.dtype), self.bias.to(self.weight.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight, bias, self.eps)
