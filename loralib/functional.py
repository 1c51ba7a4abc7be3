r"""The low-rank update: how it is scaled, applied to inputs and merged into a weight.

    W'  =  W + s · B A            s = alpha / r      (section 4.1 of the paper, arXiv:2106.09685)

An update covers the whole output of a layer, or some equal slices of it, each with its own block.
The blocks are stacked. Here the slices are GPT-2's query, key and value, and the key has no update:

    A (r·e, in)                     B (width·e, r)                output of the layer
    .-----------------.             .-----.                       .---------------.
    |  A of slice 0   | r           | B 0 | width                 |    slice 0    |  += s · B0 A0 x
    |-----------------|             |-----|                       |---------------|
    |  A of slice 2   | r           | B 2 | width                 |    slice 1    |
    '-----------------'             '-----'                       |---------------|
                                                                  |    slice 2    |  += s · B2 A2 x
                                                                  '---------------'

Layers, merging, banks and conversions all compute with a `Delta`. A variant of the update is a
subclass, listed in `VARIANTS` under the name that layers and metadata use. It can scale
differently (`scale`), and multiply the rows of the result by a gain g (`gain`):

    W'  =  g ⊙ (W + s · B A)            h  =  g ⊙ (W x + s · B A x) + b
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .nn import products
from .nn.fast_paths import needs_public_operations
from .tensor_kinds import has_own_dispatch, is_sharded

_Own = TypeVar("_Own", bound="Delta")
_OwnDora = TypeVar("_OwnDora", bound="DoraDelta")


class Block(NamedTuple):
    """The low-rank product for one slice of a layer's output.

    Args:
        columns: the slice of the output.
        rows: the block's rows in the stacked A, which are its columns in x Aᵀ.
        A: (r, in).
        B: (width, r).
    """

    columns: slice
    rows: slice
    A: Tensor
    B: Tensor


@dataclass(frozen=True)
class Delta:
    """What LoRA adds to a weight of shape (out, in): s · B A.

    Args:
        A: (r·e, in), for e slices of the output.
        B: (width·e, r).
        scaling: s, as `scale` computes it.
        starts: the first output row of each updated slice.
        out_features: the size of the output, which only conversions of adapters read; 0 if unset.
    """

    A: Tensor
    B: Tensor
    scaling: float
    starts: tuple[int, ...] = (0,)
    out_features: int = 0

    @staticmethod
    def scale(alpha: float, rank: int) -> float:
        """Returns s = alpha / r, or 0 without an update (r = 0)."""
        return alpha / rank if rank > 0 else 0.0

    # Whether a layer has one more parameter, `lora_magnitude_vector`, for this variant.
    has_magnitude: ClassVar[bool] = False

    @property
    def in_features(self) -> int:
        """The size of the input."""
        return self.A.shape[1]

    @property
    def rank(self) -> int:
        """The rank r of each slice's update."""
        return self.B.shape[1]

    def blocks(self) -> Iterator[Block]:
        """Yields the blocks in the order in which they are stacked."""
        width, rank = len(self.B) // len(self.starts), self.rank
        if len(self.starts) == 1:  # no views, which take as long to make as to launch a product
            (start,) = self.starts
            yield Block(slice(start, start + width), slice(0, rank), self.A, self.B)
            return
        for index, start in enumerate(self.starts):
            rows = slice(index * rank, (index + 1) * rank)
            B = self.B[index * width : (index + 1) * width]
            yield Block(slice(start, start + width), rows, self.A[rows], B)

    def to(self: _Own, *args: Any, **kwargs: Any) -> _Own:
        """Returns the update on another device or in another dtype, called like `Tensor.to`."""
        return replace(self, A=self.A.to(*args, **kwargs), B=self.B.to(*args, **kwargs))

    def linear(
        self, x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Computes the adapted linear layer, x Wᵀ + b + s · (x Aᵀ) Bᵀ, in x's dtype.

        A and B may have another dtype. They are cast in the function that autograd records, which
        takes fewer operations, and so fewer launches on a GPU, than recording the casts as well.

        Args:
            x: (rows, in).
            dropped: x after dropout, the input of A; None if that is x itself.
            weight: (out, in), of x's dtype, frozen or not.
            bias: (out,), of x's dtype, if there is one.

        Returns:
            (rows, out).
        """
        given = (x, dropped, weight, bias, self.A, self.B)
        tensors = [tensor for tensor in given if tensor is not None]
        # A traced model with a custom autograd function cannot be saved.
        is_public = torch.jit.is_tracing() or needs_public_operations(*tensors)
        # Compared here because PyTorch 2.11 compiles no comparison of dynamic sizes in a function.
        is_whole = not is_public and len(self.starts) == 1 and len(self.B) == len(weight)
        # Slices of a sharded output may be copies.
        if is_public or (not is_whole and is_sharded(weight)):
            cast = self.to(x.dtype)
            z = F.linear(x if dropped is None else dropped, cast.A)
            return cast.expanded(F.linear(x, weight, bias), z)
        return _LowRankLinear.apply(
            x, dropped, weight, bias, self.A, self.B, self.scaling, self.starts, is_whole
        )

    def gain(self, weight: Tensor) -> Tensor | None:
        """Returns what multiplies the rows of the adapted weight, (out,), in float32 or wider.

        Args:
            weight: the frozen weight, (out, in).

        Returns:
            The gain; None if the update is only added, as here.
        """
        return None

    def with_gain(self, weight: Tensor) -> "Delta":
        """Returns the update with its gain computed once, for a frozen weight (out, in)."""
        return self

    def add_to(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Changes the frozen layer's output to the adapted layer's, in place.

        Args:
            out: (rows, out), the frozen layer's output for x.
            x: (rows, in), in the same dtype.
            weight: the frozen weight, (out, in).
            bias: the frozen layer's bias, if it has one.
        """
        self.expand_into(out, products.small_product(x, self.A))

    def expand_into(self, out: Tensor, z: Tensor) -> None:
        """Adds s · z Bᵀ to `out` in place, where z = x Aᵀ has shape (rows, r·e)."""
        for block in self.blocks():
            # A view of all columns would cost autograd a copy.
            part = out if len(block.B) == out.shape[1] else out[:, block.columns]
            products.add_product(part, _columns(z, block.rows), block.B.t(), self.scaling)

    def expanded(self, out: Tensor, z: Tensor) -> Tensor:
        """Returns `out` + s · z Bᵀ, not in place: vmap can fail if `out` itself is not batched."""
        for block in self.blocks():
            around = block.columns.start, out.shape[1] - block.columns.stop
            part = F.linear(_columns(z, block.rows) * self.scaling, block.B)
            out = out + (F.pad(part, around) if any(around) else part)
        return out

    def product(self) -> Tensor:
        """Returns s · B A, (out, in), for an update that covers the whole output."""
        return (self.scaling * self.B) @ self.A

    def merged(self, weight: Tensor) -> Tensor:
        """Returns W + s · B A, (out, in), for an update that covers the whole output."""
        return torch.addmm(weight, self.B, self.A, alpha=self.scaling)

    def merge_(self, weight: Tensor) -> Tensor:
        """Computes W += s · B A in place. The weight is (out, in), in the dtype of A and B."""
        for block in self.blocks():
            part = weight if len(block.B) == len(weight) else weight[block.columns]
            part.addmm_(block.B, block.A, alpha=self.scaling)
        return weight


@dataclass(frozen=True)
class DoraDelta(Delta):
    """DoRA: LoRA adapts the direction of each row of the weight, and m is the row's magnitude.

        W'  =  m ⊙ (W + s · B A) / ‖W + s · B A‖         norms of the rows, each over all inputs

    The norm is a constant in the backward pass, as in section 4.3 of the paper. It is computed
    from products with A and B, without the matrix B A. Dropout applies only to the input of A.

    Args:
        magnitude: m, (width·e,), in float32 or wider, whatever the dtype of A and B.
        known_gain: m / ‖W + s · B A‖, if `with_gain` has computed it.

    Source: "DoRA: Weight-Decomposed Low-Rank Adaptation" (Liu et al., 2024), arXiv:2402.09353,
    equation 5.
    """

    magnitude: Tensor | None = None
    known_gain: Tensor | None = None

    has_magnitude: ClassVar[bool] = True

    def to(self: _OwnDora, *args: Any, **kwargs: Any) -> _OwnDora:
        """As for `Delta`, but m and the gain keep their dtype: half precision is too coarse."""
        moved = super().to(*args, **kwargs)
        magnitude, gain = (
            None if tensor is None else tensor.to(moved.A.device)
            for tensor in (self.magnitude, self.known_gain)
        )
        return replace(moved, magnitude=magnitude, known_gain=gain)

    def gain(self, weight: Tensor) -> Tensor:
        """Returns m / ‖W + s · B A‖, (out,), with 1 for slices without an update."""
        if self.known_gain is not None:
            return self.known_gain
        assert self.magnitude is not None
        pieces, end = [], 0
        magnitudes = self.magnitude.chunk(len(self.starts))
        for block, magnitude in zip(self.blocks(), magnitudes, strict=True):
            norms = _row_norms(weight[block.columns], block, self.scaling)
            pieces += [norms.new_ones(block.columns.start - end), magnitude / norms]
            end = block.columns.stop
        return torch.cat([*pieces, norms.new_ones(len(weight) - end)])

    def with_gain(self, weight: Tensor) -> "DoraDelta":
        """As for `Delta`."""
        return replace(self, known_gain=self.gain(weight).detach())

    def linear(
        self, x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """As for `Delta`, with the output before the bias multiplied by the gain."""
        # The gain is computed first: after the product, torch.compile fails if s is dynamic.
        gain = self.gain(weight).to(x.dtype)
        out = super().linear(x, dropped, weight, None)
        return out * gain if bias is None else torch.addcmul(bias, out, gain)

    def add_to(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """As for `Delta`; `out` may have more columns, as where a bank has padded heads."""
        out = out[:, : len(weight)]
        if bias is not None:
            out.sub_(bias)
        super().add_to(out, x, weight, None)
        out.mul_(self.gain(weight).to(out.dtype))
        if bias is not None:
            out.add_(bias)

    def merged(self, weight: Tensor) -> Tensor:
        """Returns m ⊙ (W + s · B A) / ‖W + s · B A‖, as for `Delta`."""
        return super().merged(weight) * self.gain(weight).to(weight.dtype)[:, None]

    def merge_(self, weight: Tensor) -> Tensor:
        """Computes W = m ⊙ (W + s · B A) / ‖W + s · B A‖ in place."""
        gain = self.gain(weight)
        return super().merge_(weight).mul_(gain.to(weight.dtype)[:, None])


@torch.no_grad()
def _row_norms(weight: Tensor, block: Block, scaling: float) -> Tensor:
    """Returns ‖W + s · B A‖ of each row, (width,), in float32 or wider.

    ‖w + s · Aᵀ b‖² = ‖w‖² + 2 s · b (A w) + s² · b (A Aᵀ) b, for a row w of W and b of B. If B is
    zero, the result is the norm of W, bit-exact.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    # `no_grad` does not stop forward-mode derivatives, but detaching does.
    weight, own_A, own_B = weight.detach(), block.A.detach(), block.B.detach()
    A, B = own_A.to(wide), own_B.to(wide)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    with products.without_autocast(weight.device.type):
        across = products.small_product(weight, own_A.to(weight.dtype)).to(wide)
        across = torch.addmm(2 * scaling * across, B, A @ A.t(), alpha=scaling**2)
    return (squares + (across * B).sum(1)).clamp(min=0).sqrt()


class RankStabilizedDelta(Delta):
    """rsLoRA: s = alpha / √r, so that gradients keep their size at high ranks.

    Source: "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA" (Kalajdzievski, 2023),
    arXiv:2312.03732, theorem 3.2.
    """

    @staticmethod
    def scale(alpha: float, rank: int) -> float:
        """Returns s = alpha / √r, or 0 without an update (r = 0)."""
        return alpha / math.sqrt(rank) if rank > 0 else 0.0


class RankStabilizedDoraDelta(RankStabilizedDelta, DoraDelta):
    """DoRA with rsLoRA's scaling."""


def joined_with_start(
    A: Tensor, B: Tensor, A_start: Tensor, B_start: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Returns factors of B A − B_start A_start, of twice the rank, for `count` stacked blocks.

    Args:
        A, A_start: (r·count, in).
        B, B_start: (width·count, r).

    Returns:
        A of shape (2r·count, in) and B of shape (width·count, 2r).
    """
    pair = [part.unflatten(0, (count, -1)) for part in (A, A_start)]
    # Autocast to bfloat16 refuses to concatenate float16, and the other way round.
    with products.without_autocast(A.device.type):
        return torch.cat(pair, dim=1).flatten(0, 1), torch.cat([B, -B_start], dim=1)


VARIANTS: dict[str, type[Delta]] = {
    "lora": Delta,
    "rslora": RankStabilizedDelta,
    "dora": DoraDelta,
    "rslora+dora": RankStabilizedDoraDelta,
}


def variant_of(name: str) -> type[Delta]:
    """Returns the variant of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in tuple(VARIANTS):  # a tuple, as the name may be an unhashable value
        raise ValueError(f"unknown variant '{name}' of LoRA (known: {', '.join(VARIANTS)})")
    return VARIANTS[name]


@torch.no_grad()
def merge(weight: Tensor, delta: Delta, as_matrix: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a copy of a weight with a low-rank update merged into it.

    The sum is computed in float32 or wider, and rounded once. On a GPU where PyTorch may compute
    float32 products in TensorFloat-32, B A is computed so, as it is in training there.

    Args:
        weight: the weight, of any shape, which is not changed.
        delta: the update, on any device and in any dtype.
        as_matrix: views a tensor of the weight's shape as (out, in).

    Returns:
        A new tensor of the weight's shape and dtype.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = weight.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
    delta.to(weight.device, wide).merge_(as_matrix(total))
    return total.to(weight.dtype)


class _LowRankLinear(torch.autograd.Function):
    """The autograd function of `Delta.linear`, whose docstring explains the arguments.

    It is written by hand because autograd copies the whole gradient for every sum into a slice, and
    holds both branches' full-size gradients of x before it adds them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        scaling: float,
        starts: tuple[int, ...],
        is_whole: bool,
    ) -> Tensor:
        update = _scaled(A, B, scaling, starts, x.dtype)
        out = products.product(x, weight, bias)
        z = products.small_product(x if dropped is None else dropped, update.A)
        is_compiling = torch.compiler.is_compiling()
        if is_compiling:
            # What PyTorch 2.11 compiles has no gradients if a function writes to its own output.
            out = _added(out, z, update, is_whole)
        else:
            update.expand_into(out, z)
        # With A frozen (LoRA-FA), the input of A need not be saved.
        of_A, of_weight = ctx.needs_input_grad[4], ctx.needs_input_grad[2]
        pairs = ((update.A, A), (update.B, B))
        ctx.save_for_backward(
            x if of_weight or (of_A and dropped is None) else None,
            dropped if of_A else None,
            *(weight, A, B, z),
            # Saved like the others, so that checkpoints and hooks do not leave them in memory.
            *(None if is_compiling or new is given else new for new, given in pairs),
        )
        ctx.has_dropped, ctx.has_update = dropped is not None, not is_compiling
        ctx.scaling, ctx.starts, ctx.dtype = scaling, starts, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The forward may have been computed outside of the autocast that is on now.
        with products.without_autocast(grad.device.type):
            return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the inputs of `_LowRankLinear`, for that of its output."""
    x, dropped, weight, A, B, z, new_A, new_B = ctx.saved_tensors
    needs, is_recorded = ctx.needs_input_grad, torch.is_grad_enabled()
    if ctx.has_update and not is_recorded:
        factors = A if new_A is None else new_A, B if new_B is None else new_B
        update = Delta(*factors, 1.0, ctx.starts)
    else:
        update = _scaled(A, B, ctx.scaling, ctx.starts, ctx.dtype)
    blocks = list(update.blocks())
    lora_input = dropped if ctx.has_dropped else x
    is_z_fixed = not (needs[4] or needs[1 if ctx.has_dropped else 0])
    # In a double backward, z has to depend on its inputs.
    if needs[5] and is_recorded and not is_z_fixed:
        if lora_input is None:
            raise RuntimeError(
                "second derivatives cannot be computed while lora_A is frozen: train it as well"
            )
        z = F.linear(lora_input, update.A)
    grad_z = _joined(
        [
            products.small_product(_columns(grad, block.columns), products.laid_out(block.B.t()))
            for block in blocks
        ],
        dim=1,
    )
    grad_x = grad_dropped = grad_weight = grad_bias = grad_A = grad_B = None
    if needs[0]:
        grad_x = products.product(grad, weight.t())
        if not ctx.has_dropped:
            products.add_product(grad_x, grad_z, update.A, 1.0)
    if needs[1]:
        grad_dropped = products.small_product(grad_z, update.A.t())
    if needs[2]:
        grad_weight = products.gradient_of_weight(grad, x, not weight.is_contiguous())
    if needs[3]:
        grad_bias = grad.sum(0)
    if needs[4]:
        wide = torch.promote_types(A.dtype, ctx.dtype)
        grad_A = products.gradient_of_factor(grad_z, lora_input, wide)
        grad_A = _times(grad_A, ctx.scaling).to(A.dtype)
    if needs[5]:
        parts = [
            products.gradient_of_factor(
                _columns(grad, block.columns), _columns(z, block.rows), B.dtype
            )
            for block in blocks
        ]
        grad_B = _joined(parts, dim=0)
    return grad_x, grad_dropped, grad_weight, grad_bias, grad_A, grad_B, None, None, None


def _scaled(
    A: Tensor, B: Tensor, scaling: float, starts: tuple[int, ...], dtype: torch.dtype
) -> Delta:
    """Returns an update in a dtype with s multiplied into A, so that z = x Aᵀ is already scaled.

    The gradient of B needs it so, and A has far fewer elements than z.
    """
    if torch.promote_types(A.dtype, dtype) is not A.dtype:  # s · A is not rounded to A's dtype
        return Delta(_times(A.to(dtype), scaling), B.to(dtype), 1.0, starts)
    is_cast = A.dtype is not dtype
    is_recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if is_cast and not (is_recorded or is_sharded(A) or has_own_dispatch(A)):
        # One operation: on a GPU, each takes longer to launch than to compute.
        scaled = torch.mul(A, scaling, out=torch.empty_like(A, dtype=dtype))
    else:
        scaled = _times(A, scaling).to(dtype)
    return Delta(scaled, B.to(dtype), 1.0, starts)


def _times(x: Tensor, factor: float) -> Tensor:
    """Returns x · factor; x itself if that is 1. (In compiled graphs, factors may be dynamic.)"""
    return x * factor if torch.compiler.is_compiling() or factor != 1 else x


def _added(out: Tensor, z: Tensor, update: Delta, is_whole: bool) -> Tensor:
    """Returns what `expand_into` would make of `out`, with the same rounding, if s = 1.

    Args:
        out, z, update: as of `expand_into`.
        is_whole: whether the update covers the whole output.
    """
    if is_whole:
        return torch.addmm(out, z, update.B.t())
    pieces, end = [], 0
    for block in update.blocks():
        part = torch.addmm(out[:, block.columns], z[:, block.rows], block.B.t())
        pieces += [out[:, end : block.columns.start], part]
        end = block.columns.stop
    return torch.cat([*pieces, out[:, end:]], dim=1)


def _columns(tensor: Tensor, part: slice) -> Tensor:
    """Returns some columns; for all of them no view, as some transforms have no rule for it."""
    return tensor if part == slice(0, tensor.shape[1]) else tensor[:, part]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenates like `torch.cat`, but copies nothing if there is only one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
