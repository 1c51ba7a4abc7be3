"""PyTorch's kernels that only GPUs have, by their formulas, for the simulated GPU.

They take and return the same as the operators of these names, on the CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Attention:
    """softmax(q kᵀ · scale + bias) v of (…, heads, length, dim), and its gradients.

    It is computed in float32, or wider if the inputs are.

    The seed determines dropout's mask, so that the backward pass has the same.
    """

    bias: Tensor | None
    scale: float | None
    causal: bool
    dropout_p: float
    seed: int

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value, dtype = _wide(query), _wide(key), _wide(value), query.dtype
        weights, factors = self._weights(query, key)
        return ((weights * factors) @ value).to(dtype)

    def backward(self, grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The gradients of query, key, value and bias."""
        grad, query, key, value = map(_wide, (grad, *inputs))
        weights, factors = self._weights(query, key)
        of_value = (weights * factors).transpose(-1, -2) @ grad
        of_weights = grad @ value.transpose(-1, -2) * factors
        mean = (of_weights * weights).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - mean)
        scale = self._scale(query)
        of_query, of_key = of_scores @ key * scale, of_scores.transpose(-1, -2) @ query * scale
        parts = (of_query, of_key, of_value, of_scores)
        return tuple(part.to(inputs[0].dtype) for part in parts)

    def _scale(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def _weights(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities, and the factors by which dropout multiplies them."""
        scores = query @ key.transpose(-1, -2) * self._scale(query)
        if self.bias is not None:
            scores = scores + _wide(self.bias)
        if self.causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~visible, float("-inf"))
        factors = torch.ones_like(scores)
        if self.dropout_p > 0:
            random = torch.Generator().manual_seed(self.seed)
            kept = torch.rand(scores.shape, generator=random) >= self.dropout_p
            factors = kept / (1 - self.dropout_p)
        return scores.softmax(dim=-1), factors


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _flash(query, key, value, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    _check_flash(query, key, value)
    seed = torch.randint(2**31, (2,))
    out = _Attention(None, scale, is_causal, dropout_p, int(seed[0])).forward(query, key, value)
    lengths = (query.shape[2], key.shape[2])
    return out, out[..., 0].float(), None, None, *lengths, seed, seed[0], out[:0]


def _flash_backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, p, causal, seed, _, *, scale=None
):
    attention = _Attention(None, scale, causal, p, int(seed[0]))
    return attention.backward(grad, query, key, value)[:3]


def _check_bias(bias):
    """Refuses what the real kernel does; for these, PyTorch takes another kernel or a copy."""
    if bias is None:
        return
    strides = [stride for size, stride in zip(bias.shape, bias.stride(), strict=True) if size > 1]
    if strides and (bias.stride(-1) != 1 or any(stride % 8 for stride in strides[:-1])):
        raise RuntimeError(f"a bias with strides of {bias.stride()} is not aligned")


def _efficient(query, key, value, bias, compute_lse, dropout_p=0.0, causal=False, *, scale=None):
    _check_bias(bias)
    seed = torch.randint(2**31, (2,))
    out = _Attention(bias, scale, causal, dropout_p, int(seed[0])).forward(query, key, value)
    return out, out[..., 0].float(), seed[0], seed[1]


def _efficient_backward(
    grad, query, key, value, bias, out, lse, seed, _, p, mask, causal=False, *, scale=None
):
    found = _Attention(bias, scale, causal, p, int(seed)).backward(grad, query, key, value)
    return tuple(x if wanted else None for x, wanted in zip(found, mask, strict=True))


def _varlen(query, key, value, cu_q, cu_k, max_q, max_k, p, causal, debug, *, scale=None):
    """Flash attention of (tokens, heads, dim), within the rows that `cu_q` and `cu_k` delimit."""
    _check_flash(query, key, value)
    for ends, tensor, longest in ((cu_q, query, max_q), (cu_k, key, max_k)):
        lengths = ends.diff().tolist()
        if ends.dtype != torch.int32 or not ends.is_contiguous() or int(ends[-1]) != len(tensor):
            raise RuntimeError("cumulative lengths are int32, contiguous, and cover all tokens")
        if min(lengths) < 0 or max(lengths) > longest:
            raise RuntimeError("a row is longer than the longest")
    seed = torch.randint(2**31, (2,))
    found = [
        _Attention(None, scale, causal, p, int(seed[0]) + row).forward(*parts)
        for row, parts in enumerate(_rows((query, key, value), (cu_q, cu_k, cu_k)))
    ]
    out = torch.cat([each.transpose(0, 1) for each in found])
    return out, out[..., 0].float().t().contiguous(), seed, seed[0], out[:0]


def _varlen_backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, p, causal, seed, _, *, scale=None
):
    found = [
        _Attention(None, scale, causal, p, int(seed[0]) + row).backward(*parts)[:3]
        for row, parts in enumerate(_rows((grad, query, key, value), (cu_q, cu_q, cu_k, cu_k)))
    ]
    return tuple(
        torch.cat([x.transpose(0, 1) for x in parts]) for parts in zip(*found, strict=True)
    )


def _rows(tensors: Iterable[Tensor], ends: Iterable[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Row after row of (tokens, heads, dim), as (heads, length, dim)."""
    parts = [x.split(cu.diff().tolist()) for x, cu in zip(tensors, ends, strict=True)]
    for row in zip(*parts, strict=True):
        yield tuple(x.transpose(0, 1) for x in row)


def _check_flash(*inputs: Tensor) -> None:
    for x in inputs:
        if x.dtype not in HALF or x.shape[-1] % 8 or x.shape[-1] > 256 or x.stride(-1) != 1:
            raise RuntimeError(f"flash attention takes no {tuple(x.shape)} of {x.dtype}")


VARLEN_KERNELS: dict[Any, Callable] = {
    aten._flash_attention_forward.default: _varlen,
    aten._flash_attention_backward.default: _varlen_backward,
}
KERNELS: dict[Any, Callable] = {
    **VARLEN_KERNELS,
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
