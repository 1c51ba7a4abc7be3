"""Activation functions by the names that configurations use."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

gelu = F.gelu
mish = F.mish


def gelu_new(x: Tensor) -> Tensor:
    """Computes GELU by its tanh approximation, as GPT-2 does."""
    return F.gelu(x, approximate="tanh")


gelu_fast = gelu_new  # upstream writes the same formula twice


def linear_act(x: Tensor) -> Tensor:
    """Returns x: no activation."""
    return x


ACT2FN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "linear": linear_act,
    "mish": mish,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def get_activation(activation_string: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation function of this name.

    Raises:
        KeyError: there is no such function.
    """
    if activation_string not in ACT2FN:
        known = ", ".join(ACT2FN)
        raise KeyError(f"unknown activation function '{activation_string}' (known: {known})")
    return ACT2FN[activation_string]
