"""x Wᵀ + b of large matrices, in the fastest way that PyTorch has on this processor.

On a CPU there are several, and which of them is the fastest depends on the processor, the shape and
the dtype: MKL's kernels for float32, for instance, are a tenth slower than oneDNN's on AMD's
processors, and on Intel's with AMX, weights in oneDNN's own layout are multiplied twice as fast.

    plain     F.linear
    onednn    oneDNN's linear layer, which PyTorch has for its own compiler
    blocks    F.linear on blocks of rows, whose intermediate results stay in the cache
    packed    oneDNN's, with a copy of the frozen weight in its layout, and in training one of its
              transpose: two or three times the memory
    float32   of bfloat16: the factors are converted, the weight in parts, and the result is rounded

bfloat16 is not faster everywhere. Where a processor has no instructions for it, PyTorch's products
were seen to take 12 times as long as in float32, and 190 times with a transposed weight. Some of
Intel's that have AVX-512's instructions, but not AMX, take 1.7 times as long.

Where nothing was measured, "onednn" is taken where it is known to be good, and "float32" where a
processor has no instructions for bfloat16. Training scripts, evaluation and beam search measure all
of them on their frozen weights before they begin (`measure`), for about as many rows as they will
have: with few rows, most of the time goes into bringing the weight into another layout. Ways differ
in the order in which they add, and so in rounding: a run uses choices for its own weights alone,
keeps them in its checkpoints, and resumes with them (`choices`, `use_choices`).

A packed copy is made again when its weight has changed: when it was written to, replaced, or
trained by one of PyTorch's optimizers. It does not follow writes that PyTorch cannot see, such as
`weight.data.mul_(2)`: write to the weight itself, under `torch.no_grad()`.
"""

import functools
import platform
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .plain import is_plain, is_transformed

# ---- products that autograd records ----


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a matrix product with x has: autocast's where it is on, else x's own."""
    device = x.device.type
    if (
        torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
        and x.dtype != torch.float64
    ):
        return torch.get_autocast_dtype(device)
    return x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, to rounding; fast where the weight is frozen, or bfloat16 is emulated.

    Args:
        x: (…, in).
        weight: (out, in).
        bias: (out,); it may be trained.

    Returns:
        (…, out), in x's dtype or autocast's.
    """
    if x.device.type != "cpu" or not _is_ordinary(x, weight):
        return F.linear(x, weight, bias)
    dtype = product_dtype(x)
    is_trained = weight.requires_grad and torch.is_grad_enabled()
    is_cast = dtype is not x.dtype or torch.is_autocast_enabled("cpu")
    is_emulated = dtype is torch.bfloat16 and not _has_bfloat16()
    if is_trained and not (is_emulated and (is_cast or weight.dtype is dtype)):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    cast_bias = None if bias is None else bias.to(dtype)
    out = _Linear.apply(rows, weight.to(dtype), cast_bias)
    return out.view(*x.shape[:-1], len(weight))


class Linear(nn.Linear):
    """`nn.Linear`, to rounding; fast while its weight is frozen."""

    @property
    def matrix(self) -> Tensor:
        """The weight, (out, in)."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) -> (…, out_features)."""
        return linear(x, self.weight, self.bias)


def use_products(model: nn.Module) -> None:
    """Makes `Linear`s of a model's plain linear layers, in place; the parameters stay the same."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                has_bias = child.bias is not None
                layer = Linear(child.in_features, child.out_features, has_bias, device="meta")
                layer.weight, layer.bias = child.weight, child.bias
                setattr(module, name, layer.train(child.training))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, to rounding; recorded by autograd.

    Args:
        a: (…, n, k).
        b: (…, k, m).

    Returns:
        (…, n, m), in a's dtype or autocast's.
    """
    dtype = product_dtype(a)
    if a.device.type != "cpu" or not _is_ordinary(a, b) or _way_of_batches(dtype) == "plain":
        return a @ b
    return _wide_matmul(a.to(dtype), b.to(dtype)).to(dtype)


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, whatever autocast says."""
    with torch.autocast("cpu", enabled=False):
        return a.float() @ b.float()


class _Linear(torch.autograd.Function):
    """`linear` of (rows, in), all of one dtype. The input is held for a trained weight alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_x = product(grad, weight.t()) if of_x else None
        grad_weight = small_product(grad.t(), x.t()) if of_weight else None
        return grad_x, grad_weight, grad.sum(0) if of_bias else None


