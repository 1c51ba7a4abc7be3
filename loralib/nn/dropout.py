"""Dropout at a fifth of the cost of PyTorch's on a CPU.

PyTorch's CPU generator takes about 5 ns for one Bernoulli number: dropping elements of a
1120 × 768 activation then costs as much as multiplying it by a 768 × 768 matrix in bfloat16.
Here the eight bytes of one random 64-bit number decide eight elements. Let k be how many of the
2^16 values of 16 bits drop an element, written as two digits in base 256:

    k = round(p · 2^16) = 256 · high + low
    dropped  =  byte < high,  or  byte = high  and  the byte before it < low
    output   =  x · 2^16 / (2^16 - k)  where kept,  0 elsewhere

So p is rounded to a multiple of 2^-16 (0.1 becomes 0.100006), and kept elements are scaled for the
rounded probability, so that the mean of the output is exactly x. The second digit matters in one of
256 cases, and only in these do two elements share a random byte. Masks are int8, with all bits set
where an element is kept: PyTorch vectorizes arithmetic on integers on CPUs, but not on bool, and
such a mask can be combined with the bits of a floating-point number by a bitwise and.

The random numbers come from PyTorch's default CPU generator, so `torch.manual_seed` and
`torch.get_rng_state` reproduce them. On other devices, for nested tensors, and in graphs of
`torch.compile` or `torch.jit.trace`, PyTorch's own dropout is used.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bits import bits_of, integer_of
from .fast_paths import are_eager_paths_on

_VALUES = 2**16  # p is rounded to a multiple of 1 / _VALUES
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _dropped_values(p: float) -> int:
    """Returns how many of the 2^16 values drop an element (never all of them)."""
    return min(round(p * _VALUES), _VALUES - 1)


def keep_mask(shape: Sequence[int], p: float) -> Tensor:
    """Samples which elements of a CPU tensor of this shape dropout keeps.

    Args:
        shape: the tensor's shape.
        p: probability that an element is dropped, 0 <= p < 1.

    Returns:
        int8 tensor of that shape: -1 (all bits set) where kept, 0 where dropped.
    """
    count = math.prod(shape)
    numbers = torch.empty((count + 7) // 8, dtype=torch.int64, device="cpu")
    # The bounds are given because random_() alone would leave the sign bit of an int64 at zero.
    drawn = numbers.random_(-(2**63), None).view(torch.int8)
    high, low = divmod(_dropped_values(p), 256)
    # 1 where a byte that equals `high` drops its element. Bytes are signed, so they start at -128.
    tie = drawn.roll(1).lt_(low - 128)
    # Both forms mean drawn >= high - 128 + tie, with a right-hand side that fits into int8.
    kept = drawn.ge_(tie.add_(high - 128)) if high < 128 else drawn.gt_(tie.add_(high - 129))
    return kept.neg_()[:count].view(shape)


def apply_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Zeroes what a mask drops and scales what it keeps, so that the mean over masks is x.

    The map is linear in x and its own adjoint: the same call turns the output's gradient into
    x's. Autograd does not record it: call it inside a `torch.autograd.Function`.

    Args:
        x: CPU tensor, float16, bfloat16, float32 or float64.
        mask: what `keep_mask` returned for x's shape and the same p.
        p: probability that an element is dropped.

    Returns:
        A new tensor of x's shape and dtype.
    """
    return zero_dropped(x, mask).mul_(kept_scale(p))


def zero_dropped(x: Tensor, mask: Tensor) -> Tensor:
    """Zeroes what a mask drops, without the scaling, which a following product can do."""
    return mask.to(integer_of(x.dtype)).bitwise_and_(bits_of(x.contiguous())).view(x.dtype)


def kept_scale(p: float) -> float:
    """Returns the factor by which dropout multiplies kept elements."""
    return _VALUES / (_VALUES - _dropped_values(p))


class _ApplyMask(torch.autograd.Function):
    """`apply_mask` with a gradient; saves only the mask, one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.p = p
        return apply_mask(x, mask, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ApplyMask.apply(grad, *ctx.saved_tensors, ctx.p), None, None


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Zeroes elements of x with probability p and scales the others to keep the mean.

    Args:
        x: tensor of any shape and device.
        p: probability that an element is dropped, 0 <= p <= 1.
        training: False switches dropout off.

    Returns:
        x itself if `training` is False or p is 0; otherwise a new tensor of x's shape and dtype.

    Raises:
        ValueError: p lies outside [0, 1].
        RuntimeError: x is sharded over several processes, as by tensor parallelism, and is on
            CPUs, where each process would draw its own numbers.
    """
    _check_probability(p)
    if not training or p == 0:
        return x
    is_on_cpu = x.device.type == "cpu"
    if is_on_cpu and hasattr(x, "full_tensor"):
        raise RuntimeError(
            "dropout of a sharded tensor is not possible on CPUs, where each process would draw "
            "other numbers: use lora_dropout=0"
        )
    fast = is_on_cpu and x.dtype in _DTYPES and p < 1 and not x.is_nested
    if fast and are_eager_paths_on(x):
        return _ApplyMask.apply(x, keep_mask(x.shape, p), p)
    return F.dropout(x, p)


class Dropout(nn.Dropout):
    """Drop-in replacement for `torch.nn.Dropout(p)`, faster on CPUs (see the top of this file).

    Args:
        p: probability that an element is dropped.

    Raises:
        ValueError: p lies outside [0, 1].
    """

    def __init__(self, p: float = 0.5):
        _check_probability(p)  # nn.Dropout lets NaN pass
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        """Applies `dropout` in training mode; returns x itself in evaluation mode."""
        return dropout(x, self.p, self.training)
