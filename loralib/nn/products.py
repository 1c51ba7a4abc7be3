"""Computes x Wᵀ + b of large matrices by the fastest method that PyTorch has on this processor.

On a CPU there are several methods (linear_methods.py). Which one is the fastest depends on the
processor, the shape and the dtype: on AMD's processors, for instance, MKL's kernels for float32
take 1.1 to 2.2 times as long as oneDNN's, and on Intel's with AMX, weights in oneDNN's own layout
are multiplied twice as fast.

bfloat16 is not faster everywhere. On processors without instructions for it, PyTorch's products
were seen to take 12 times as long as in float32, and 190 times with a transposed weight. On some of
Intel's that have AVX-512's bfloat16 instructions, but not AMX, they take 1.7 times as long.

Without a measurement, "onednn" is used where it is known to be fast, and "float32" for bfloat16 on
a processor without instructions for it. Training scripts, evaluation and beam search measure all
methods on their frozen weights before they begin (`measure`), with about as many rows as they will
have: with few rows, most of the time is spent on converting the weight to another layout. Methods
add in different orders, and so differ in rounding. A run therefore uses choices for its own weights
only, keeps them in its checkpoints, and resumes with them (`choices`, `use_choices`). Nothing is
measured for trained weights.
"""

import functools
import logging
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import processor
from .fast_paths import are_eager_paths_on, are_fast_paths_off, is_transformed
from .linear_methods import METHODS, METHODS_OF_BATCHES, drop_copies, frozen_owner, in_float32

logger = logging.getLogger(__name__)

_PLAIN = {Tensor, nn.Parameter}

# ---- products that autograd records ----