# ---- products outside of autograd ----

# Multiplications from which on it pays. For a number of rows that is new, oneDNN makes a kernel
# first, which takes about a millisecond in float32 and more in bfloat16; filling.py has few such
# numbers, but every new one costs that. Below, F.linear computes, whatever was measured with more
# rows: a 768 x 768 weight has a choice from 456 rows on.
_LARGE = 2**28
# Products of so few rows, or fewer, are measured by themselves. Beam search has them, and keeps the
# number of its rows for many steps; a head has them, which sees some of a batch's rows at a time.
_FEW = 256
_LARGE_OF_FEW = 2**24


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of matrices, to rounding; not recorded by autograd where gradients are off.

    Args:
        x: (rows, in).
        weight: (out, in), of the same dtype.
        bias: (out,), of the same dtype.

    Returns:
        (rows, out).
    """
    if not _is_ordinary(x, weight) or not _has_ways(x, weight):
        return small_product(x, weight, bias)
    way = _chosen.get(_key(x, weight, bias)) or _usual(x, weight, bias)
    return _WAYS[way](x, weight, bias)


def _is_ordinary(x: Tensor, weight: Tensor) -> bool:
    """Whether fast ways are on, and know these tensors: no subclasses, no tracing."""
    return (
        {type(x), type(weight)} <= {Tensor, nn.Parameter}
        and not is_plain()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not is_transformed(x, weight)
    )


def small_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product`, of which nothing is to be chosen: of few rows, or with a thin matrix."""
    if x.dtype is not torch.bfloat16 or not _is_ordinary(x, weight) or not _is_emulated(x):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _in_float32(x, weight, bias)
    wide = _wide_matmul(x, weight.t())
    return (wide if bias is None else wide + bias).to(x.dtype)


def add_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out += scale · a b, in place; recorded by autograd.

    Args:
        out: (n, m).
        a: (n, k), of the same dtype.
        b: (k, m), of the same dtype.
        scale: what the product is multiplied by. Without a default, which PyTorch's compiler would
            take for an input.
    """
    if a.dtype is torch.bfloat16 and _is_ordinary(a, b) and _is_emulated(a):
        out.add_(_wide_matmul(a, b), alpha=scale)
    else:
        out.addmm_(a, b, alpha=scale)


def batched_product(a: Tensor, b: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """scale · a b of matrices in batches, in one call; not recorded by autograd.

    Of the factors' dtype, whatever autocast says.

    Args:
        a: (matrices, n, k), on a CPU.
        b: (matrices, k, m), of the same dtype.
        scale: what the result is multiplied by.
        out: (matrices, n, m), takes the result; by default new memory.

    Returns:
        (matrices, n, m).
    """
    if out is None:
        out = a.new_empty(*a.shape[:2], b.shape[2])
    return _WAYS_OF_BATCHES[_way_of_batches(a.dtype)](a, b, scale, out)


def _way_of_batches(dtype: torch.dtype) -> str:
    if dtype is not torch.bfloat16 or is_plain():
        return "plain"
    return _chosen.get(_BATCHES) or ("plain" if _has_bfloat16() else "float32")


def _has_ways(x: Tensor, weight: Tensor) -> bool:
    """Whether the product is large enough, and of a kind that there is a choice for."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_contiguous()
        and len(x) * weight.numel() >= (_LARGE_OF_FEW if len(x) <= _FEW else _LARGE)
        and not torch.is_grad_enabled()
        and bool(torch.backends.mkldnn.enabled)
    )


# ---- the ways ----

_BLOCK = 432  # rows


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(len(x), len(weight))
    for rows, result in zip(x.split(_BLOCK), out.split(_BLOCK), strict=True):
        _linear_into(result, rows, weight, bias)
    return out


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b into `out`, in the dtype of the tensors: autocast leaves such calls alone."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _with_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    owner = _owner(weight)
    return _onednn(x, weight if owner is None else _packed(owner, weight), bias)


# How many elements of a weight are converted at a time: 16 MB of them, or one row.
_CONVERTED = 2**22
_WIDE: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever PyTorch's defaults are


