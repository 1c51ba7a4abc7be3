"""Computes x Wᵀ + b of matrices on a CPU by several methods, of which products.py chooses one.

    plain     F.linear
    onednn    oneDNN's linear layer, which PyTorch has for its own compiler
    blocks    F.linear on blocks of rows, whose intermediate results stay in the cache
    packed    oneDNN's, with a copy of the frozen weight in its layout, and in training one of its
              transpose: two or three times the memory
    float32   for bfloat16: converts the factors, the weight in parts, and rounds the result

A packed copy is made again when its weight has changed: when it was written to, replaced, or
trained by one of PyTorch's optimizers. It does not follow writes that PyTorch cannot see, such as
`weight.data.mul_(2)`. Write to the weight itself instead, under `torch.no_grad()`.

oneDNN's operators are private in PyTorch: `processor.has_onednn` tells whether they are there.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_BLOCK = 432  # rows


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(len(x), len(weight))
    for rows, result in zip(x.split(_BLOCK), out.split(_BLOCK), strict=True):
        _linear_into(result, rows, weight, bias)
    return out


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x Wᵀ + b into `out`, in the tensors' dtype: autocast does not change such calls."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _with_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    owner = frozen_owner(weight)
    return _onednn(x, weight if owner is None else _packed(owner, weight), bias)


# How many elements of a weight are converted at a time: 16 MiB in float32, or at least one row.
_CONVERTED = 2**22
_WIDE: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever PyTorch's defaults are


class _Scratch(threading.local):
    """Memory in float32 that a thread's products reuse one after the other.

    New memory for each would fragment the C library's heap: a step of GPT-2 small took 0.2 GiB
    more, and 4 % more time.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def empty(self, role: str, rows: int, columns: int) -> Tensor:
        """Returns (rows, columns), valid until the next call for this role; new memory if large."""
        count = rows * columns
        if count > _CONVERTED:
            return torch.empty(rows, columns, **_WIDE)
        if role not in self._buffers or self._buffers[role].numel() < count:
            with torch.inference_mode(False):  # an inference tensor could not be written to later
                self._buffers[role] = torch.empty(count, **_WIDE)
        return self._buffers[role][:count].view(rows, columns)

    def converted(self, role: str, x: Tensor) -> Tensor:
        """Returns a matrix in float32, transposed in memory if x is."""
        is_transposed = x.t().is_contiguous()
        given = x.t() if is_transposed else x
        wide = self.empty(role, *given.shape).copy_(given)
        return wide.t() if is_transposed else wide


_scratch = _Scratch()


def in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x Wᵀ + b in float32, rounded once at the end."""
    bias = None if bias is None else bias.float()
    if weight.numel() <= _CONVERTED:
        wide = _wide_linear(_scratch.converted("input", x), weight, bias)
        return wide.to(x.dtype, copy=True)
    out = x.new_empty(len(x), len(weight))
    # The weight is split into parts that are contiguous in memory: by its outputs or, if it is
    # transposed, by its inputs.
    if weight.is_contiguous():
        size = max(_CONVERTED // weight.shape[1], 1)
        parts = weight.split(size)
        biases = [None] * len(parts) if bias is None else bias.split(size)
        wide = _scratch.converted("input", x)
        for place, part, added in zip(out.split(size, dim=1), parts, biases, strict=True):
            place.copy_(_wide_linear(wide, part, added))
        return out
    size = max(_CONVERTED // len(weight), 1)
    total = _scratch.empty("output", *out.shape).zero_()
    for inputs, part in zip(x.split(size, dim=1), weight.split(size, dim=1), strict=True):
        wide_weight = _scratch.converted("weight", part)
        total.addmm_(_scratch.converted("input", inputs), wide_weight.t())
    return out.copy_(total if bias is None else total.add_(bias))


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x Wᵀ + b after converting the weight; the result is valid until the next call."""
    out = _scratch.empty("output", len(x), len(weight))
    return _linear_into(out, x, _scratch.converted("weight", weight), bias)


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "plain": F.linear,
    "onednn": _onednn,
    "blocks": _in_blocks,
    "packed": _with_packed,
    "float32": in_float32,
}


def _plain_batches(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    # With beta = 0, `baddbmm` still copies its first input to `out`, unless they are one tensor.
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _batches_in_float32(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    wide = torch.empty_like(out, dtype=torch.float32)
    return out.copy_(_plain_batches(a.float(), b.float(), scale, wide))


METHODS_OF_BATCHES: dict[str, Callable[[Tensor, Tensor, float, Tensor], Tensor]] = {
    "plain": _plain_batches,
    "float32": _batches_in_float32,
}


class _Packed(NamedTuple):
    """The packed copies of a weight.

    Args:
        stamp: the weight's `_stamp` when they were made.
        alias: keeps the weight's memory from being reused for another tensor.
        copies: by offset, shape and strides (the backward pass uses the transpose, and a weight may
            be used in slices).
    """

    stamp: tuple
    alias: Tensor
    copies: dict[tuple, Tensor]


_packed_copies: Any = WeakTensorKeyDictionary()


def frozen_owner(weight: Tensor) -> Tensor | None:
    """Returns the frozen parameter that a weight is, or is a view of; None if there is none."""
    if weight.is_inference():
        return None
    owner = weight if weight._base is None else weight._base
    return owner if isinstance(owner, nn.Parameter) and not owner.requires_grad else None


def _packed(owner: Tensor, weight: Tensor) -> Tensor:
    """Returns the weight in oneDNN's layout, converted at the first call and after changes."""
    _follow_optimizers()
    stamp = _stamp(owner)
    if owner not in _packed_copies or _packed_copies[owner].stamp != stamp:
        _drop_replaced()
        _packed_copies[owner] = _Packed(stamp, owner.detach(), {})
    copies = _packed_copies[owner].copies
    place = (weight.storage_offset(), weight.shape, weight.stride())
    if place not in copies:
        copies[place] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return copies[place]


def _stamp(owner: Tensor) -> tuple:
    return owner._version, owner.data_ptr(), owner.dtype


def drop_copies(owner: Tensor) -> None:
    """Drops the packed copies of a weight, if there are any."""
    _packed_copies.pop(owner, None)


def _drop_replaced() -> None:
    """Drops the copies of weights that have changed, such as those that are on a GPU now."""
    for owner in [
        owner for owner in _packed_copies if _packed_copies[owner].stamp != _stamp(owner)
    ]:
        del _packed_copies[owner]


@functools.cache
def _follow_optimizers() -> None:
    """Has optimizers drop the packed copies of weights that they train; once per process.

    Fused optimizers write to a weight without changing its version.
    """
    register_optimizer_step_post_hook(_drop_trained)


def _drop_trained(*_: Any) -> None:
    for owner in [owner for owner in _packed_copies if owner.grad is not None]:
        del _packed_copies[owner]
