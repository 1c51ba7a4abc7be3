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
update is a subclass with methods of its own, and a name in `VARIANTS`, by which layers and metadata
know it. Linear layers call `linear`, embeddings `expand_into`, convolutions `merge_` and `product`,
banks `add_to`: one that is not additive has to override each of them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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

    def to(self, *args: Any, **kwargs: Any) -> "Delta":
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
        return _LowRankLinear.apply(
            x, dropped, weight, bias, self.A, self.B, self.scaling, self.starts
        )

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += s · (x Aᵀ) Bᵀ, in place.

        Args:
            out: (rows, out), what the frozen layer gives for x.
            x: (rows, in), of the same dtype.
        """
        self.expand_into(out, F.linear(x, self.A))

    def expand_into(self, out: Tensor, z: Tensor) -> None:
        """out += s · z Bᵀ, in place; z = x Aᵀ, (rows, r·e)."""
        for block in self.blocks():
            # A view of all columns would cost autograd a copy.
            part = out if len(block.B) == out.shape[1] else out[:, block.columns]
            part.addmm_(z[:, block.rows], block.B.t(), alpha=self.scaling)

    def product(self) -> Tensor:
        """s · B A, (out, in), of an update that reaches the whole output."""
        return (self.scaling * self.B) @ self.A

    def merge_(self, weight: Tensor) -> Tensor:
        """W += s · B A, in place; weight (out, in), of the same dtype."""
        for block in self.blocks():
            part = weight if len(block.B) == len(weight) else weight[block.columns]
            part.addmm_(block.B, block.A, alpha=self.scaling)
        return weight


class RankStabilizedDelta(Delta):
    """rsLoRA: s = alpha / √r, by which gradients keep their size at high ranks.

    Source: "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA" (Kalajdzievski, 2023),
    arXiv:2312.03732, theorem 3.2.
    """

    @staticmethod
    def scale(alpha: float, rank: int) -> float:
        """s = alpha / √r; 0 without an update."""
        return alpha / math.sqrt(rank) if rank > 0 else 0.0


VARIANTS: dict[str, type[Delta]] = {"lora": Delta, "rslora": RankStabilizedDelta}


def variant_of(name: str) -> type[Delta]:
    """The variant of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in VARIANTS:
        raise ValueError(f"unknown variant '{name}' of LoRA (known: {', '.join(VARIANTS)})")
    return VARIANTS[name]


@torch.no_grad()
def merge(weight: Tensor, delta: Delta, as_matrix: Callable[[Tensor], Tensor]) -> Tensor:
    """A weight with a low-rank update merged into it.

    The sum is computed in float32 or wider, and rounded once.

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
        out = F.linear(x, weight, bias)
        z = F.linear(x if dropped is None else dropped, A).mul_(scaling)
        # z is scaled already, because the gradient of B needs it so.
        Delta(A, B, 1.0, starts).expand_into(out, z)
        x_is_needed = dropped is None or ctx.needs_input_grad[2]
        ctx.save_for_backward(x if x_is_needed else None, dropped, weight, A, B, z)
        ctx.scaling, ctx.starts = scaling, starts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, weight, A, B, z = ctx.saved_tensors
        needs = ctx.needs_input_grad
        blocks = list(Delta(A, B, ctx.scaling, ctx.starts).blocks())
        lora_input = x if dropped is None else dropped
        if torch.is_grad_enabled():  # to be differentiated again: z has to depend on its inputs
            z = F.linear(lora_input, A) * ctx.scaling
        # On CPUs these products take half the time or less in the layouts chosen here.
        grad_z = ctx.scaling * torch.cat(
            [F.linear(grad[:, block.columns], block.B.t().contiguous()) for block in blocks], dim=1
        )
        grad_x = grad_dropped = grad_weight = grad_bias = grad_A = grad_B = None
        if needs[0]:
            grad_x = grad @ weight
            if dropped is None:
                grad_x.addmm_(grad_z, A)
        if needs[1]:
            grad_dropped = grad_z @ A
        if needs[2]:
            grad_weight = grad.t() @ x
        if needs[3]:
            grad_bias = grad.sum(0)
        if needs[4]:
            grad_A = grad_z.t() @ lora_input
        if needs[5]:
            grad_B = torch.cat(
                [(z[:, block.rows].t() @ grad[:, block.columns]).t() for block in blocks]
            )
        return grad_x, grad_dropped, grad_weight, grad_bias, grad_A, grad_B, None, None