class _Scratch(threading.local):
    """Memory in float32 that the products of a thread use one after the other.

    New memory for each would leave holes in the C library's heap: a step of GPT-2 small took
    0.2 GiB more, and 4 % more time.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def empty(self, role: str, rows: int, columns: int) -> Tensor:
        """(rows, columns), until the role is asked for again; new memory where that is large."""
        count = rows * columns
        if count > _CONVERTED:
            return torch.empty(rows, columns, **_WIDE)
        if role not in self._buffers or self._buffers[role].numel() < count:
            with torch.inference_mode(False):  # a tensor of that mode could not be written to later
                self._buffers[role] = torch.empty(count, **_WIDE)
        return self._buffers[role][:count].view(rows, columns)

    def converted(self, role: str, x: Tensor) -> Tensor:
        """A matrix in float32, transposed in memory if it is."""
        is_transposed = x.t().is_contiguous()
        given = x.t() if is_transposed else x
        wide = self.empty(role, *given.shape).copy_(given)
        return wide.t() if is_transposed else wide


_scratch = _Scratch()


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computed in float32 and rounded once, at the end."""
    bias = None if bias is None else bias.float()
    if weight.numel() <= _CONVERTED:
        wide = _wide_linear(_scratch.converted("input", x), weight, bias)
        return wide.to(x.dtype, copy=True)
    out = x.new_empty(len(x), len(weight))
    # Parts of the weight as it lies in memory: of its outputs, or of a transposed one's inputs.
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
    """Of a weight that is converted first; the result is there until the next."""
    out = _scratch.empty("output", len(x), len(weight))
    return _linear_into(out, x, _scratch.converted("weight", weight), bias)


_WAYS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "plain": F.linear,
    "onednn": _onednn,
    "blocks": _in_blocks,
    "packed": _with_packed,
    "float32": _in_float32,
}