def has_autocast(device: str) -> bool:
    """Returns whether autocast supports a device type; asking it about others may raise an error.

    One that it does not support is "meta".
    """
    # PyTorch 2.9's function breaks a compiled graph, and nothing is compiled for other devices.
    return torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Returns a context without autocast, in which products have the dtype of their operands."""
    if has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a matrix product with x: autocast's if it is on, else x's own.

    Raises:
        TypeError: x has an integer dtype, to which weights would be rounded.
    """
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"a layer received {x.dtype} input: convert it to floating point, as by x.float()"
        )
    device = x.device.type
    if has_autocast(device) and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def check_dense(x: Tensor) -> None:
    """Checks that x is neither nested nor sparse.

    Raises:
        TypeError: x is nested or sparse.
    """
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(
            "a layer with LoRA received a nested or sparse tensor: convert it, as by "
            "to_padded_tensor(0.0) or to_dense(), or set use_nested_tensor = False in the "
            "nn.TransformerEncoder that made it"
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear`, up to rounding, by a faster method on a CPU if there is one.

    There is one for frozen weights, and for trained weights where PyTorch's own product is known to
    be slow: in emulated bfloat16, and in float32 on AMD's processors.

    Args:
        x: (…, in).
        weight: (out, in).
        bias: (out,); it may be trained.

    Returns:
        (…, out), in x's dtype or autocast's.
    """
    if not _is_ordinary(x, weight, bias):
        return F.linear(x, weight, bias)
    dtype = product_dtype(x)
    is_cast = torch.is_autocast_enabled("cpu")
    is_trained = weight.requires_grad and torch.is_grad_enabled()
    if is_trained and not (
        _is_slow_in_float32(x, weight, bias) or _is_emulated_with(weight, dtype, is_cast)
    ):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    cast_bias = None if bias is None else bias.to(dtype)
    compute = _Linear.apply if torch.is_grad_enabled() else product
    out = compute(rows, weight.to(dtype), cast_bias)
    return out.view(*x.shape[:-1], len(weight))


def _is_emulated_with(weight: Tensor, dtype: torch.dtype, is_cast: bool) -> bool:
    is_emulated = dtype is torch.bfloat16 and not processor.has_bfloat16()
    return is_emulated and (is_cast or weight.dtype is dtype)


def _is_slow_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether PyTorch's product is known to be slow, and the tensors are plain matrices.

    `F.linear` accepts more than these.
    """
    is_float32 = x.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    if not is_float32 or not _is_onednn_faster() or weight.dtype is not x.dtype:
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not x.dtype):
        return False
    are_strided = x.layout is weight.layout is torch.strided and not x.is_nested
    return are_strided and weight.dim() == 2 and x.numel() > 0


class Linear(nn.Linear):
    """`nn.Linear`, up to rounding, computed by `linear`: faster while its weight is frozen."""

    @property
    def matrix(self) -> Tensor:
        """The weight, (out, in)."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) -> (…, out_features)."""
        return linear(x, self.weight, self.bias)


def use_products(model: nn.Module) -> None:
    """Replaces a model's plain `nn.Linear` layers by `Linear`, with the same parameters."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                has_bias = child.bias is not None
                layer = Linear(child.in_features, child.out_features, has_bias, device="meta")
                layer.weight, layer.bias = child.weight, child.bias
                setattr(module, name, layer.train(child.training))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Computes a @ b, up to rounding; recorded by autograd.

    Args:
        a: (…, n, k).
        b: (…, k, m).

    Returns:
        (…, n, m), in a's dtype or autocast's.
    """
    dtype = product_dtype(a)
    if not _is_ordinary(a, b) or _method_of_batches(dtype) == "plain":
        return a @ b
    return _wide_matmul(a.to(dtype), b.to(dtype)).to(dtype)


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Computes a @ b in float32, regardless of autocast."""
    with torch.autocast("cpu", enabled=False):
        return a.float() @ b.float()


class _Linear(torch.autograd.Function):
    """`linear` of (rows, in), all of one dtype; saves the input only if the weight is trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.is_transposed = not weight.is_contiguous()
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_x = product(grad, weight.t()) if of_x else None
        grad_weight = gradient_of_weight(grad, x, ctx.is_transposed) if of_weight else None
        return grad_x, grad_weight, grad.sum(0) if of_bias else None


# ---- products outside of autograd ----

# The number of multiplications from which a choice pays. For each new number of rows, oneDNN first
# compiles a kernel, which takes about a millisecond in float32 and more in bfloat16. row_buckets.py
# keeps these numbers few, but each costs that once. Smaller products use F.linear, whatever was
# measured with more rows: a 768 x 768 weight has a choice from 456 rows on.
_LARGE = 2**28
# Products of at most this many rows are measured separately. Beam search has them, with the same
# number of rows for many steps, and so does a head that computes some of a batch's rows at a time.
_FEW = 256
_LARGE_OF_FEW = 2**24


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear` of matrices, up to rounding; by a chosen method if gradients are off.

    Args:
        x: (rows, in).
        weight: (out, in), of the same dtype.
        bias: (out,), of the same dtype.

    Returns:
        (rows, out).
    """
    if not _is_ordinary(x, weight, bias) or not _has_methods(x, weight):
        return small_product(x, weight, bias)
    method = _chosen.get(_key(x, weight, bias)) or _usual(x, weight, bias)
    return METHODS[method](x, weight, bias)


def _is_ordinary(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Returns whether fast methods are on and support these tensors.

    These are on a CPU, not nested, of no subclass, not part of a compiled or traced graph, and
    without a forward derivative, which the methods would lose.
    """
    is_plain = x.device.type == "cpu" and not x.is_nested and {type(x), type(weight)} <= _PLAIN
    return is_plain and are_eager_paths_on(*((x, weight) if bias is None else (x, weight, bias)))


def small_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `product` without a choice of methods: for few rows, or with a thin matrix."""
    is_ordinary = x.dtype is torch.bfloat16 and _is_ordinary(x, weight, bias)
    if not is_ordinary or not processor.is_emulated(x):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return in_float32(x, weight, bias)
    wide = _wide_matmul(x, weight.t())
    return (wide if bias is None else wide + bias).to(x.dtype)


def gradient_of_weight(grad: Tensor, x: Tensor, is_transposed: bool = False) -> Tensor:
    """Computes gradᵀ x, up to rounding: the gradient of W if x Wᵀ has the gradient `grad`.

    Args:
        grad: (rows, out).
        x: (rows, in), of the same dtype.
        is_transposed: whether W is transposed in memory. The result then is as well, because
            autograd would copy it otherwise.

    Returns:
        (out, in).
    """
    if is_transposed:
        return gradient_of_weight(x, grad).t()
    a, b = grad.t(), x.t()
    if grad.is_contiguous() and x.is_contiguous() and _is_ordinary(a, b) and _is_for_methods(a, b):
        return METHODS[_usual(a, b, None)](a, b, None)
    return small_product(a, b)


def gradient_of_factor(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes gradᵀ x, up to rounding: the gradient of a factor of LoRA, if x is multiplied by it.

    On CPUs, it takes half the time or less with the thinner matrix as the first of the product.

    Args:
        grad: (rows, out).
        x: (rows, in), of the same dtype.
        dtype: the factor's. In float32, a GPU's result is never rounded to half precision.

    Returns:
        (out, in).
    """
    if grad.device.type == "cpu":
        if grad.shape[1] > x.shape[1]:
            return gradient_of_factor(x, grad, dtype).t()
        return small_product(grad.t(), x.t()).to(dtype)
    if dtype is torch.float32 and _has_wide_result(grad):
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return torch.mm(grad.t(), x).to(dtype)


def _has_wide_result(x: Tensor) -> bool:
    """Returns whether a product with x can have a result in float32, by one operation.

    NVIDIA's GPUs have it for half precision. Autograd, sharded tensors, PyTorch's transforms and
    some compiled graphs do not support it.
    """
    if not x.is_cuda or torch.version.hip is not None or hasattr(x, "full_tensor"):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed(x):
        return False
    if x.dtype is torch.bfloat16:
        return _has_wide_bfloat16(x.device)
    is_summed_in_half = torch.backends.cuda.matmul.allow_fp16_accumulation
    return x.dtype is torch.float16 and not is_summed_in_half


@functools.cache
def _has_wide_bfloat16(device: torch.device) -> bool:
    """Returns whether a GPU has such products in bfloat16; older ones have only narrow ones."""
    return torch.cuda.get_device_properties(device).major >= 8


def laid_out(weight: Tensor) -> Tensor:
    """Returns a thin matrix in the layout in which CPUs multiply fastest; else as it is."""
    return weight.contiguous() if weight.device.type == "cpu" else weight


def add_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Computes out += scale · a b, in place; recorded by autograd.

    Args:
        out: (n, m).
        a: (n, k), of the same dtype.
        b: (k, m), of the same dtype.
        scale: what the product is multiplied by. It has no default, because torch.compile would
            treat that as an input of the graph.
    """
    if a.dtype is torch.bfloat16 and _is_ordinary(a, b) and processor.is_emulated(a):
        out.add_(_wide_matmul(a, b), alpha=scale)
    else:
        out.addmm_(a, b, alpha=scale)


def batched_product(a: Tensor, b: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Computes scale · a b of batches of matrices in one call; not recorded by autograd.

    The result has the factors' dtype, regardless of autocast.

    Args:
        a: (matrices, n, k), on a CPU.
        b: (matrices, k, m), of the same dtype.
        scale: what the result is multiplied by.
        out: (matrices, n, m), where the result is written; by default new memory.

    Returns:
        (matrices, n, m).
    """
    if out is None:
        out = a.new_empty(*a.shape[:2], b.shape[2])
    return METHODS_OF_BATCHES[_method_of_batches(a.dtype)](a, b, scale, out)


def _method_of_batches(dtype: torch.dtype) -> str:
    if dtype is not torch.bfloat16 or are_fast_paths_off():
        return "plain"
    return _chosen.get(_BATCHES) or ("plain" if processor.has_bfloat16() else "float32")


def _has_methods(x: Tensor, weight: Tensor) -> bool:
    """Returns whether there is a choice of methods for this product of a layer."""
    return x.is_contiguous() and _is_for_methods(x, weight)


def _is_for_methods(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the product is large enough for a choice, and of a supported kind."""
    return (
        x.dtype in (torch.float32, torch.bfloat16)
        and len(x) * weight.numel() >= (_LARGE_OF_FEW if len(x) <= _FEW else _LARGE)
        and not torch.is_grad_enabled()
        and bool(torch.backends.mkldnn.enabled)
    )


# ---- the choice ----

MANY_ROWS = 1024
_ROUNDS = 5
# The share of the best time so far below which a method is preferred, in view of its other costs.
_WORTH = {"onednn": 0.97, "blocks": 0.95, "packed": 0.85, "float32": 0.9}
# If only some of a batch's rows are multiplied with a weight, such as the targets with a head, its
# copy takes as much memory as any other's, but saves less of a step's time.
_WORTH_FOR_SOME_ROWS = {**_WORTH, "packed": 0.65}

_chosen: dict[str, str] = {}
# The key of `batched_product`, and the shape of the matrices that it is measured with, which is
# typical of attention.
_BATCHES = "bfloat16 in batches"
_BATCH = 96, 64, 64


def machine() -> str:
    """Returns what a choice depends on besides the product, from processor to methods."""
    threads = torch.get_num_threads()
    count = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{processor.name()}, torch {torch.__version__}, {count}, methods: {' '.join(METHODS)}"


def choices() -> dict[str, Any]:
    """Returns the methods in use and the machine on which they were chosen, as strings."""
    return {"machine": machine(), "methods": dict(_chosen)}


def use_choices(state: Mapping[str, Any]) -> None:
    """Replaces the current choices by those of `state`, unless they are another machine's."""
    if state["machine"] == machine():
        _chosen.clear()
        _chosen.update(
            {key: method for key, method in state["methods"].items() if method in _methods_of(key)}
        )


def is_slow_in_bfloat16(methods: Mapping[str, str]) -> bool:
    """Returns whether float32 is faster in most of the products that have a choice."""
    found = [method for key, method in methods.items() if key != _BATCHES]
    return 2 * found.count("float32") > len(found)


def _methods_of(key: str) -> Collection[str]:
    """Returns the methods that exist for a kind of product."""
    return METHODS_OF_BATCHES if key == _BATCHES else METHODS


class FrozenWeight(NamedTuple):
    """A weight that products are measured with.

    Args:
        matrix: (out, in), a parameter or a view of one ("packed" supports nothing else).
        bias: its layer's.
        rows_at_once: returns, for a dtype, the most rows that are multiplied with it at once; None
            if its layer does not limit them.
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
    """Returns the fastest methods for products with these weights, by kind of product.

    Each kind that is not known takes a third of a second, and longer if it is large.

    Args:
        weights: frozen ones.
        dtype: what products are computed in.
        known: methods that need not be measured, by kind of product.
        rows: about how many rows will be multiplied at once.
        backward: whether to measure products with the weights' transposes as well.
    """
    # A generator of its own, so that measuring does not change the run's random numbers.
    generator = torch.Generator().manual_seed(0)
    methods: dict[str, str] = {}
    for weight, bias, rows_at_once in weights:
        count = min(rows, rows_at_once(dtype)) if rows_at_once else rows
        worth = _WORTH_FOR_SOME_ROWS if rows_at_once else _WORTH
        for matrix, added in (
            ((weight, bias), (weight.t(), None)) if backward else ((weight, bias),)
        ):
            # Empty at first: most kinds occur in every layer, and need no values the second time.
            x, cast = torch.empty(count, matrix.shape[1], dtype=dtype), _like(matrix, dtype)
            if not _is_ordinary(x, matrix) or not _has_methods(x, cast):
                continue
            key = _key(x, cast, added)
            if key in methods:
                continue
            if processor.is_emulated(x):  # other methods may take a hundred times as long
                methods[key] = "float32"
            elif known.get(key) in METHODS:
                methods[key] = known[key]
            else:
                if methods.keys() <= known.keys():  # before the first one that is measured
                    logger.info("measuring the fastest way to multiply, once for these sizes")
                x = torch.rand(x.shape, generator=generator).to(dtype)
                own = None if added is None else added.to(dtype)
                methods[key] = _fastest(x, matrix.to(dtype), own, worth)
    if methods and dtype is torch.bfloat16:
        is_known = known.get(_BATCHES) in METHODS_OF_BATCHES and processor.has_bfloat16()
        methods[_BATCHES] = known[_BATCHES] if is_known else _fastest_of_batches(generator)
    return methods


def _like(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a stand-in for `matrix.to(dtype)`: the matrix itself, or a tensor without memory.

    It has the same shape, dtype and order in memory.
    """
    return matrix if matrix.dtype is dtype else torch.empty_like(matrix, dtype=dtype, device="meta")


def _usual(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Returns the method to use if nothing was measured.

    In half precision, oneDNN is only better with a bias, which PyTorch's own product writes to the
    result first, in a separate pass.
    """
    if processor.is_emulated(x):
        return "float32"
    if len(x) * weight.numel() < _LARGE:
        return "plain"
    if x.dtype is torch.float32:
        return "onednn" if _is_onednn_faster() else "plain"
    is_good = bias is not None and processor.has_avx512() and processor.has_onednn(x.dtype)
    return "onednn" if is_good else "plain"


def _is_onednn_faster() -> bool:
    """Returns whether oneDNN is known to be faster in float32 than MKL, PyTorch's own choice.

    On the two AMD processors with AVX-512 that were measured, MKL takes 1.1 and 2.2 times as long.
    On one with only AVX2, oneDNN takes up to 1.3 times as long. On Intel's they take about the same
    time, but with some transposed weights (5632 x 2048 is one) oneDNN takes up to 2.4 times.
    """
    return (
        not processor.is_intel() and processor.has_avx512() and processor.has_onednn(torch.float32)
    )


def _key(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Returns the kind of a product, such as ``bfloat16 768 -> 3072 + bias``."""
    out, inputs = weight.shape
    ending = ("" if bias is None else " + bias") + ("" if weight.is_contiguous() else " transposed")
    ending += ", few rows" if len(x) <= _FEW else ""
    return f"{str(x.dtype).removeprefix('torch.')} {inputs} -> {out}{ending}"


def _fastest(x: Tensor, weight: Tensor, bias: Tensor | None, worth: Mapping[str, float]) -> str:
    """Measures the methods, and returns the fastest by `_shares`.

    A method replaces the best so far only if its time is below `worth` times that one's.
    """
    methods = ["plain", "blocks"]
    if processor.has_onednn(x.dtype):
        methods += ["onednn"] if frozen_owner(weight) is None else ["onednn", "packed"]
    if x.dtype is torch.bfloat16:
        methods += ["float32"]
    shares = _shares({method: METHODS[method] for method in methods}, x, weight, bias)
    best, least = "plain", 1.0
    for method in sorted(methods[1:], key=list(METHODS).index):
        if shares[method] < worth[method] * least:
            best, least = method, shares[method]
    owner = frozen_owner(weight)
    if owner is not None and best != "packed":
        drop_copies(owner)
    return best


def _fastest_of_batches(generator: torch.Generator) -> str:
    """Returns the faster method of `batched_product` in bfloat16."""
    if not processor.has_bfloat16():
        return "float32"
    x = torch.rand(_BATCH, generator=generator).bfloat16()
    shares = _shares(METHODS_OF_BATCHES, x, x.transpose(1, 2), 0.1, torch.empty_like(x))
    return "float32" if shares["float32"] < _WORTH["float32"] else "plain"


def _shares(methods: Mapping[str, Callable], *given: Any) -> dict[str, float]:
    """Returns each method's time relative to the plain method's in the same round, as a median.

    A shared processor may run at a third of its speed for a tenth of a second, so only times from
    the same round can be compared.
    """
    for method in methods.values():
        method(*given)
    rounds = [
        {name: _seconds(method, *given) for name, method in methods.items()} for _ in range(_ROUNDS)
    ]
    return {
        name: statistics.median(seconds[name] / seconds["plain"] for seconds in rounds)
        for name in methods
    }


def _seconds(method: Callable, *given: Any) -> float:
    start = time.perf_counter()
    method(*given)
    return time.perf_counter() - start
