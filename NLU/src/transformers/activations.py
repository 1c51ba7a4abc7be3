"""Activation functions by the names that configurations use."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_new(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, as GPT-2 has it."""
    return F.gelu(x, approximate="tanh")


ACT2FN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_new,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
