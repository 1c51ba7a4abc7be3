"""x Wᵀ + b of large matrices, outside of autograd.

On a CPU, PyTorch multiplies float32 matrices with MKL, whose kernels take about a tenth longer on
AMD's processors than oneDNN's, and in half precision it writes the bias to the result first, in a
pass of its own. Here both are oneDNN's linear layer, which PyTorch has for its own compiler.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Multiplications from which on it pays: the first product of a shape takes 0.3 ms more.
_LARGE = 2**28


def _has_onednn() -> bool:
    """Whether PyTorch has oneDNN's linear layer, and a processor that it suits."""
    is_fast = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return is_fast and hasattr(torch.ops.mkldnn, "_linear_pointwise")


_HAS_ONEDNN = _has_onednn()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of matrices, to rounding; not recorded by autograd where gradients are off.

    Args:
        x: (rows, in).
        weight: (out, in), of the same dtype.
        bias: (out,), of the same dtype.

    Returns:
        (rows, out).
    """
    if torch.compiler.is_compiling() or not _suits_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _suits_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    is_faster = x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and bias is not None)
    return (
        _HAS_ONEDNN
        and is_faster
        # Subclasses, such as sharded tensors, have operators of their own.
        and {type(x), type(weight)} <= {Tensor, nn.Parameter}
        and x.device.type == "cpu"
        and x.is_contiguous()
        and len(x) * weight.numel() >= _LARGE
        and not torch.is_grad_enabled()
        and bool(torch.backends.mkldnn.enabled)
    )
