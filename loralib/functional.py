r"""The low-rank update, once: how it is scaled, applied to inputs and merged into a weight.

    W'  =  W + s · B A            s = alpha / r      (section 4.1 of the paper, arXiv:2106.09685)

It can reach the whole output of a layer, or equal slices of it, each with a block of its own. The
blocks are stacked (GPT-2's query, key and value, of which query and value are adapted):

    A (r·e, in)                     B (width·e, r)                output of the layer
    .-----------------.             .-----.                       .---------------.
    |  A of slice 0   | r           | B 0 | width                 |    slice 0    |  += s · B0 A0 x
    |-----------------|             |-----|                       |---------------|
    |  A of slice 2   | r           | B 2 | width                 |    slice 1    |
    '-----------------'             '-----'                       |---------------|
                                                                  |    slice 2    |  += s · B2 A2 x
                                                                  '---------------'

Layers, merging, banks and conversions all ask a `Delta` for what they compute. A variant of the
update is a subclass with a name in `VARIANTS`, by which layers and metadata know it. It can scale
differently (`scale`), and multiply the rows of the result by a gain g of its own (`gain`):

    W'  =  g ⊙ (W + s · B A)            h  =  g ⊙ (W x + s · B A x) + b
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .nn import products
from .nn.fast_paths import needs_public_operations

_Own = TypeVar("_Own", bound="Delta")
_OwnDora = TypeVar("_OwnDora", bound="DoraDelta")


class Block(NamedTuple):
    """The low-rank product that reaches one slice of a layer's output.

    Args:
        columns: the slice of the output.
        rows: its rows of the stacked A, which are its columns of A x.
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
        starts: the first row of each slice of the output.
        out_features: the size of the output; by default what the slices cover from 0 on.
    """

    A: Tensor
    B: Tensor
    scaling: float
    starts: tuple[int, ...] = (0,)
    out_features: int = 0

    @staticmethod
    def scale(alpha: float, rank: int) -> float:
        """s = alpha / r; 0 without an update."""
        return alpha / rank if rank > 0 else 0.0

    # Whether a layer has one more parameter, `lora_magnitude_vector`, for this variant.
    has_magnitude: ClassVar[bool] = False

    @property
    def in_features(self) -> int:
        """The size of the input."""
        return self.A.shape[1]

    @property
    def rank(self) -> int:
        """r, that of each slice."""
        return self.B.shape[1]

    def blocks(self) -> Iterator[Block]:
        """The blocks, in the order in which they are stacked."""
        width, rank = len(self.B) // len(self.starts), self.rank
        for index, start in enumerate(self.starts):
            rows = slice(index * rank, (index + 1) * rank)
            B = self.B[index * width : (index + 1) * width]
            yield Block(slice(start, start + width), rows, self.A[rows], B)

    def to(self: _Own, *args: Any, **kwargs: Any) -> _Own:
        """The same on another device or in another dtype; arguments as for `Tensor.to`."""
        return replace(self, A=self.A.to(*args, **kwargs), B=self.B.to(*args, **kwargs))

    def linear(
        self, x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The adapted linear layer: x Wᵀ + b + s · (x Aᵀ) Bᵀ. All tensors are of one dtype.

        Args:
            x: (rows, in).
            dropped: x after dropout, the input of A; None where that is x.
            weight: (out, in), frozen or not.
            bias: (out,), if there is one.

        Returns:
            (rows, out).
        """
        given = (x, dropped, weight, bias, self.A, self.B)
        tensors = [tensor for tensor in given if tensor is not None]
        # A traced autograd function cannot be saved.
        if torch.jit.is_tracing() or needs_public_operations(*tensors):
            z = F.linear(x if dropped is None else dropped, self.A)
            return self.expanded(F.linear(x, weight, bias), z)
        return _LowRankLinear.apply(
            x, dropped, weight, bias, self.A, self.B, self.scaling, self.starts
        )

    def gain(self, weight: Tensor) -> Tensor | None:
        """What the rows of the adapted weight are multiplied by, (out,), in float32 or wider.

        Args:
            weight: the frozen one, (out, in).

        Returns:
            None where the update is only added.
        """
        return None

    def with_gain(self, weight: Tensor) -> "Delta":
        """The same with the gain computed once, for a frozen weight of shape (out, in)."""
        return self

    def add_to(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Changes the frozen layer's result into the adapted one's, in place.

        Args:
            out: (rows, out), what the frozen layer gives for x.
            x: (rows, in), of the same dtype.
            weight: the frozen one, (out, in).
            bias: the frozen layer's, if it has one.
        """
        self.expand_into(out, products.small_product(x, self.A))

    def expand_into(self, out: Tensor, z: Tensor) -> None:
        """out += s · z Bᵀ, in place; z = x Aᵀ, (rows, r·e)."""
        for block in self.blocks():
            # A view of all columns would cost autograd a copy.
            part = out if len(block.B) == out.shape[1] else out[:, block.columns]
            products.add_product(part, z[:, block.rows], block.B.t(), self.scaling)

    def expanded(self, out: Tensor, z: Tensor) -> Tensor:
        """`expand_into` for `torch.func`, whose vmap has no rules for what is in place."""
        for block in self.blocks():
            around = block.columns.start, out.shape[1] - block.columns.stop
            part = F.linear(z[:, block.rows] * self.scaling, block.B)
            out = out + (F.pad(part, around) if any(around) else part)
        return out

    def product(self) -> Tensor:
        """s · B A, (out, in), of an update that reaches the whole output."""
        return (self.scaling * self.B) @ self.A

    def merged(self, weight: Tensor) -> Tensor:
        """W + s · B A, (out, in), of an update that reaches the whole output."""
        return torch.addmm(weight, self.B, self.A, alpha=self.scaling)

    def merge_(self, weight: Tensor) -> Tensor:
        """W += s · B A, in place; weight (out, in), of the same dtype."""
        for block in self.blocks():
            part = weight if len(block.B) == len(weight) else weight[block.columns]
            part.addmm_(block.B, block.A, alpha=self.scaling)
        return weight


@dataclass(frozen=True)
class DoraDelta(Delta):
    """DoRA: the weight's rows keep a direction, which is adapted, and a magnitude m of their own.

        W'  =  m ⊙ (W + s · B A) / ‖W + s · B A‖         norms of the rows, each over all inputs

    The norm is a constant in the backward pass, as in section 4.3 of the paper. It is computed from
    products with A and B alone, without the matrix B A. Dropout is on the input of A alone.

    Args:
        magnitude: m, (width·e,), in float32 or wider whatever the dtype of A and B.
        known_gain: m / ‖W + s · B A‖, where `with_gain` has computed it.

    Source: "DoRA: Weight-Decomposed Low-Rank Adaptation" (Liu et al., 2024), arXiv:2402.09353,
    equation 5.
    """

    magnitude: Tensor | None = None
    known_gain: Tensor | None = None

    has_magnitude: ClassVar[bool] = True

    def to(self: _OwnDora, *args: Any, **kwargs: Any) -> _OwnDora:
        """As for `Delta`; magnitudes keep their dtype: half precision would be too coarse."""
        moved = super().to(*args, **kwargs)
        magnitude, gain = (
            None if tensor is None else tensor.to(moved.A.device)
            for tensor in (self.magnitude, self.known_gain)
        )
        return replace(moved, magnitude=magnitude, known_gain=gain)

    def gain(self, weight: Tensor) -> Tensor:
        """m / ‖W + s · B A‖, (out,); 1 for slices without an update."""
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
        """As for `Delta`, with the rows of the sum multiplied by the gain."""
        # The gain comes first: after the product, PyTorch's compiler fails where s is dynamic.
        gain = self.gain(weight).to(x.dtype)
        out = super().linear(x, dropped, weight, None)
        return out * gain if bias is None else torch.addcmul(bias, out, gain)

    def add_to(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """As for `Delta`."""
        if bias is not None:
            out.sub_(bias)
        super().add_to(out, x, weight, None)
        out.mul_(self.gain(weight).to(out.dtype))
        if bias is not None:
            out.add_(bias)

    def merged(self, weight: Tensor) -> Tensor:
        """m ⊙ (W + s · B A) / ‖W + s · B A‖, as for `Delta`."""
        return super().merged(weight) * self.gain(weight).to(weight.dtype)[:, None]

    def merge_(self, weight: Tensor) -> Tensor:
        """W = m ⊙ (W + s · B A) / ‖W + s · B A‖, in place."""
        gain = self.gain(weight)
        return super().merge_(weight).mul_(gain.to(weight.dtype)[:, None])


@torch.no_grad()
def _row_norms(weight: Tensor, block: Block, scaling: float) -> Tensor:
    """‖W + s · B A‖ of each row, in float32 or wider: (width,).

    ‖w + s · A b‖² = ‖w‖² + 2 s · b (A w) + s² · b (A Aᵀ) b, for a row w of W and b of B. Where B is
    zero it is the norm of W to the bit.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    # Forward-mode derivatives go past `no_grad`, and end where a tensor is detached.
    weight, own_A, own_B = weight.detach(), block.A.detach(), block.B.detach()
    A, B = own_A.to(wide), own_B.to(wide)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    with without_autocast(weight.device.type):
        across = products.small_product(weight, own_A.to(weight.dtype)).to(wide)
        across = torch.addmm(2 * scaling * across, B, A @ A.t(), alpha=scaling**2)
    return (squares + (across * B).sum(1)).clamp(min=0).sqrt()


def without_autocast(device_type: str) -> AbstractContextManager:
    """A block in which products have the dtype of what is multiplied."""
    if not products.has_autocast(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class RankStabilizedDelta(Delta):
    """rsLoRA: s = alpha / √r, by which gradients keep their size at high ranks.

    Source: "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA" (Kalajdzievski, 2023),
    arXiv:2312.03732, theorem 3.2.
    """

    @staticmethod
    def scale(alpha: float, rank: int) -> float:
        """s = alpha / √r; 0 without an update."""
        return alpha / math.sqrt(rank) if rank > 0 else 0.0


class RankStabilizedDoraDelta(RankStabilizedDelta, DoraDelta):
    """DoRA with rsLoRA's scaling."""


def joined_with_start(
    A: Tensor, B: Tensor, A_start: Tensor, B_start: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Factors of B A − B_start A_start, in each of `count` stacked blocks: of twice the rank.

    Args:
        A, A_start: (r·count, in).
        B, B_start: (width·count, r).

    Returns:
        (2r·count, in) and (width·count, 2r).
    """
    pair = [part.unflatten(0, (count, -1)) for part in (A, A_start)]
    return torch.cat(pair, dim=1).flatten(0, 1), torch.cat([B, -B_start], dim=1)


VARIANTS: dict[str, type[Delta]] = {
    "lora": Delta,
    "rslora": RankStabilizedDelta,
    "dora": DoraDelta,
    "rslora+dora": RankStabilizedDoraDelta,
}


def variant_of(name: str) -> type[Delta]:
    """The variant of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in tuple(VARIANTS):  # whatever was given, which may have no hash
        raise ValueError(f"unknown variant '{name}' of LoRA (known: {', '.join(VARIANTS)})")
    return VARIANTS[name]


@torch.no_grad()
def merge(weight: Tensor, delta: Delta, as_matrix: Callable[[Tensor], Tensor]) -> Tensor:
    """A weight with a low-rank update merged into it.

    The sum is computed in float32 or wider, and rounded once. On a GPU on which float32 products
    may run in TensorFloat-32, B A does so, as it does in training there.

    Args:
        weight: of any shape; unchanged.
        delta: on any device, in any dtype.
        as_matrix: a view of a tensor of the weight's shape as (out, in).

    Returns:
        A new tensor of the weight's shape and dtype.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = weight.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
    delta.to(weight.device, wide).merge_(as_matrix(total))
    return total.to(weight.dtype)


class _LowRankLinear(torch.autograd.Function):
    """`Delta.linear`; its docstring explains the arguments.

    Written by hand because autograd copies the whole gradient for every sum into a slice, and holds
    both branches' full-size gradients of x before it adds them.
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
    ) -> Tensor:
        out = products.product(x, weight, bias)
        z = products.small_product(x if dropped is None else dropped, A).mul_(scaling)
        # z is scaled already, because the gradient of B needs it so.
        Delta(A, B, 1.0, starts).expand_into(out, z)
        # With A frozen (LoRA-FA) the input need not be held.
        of_A, of_weight = ctx.needs_input_grad[4], ctx.needs_input_grad[2]
        ctx.save_for_backward(
            x if of_weight or (of_A and dropped is None) else None,
            dropped if of_A else None,
            *(weight, A, B, z),
        )
        ctx.has_dropped = dropped is not None
        ctx.scaling, ctx.starts = scaling, starts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, weight, A, B, z = ctx.saved_tensors
        needs = ctx.needs_input_grad
        blocks = list(Delta(A, B, ctx.scaling, ctx.starts).blocks())
        lora_input = dropped if ctx.has_dropped else x
        if torch.is_grad_enabled():  # to be differentiated again: z has to depend on its inputs
            if lora_input is None:
                raise RuntimeError("gradients with lora_A frozen cannot be differentiated again")
            z = F.linear(lora_input, A) * ctx.scaling
        # On CPUs these products take half the time or less in the layouts chosen here.
        grad_z = _joined(
            [
                products.small_product(_columns(grad, block.columns), block.B.t().contiguous())
                for block in blocks
            ],
            dim=1,
        ).mul(ctx.scaling)
        grad_x = grad_dropped = grad_weight = grad_bias = grad_A = grad_B = None
        if needs[0]:
            grad_x = products.product(grad, weight.t())
            if not ctx.has_dropped:
                products.add_product(grad_x, grad_z, A, 1.0)
        if needs[1]:
            grad_dropped = products.small_product(grad_z, A.t())
        if needs[2]:
            grad_weight = products.gradient_of_weight(grad, x, not weight.is_contiguous())
        if needs[3]:
            grad_bias = grad.sum(0)
        if needs[4]:
            grad_A = products.small_product(grad_z.t(), lora_input.t())
        if needs[5]:
            parts = (
                products.small_product(
                    _columns(z, block.rows).t(), _columns(grad, block.columns).t()
                )
                for block in blocks
            )
            grad_B = _joined([part.t() for part in parts], dim=0)
        return grad_x, grad_dropped, grad_weight, grad_bias, grad_A, grad_B, None, None


def _columns(tensor: Tensor, part: slice) -> Tensor:
    """Some of the columns; all of them without a view, which not all transforms have a rule for."""
    return tensor if part == slice(0, tensor.shape[1]) else tensor[:, part]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """`torch.cat`, without a copy where there is but one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