def _plain_batches(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    # With beta = 0, `baddbmm` still copies its first input to `out`, unless they are one tensor.
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _batches_in_float32(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    wide = torch.empty_like(out, dtype=torch.float32)
    return out.copy_(_plain_batches(a.float(), b.float(), scale, wide))


_WAYS_OF_BATCHES: dict[str, Callable[[Tensor, Tensor, float, Tensor], Tensor]] = {
    "plain": _plain_batches,
    "float32": _batches_in_float32,
}


class _Packed(NamedTuple):
    """The copies of a weight.

    Args:
        stamp: what the weight was when they were made.
        alias: keeps the weight's address from being given to another tensor.
        copies: by offset, shape and order (the backward pass has the transpose, and a weight may
            be multiplied with in slices).
    """

    stamp: tuple
    alias: Tensor
    copies: dict[tuple, Tensor]


_packed_copies: Any = WeakTensorKeyDictionary()


def _owner(weight: Tensor) -> Tensor | None:
    """The frozen parameter that a weight is, or is a view of; None where it is something else."""
    if weight.is_inference():
        return None
    owner = weight if weight._base is None else weight._base
    return owner if isinstance(owner, nn.Parameter) and not owner.requires_grad else None


def _packed(owner: Tensor, weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout; made when it is first asked for, and when it has changed."""
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


def _drop_replaced() -> None:
    """Forgets copies of weights that have become others, such as those that are on a GPU now."""
    for owner in [
        owner for owner in _packed_copies if _packed_copies[owner].stamp != _stamp(owner)
    ]:
        del _packed_copies[owner]


@functools.cache
def _follow_optimizers() -> None:
    """From now on, packed copies of trained weights are dropped; once a process.

    Fused optimizers write to a weight without a change of its version.
    """
    register_optimizer_step_post_hook(_drop_trained)


def _drop_trained(*_: Any) -> None:
    for owner in [owner for owner in _packed_copies if owner.grad is not None]:
        del _packed_copies[owner]


def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether PyTorch has oneDNN's linear layer for this dtype on this processor."""
    has_it = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_it and (dtype is torch.float32 or _has_avx512())


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _is_emulated(x: Tensor) -> bool:
    """Whether x is on a CPU that is known to have no instructions for products of its dtype."""
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and not _has_bfloat16()


@functools.cache
def _is_intels() -> bool:
    """Whether the processor is known to be of Intel, whose library MKL is."""
    return "Intel" in (_cpuinfo().get("vendor_id") or platform.processor())


# Instructions that multiply in bfloat16, or convert it, by Linux's names: x86's, and ARM's.
_OF_BFLOAT16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}


@functools.cache
def _has_bfloat16() -> bool:
    """Whether the processor has instructions for it that PyTorch uses, as far as is known."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if asked is not None and not asked():
        return False
    known = _cpuinfo()
    flags = (known.get("flags") or known.get("Features") or "").split()
    return not flags or not _OF_BFLOAT16.isdisjoint(flags)


# ---- the choice ----

MANY_ROWS = 1024
_ROUNDS = 5
# How much of the best time so far a way may take to be preferred, for what it costs otherwise.
_WORTH = {"onednn": 0.97, "blocks": 0.95, "packed": 0.85, "float32": 0.9}
# A weight that only some of a batch's rows are multiplied with, such as a head with the targets,
# takes as much memory to copy as any other, and the copy saves less of a step.
_WORTH_FOR_SOME_ROWS = {**_WORTH, "packed": 0.65}

_chosen: dict[str, str] = {}
# The kind of `batched_product`; and matrices as attention has them, by which it is measured.
_BATCHES = "bfloat16 in batches"
_BATCH = 96, 64, 64


# Instructions that oneDNN's kernels differ by, and PyTorch's name of the processor's kind does not.
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def machine() -> str:
    """What the choice depends on beside the product: processor, PyTorch, threads, and the ways."""
    threads = torch.get_num_threads()
    count = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{_processor()}, torch {torch.__version__}, {count}, ways: {' '.join(_WAYS)}"


def _processor() -> str:
    """Its name, and what it can: one name may stand for several, as in virtual machines."""
    known = _cpuinfo()
    flags = known.get("flags", "").split()
    instructions = [name for name in _INSTRUCTIONS if name in flags]
    name = known.get("model name") or _arm_name(known) or platform.processor()
    return " ".join([name, torch.backends.cpu.get_cpu_capability(), *instructions])


def _arm_name(known: Mapping[str, str]) -> str:
    """What Linux says of ARM's processors, which it does not name: numbers of maker and kind."""
    return " ".join(filter(None, (known.get("CPU implementer"), known.get("CPU part"))))


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first core; elsewhere nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def choices() -> dict[str, Any]:
    """The ways in use, and the machine that they were chosen on; made of text."""
    return {"machine": machine(), "ways": dict(_chosen)}


def use_choices(state: Mapping[str, Any]) -> None:
    """Takes the place of what was chosen, unless another machine chose it."""
    if state["machine"] == machine():
        _chosen.clear()
        _chosen.update({key: way for key, way in state["ways"].items() if way in _ways_of(key)})


def is_slow_in_bfloat16(ways: Mapping[str, str]) -> bool:
    """Whether float32 is faster in most of the products that there is a choice for."""
    found = [way for key, way in ways.items() if key != _BATCHES]
    return 2 * found.count("float32") > len(found)


def _ways_of(key: str) -> Collection[str]:
    """The ways that there are for a kind of product."""
    return _WAYS_OF_BATCHES if key == _BATCHES else _WAYS


class FrozenWeight(NamedTuple):
    """What products are measured with.

    Args:
        matrix: (out, in), a parameter or a view of one ("packed" is for no other).
        bias: of its layer.
        rows_at_once: the most rows of a dtype that it is multiplied with at once, where its layer
            says so.
    """

    matrix: Tensor
    bias: Tensor | None = None
    rows_at_once: Callable[[torch.dtype], int] | None = None


@torch.no_grad()
def measure(
    weights: Iterable[FrozenWeight],
    dtype: torch.dtype,
    known: Mapping[str, str],
    rows: int = MANY_ROWS,
    backward: bool = True,
) -> dict[str, str]:
    """The fastest ways for products with these weights, by kind of product.

    Each kind that is not known takes a third of a second; large ones longer.

    Args:
        weights: frozen ones.
        dtype: what products are computed in.
        known: ways, by kind of product, that need not be measured.
        rows: how many rows will be multiplied at once, about.
        backward: for products with the weights' transposes as well.
    """
    # Its own, so that a run that measures draws the same numbers later as one that need not.
    generator = torch.Generator().manual_seed(0)
    ways: dict[str, str] = {}
    for weight, bias, rows_at_once in weights:
        count = min(rows, rows_at_once(dtype)) if rows_at_once else rows
        worth = _WORTH_FOR_SOME_ROWS if rows_at_once else _WORTH
        for matrix, added in (
            ((weight, bias), (weight.t(), None)) if backward else ((weight, bias),)
        ):
            # Without values yet: most kinds occur in every layer, and are known by then.
            x, cast = torch.empty(count, matrix.shape[1], dtype=dtype), _like(matrix, dtype)
            if not _is_ordinary(x, matrix) or not _has_ways(x, cast):
                continue
            key = _key(x, cast, added)
            if _is_emulated(x):  # where other ways may take a hundred times as long
                ways[key] = "float32"
            if key not in ways and known.get(key) in _WAYS:
                ways[key] = known[key]
            if key not in ways:
                x = torch.rand(x.shape, generator=generator).to(dtype)
                own = None if added is None else added.to(dtype)
                ways[key] = _fastest(x, matrix.to(dtype), own, worth)
    if ways and dtype is torch.bfloat16:
        is_known = known.get(_BATCHES) in _WAYS_OF_BATCHES and _has_bfloat16()
        ways[_BATCHES] = known[_BATCHES] if is_known else _fastest_of_batches(generator)
    return ways


def _like(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with the shape and order of `matrix.to(dtype)`; without memory, if it is another."""
    return matrix if matrix.dtype is dtype else torch.empty_like(matrix, dtype=dtype, device="meta")


def _usual(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """The way where nothing was measured.

    In half precision, PyTorch's own writes the bias to the result first, in a pass of its own. In
    float32, it is MKL's: a tenth slower than oneDNN on AMD's processors; on Intel's about the same,
    where oneDNN takes up to 2.4 times as long with some transposed weights (5632 x 2048 is one).
    """
    if _is_emulated(x):
        return "float32"
    is_large = len(x) * weight.numel() >= _LARGE
    is_faster = bias is not None if x.dtype is torch.bfloat16 else not _is_intels()
    is_good = is_large and is_faster and _has_avx512() and _has_onednn(x.dtype)
    return "onednn" if is_good else "plain"


def _key(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """A kind of product, such as ``bfloat16 768 -> 3072 + bias``."""
    out, inputs = weight.shape
    ending = ("" if bias is None else " + bias") + ("" if weight.is_contiguous() else " transposed")
    ending += ", few rows" if len(x) <= _FEW else ""
    return f"{str(x.dtype).removeprefix('torch.')} {inputs} -> {out}{ending}"


def _fastest(x: Tensor, weight: Tensor, bias: Tensor | None, worth: Mapping[str, float]) -> str:
    """The way with the least median time, as a share of the plain one's in the same round.

    What a way costs otherwise counts as `worth` says: at most that share of the best so far.
    """
    ways = ["plain", "blocks"]
    if _has_onednn(x.dtype):
        ways += ["onednn"] if _owner(weight) is None else ["onednn", "packed"]
    if x.dtype is torch.bfloat16:
        ways += ["float32"]
    shares = _shares({way: _WAYS[way] for way in ways}, x, weight, bias)
    best, least = "plain", 1.0
    for way in sorted(ways[1:], key=list(_WAYS).index):
        if shares[way] < worth[way] * least:
            best, least = way, shares[way]
    owner = _owner(weight)
    if owner is not None and best != "packed":
        _packed_copies.pop(owner, None)
    return best


def _fastest_of_batches(generator: torch.Generator) -> str:
    """The way of `batched_product` in bfloat16."""
    if not _has_bfloat16():
        return "float32"
    x = torch.rand(_BATCH, generator=generator).bfloat16()
    shares = _shares(_WAYS_OF_BATCHES, x, x.transpose(1, 2), 0.1, torch.empty_like(x))
    return "float32" if shares["float32"] < _WORTH["float32"] else "plain"


def _shares(ways: Mapping[str, Callable], *given: Any) -> dict[str, float]:
    """The ways' times, each the median of its shares of the plain way's in the same round.

    A processor that others use as well may run at a third of its speed for a tenth of a second:
    only times that were taken together can be compared.
    """
    for way in ways.values():
        way(*given)
    rounds = [{name: _seconds(way, *given) for name, way in ways.items()} for _ in range(_ROUNDS)]
    return {
        name: statistics.median(seconds[name] / seconds["plain"] for seconds in rounds)
        for name in ways
    }


def _seconds(way: Callable, *given: Any) -> float:
    start = time.perf_counter()
    way(*given)
    return time.perf_counter() - start
