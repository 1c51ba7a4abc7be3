"""Layer normalization that stays in half precision where its weight is held in it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that stays in half precision where its weight is held in it.

    Autocast would compute it, and with it all of the residual stream, in float32 on a GPU. The
    statistics are taken in float32 in any case.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        if self.weight.dtype == torch.float32:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            bias = self.bias.to(self.weight.dtype)
            x = x.to(self.weight.dtype)
            return F.layer_norm(x, self.normalized_shape, self.weight, bias, self.eps)
