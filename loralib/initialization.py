"""Initializations of A and B other than the paper's, which starts A at random and B with zeros.

    name         A and B start as                                          source
    default      the paper's (section 4.1): A random, B zero
    orthogonal   random, in orthogonal subspaces: B A = 0, neither zero    as PEFT's "orthogonal"
    pissa        the r largest singular values of W, half in each          Meng et al., 2024,
                 factor: s · B A = U S Vᵀ of rank r                        arXiv:2404.02948, eq. 2-4
    olora        the first r columns of Q and rows of R, of W = Q R        Büyükakyüz, 2024,
                                                                           arXiv:2406.01775, alg. 1

Where they are made of W, those papers subtract s · B A from W before training. Here W keeps its
bits: a layer holds the start, B₀ A₀, besides, and adds s · (B A − B₀ A₀) x to W x. It is the same
sum, and an adapter still fits every copy of its base.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

INITIALIZATIONS = ("default", "orthogonal", "pissa", "olora")
_FROM_WEIGHT = ("pissa", "olora")

_deferred = ContextVar("_deferred", default=False)


@contextmanager
def deferring_start() -> Iterator[None]:
    """Within this block, layers do not start from their weights, which are not theirs yet.

    For models that are built to be loaded into: whoever loads them calls `start_from_weights`
    afterwards. Without it, weights that are to be overwritten would be decomposed for nothing.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def start_is_deferred() -> bool:
    """Whether this is called within a `deferring_start` block."""
    return _deferred.get()


class NoInitialization(TorchFunctionMode):
    """Within this block, random initialization does nothing: tensors stay uninitialized.

    For models that are built to be loaded into. On the meta device it saves more than the random
    numbers: there, PyTorch imports its compiler to draw them, which takes a second.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Leaves out what `torch.nn.init` does."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def initializes() -> bool:
    """Whether `torch.nn.init` does something: not while Transformers 4 or Lightning builds a model.

    Nor where somebody has replaced the random functions, as quantizers do, to build models faster.
    Each of these leaves out others; of a tensor without elements none needs a random number.
    """
    tensor = torch.empty(0, device="cpu")
    nn.init.constant_(tensor, 0.0)
    nn.init.uniform_(tensor)
    return tensor.is_inference() or tensor._version == 2


def check_initialization(name: str, r: int) -> None:
    """Checks that there is such an initialization, for this rank.

    Raises:
        ValueError: there is none; or r is odd and it has to be even.
    """
    if name not in INITIALIZATIONS:
        known = ", ".join(INITIALIZATIONS)
        raise ValueError(f"unknown initialization '{name}' of LoRA (known: {known})")
    if name == "orthogonal" and r % 2:
        raise ValueError(f"r has to be even for the orthogonal initialization, got {r}")


def starts_from_weight(name: str) -> bool:
    """Whether A and B start from factors of the frozen weight."""
    return name in _FROM_WEIGHT


def from_weight(name: str, weight: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """A (rank, in) and B (out, rank), made of a weight (out, in); in float32 or wider.

    Raises:
        ValueError: the weight has fewer factors; or a scaling has no square root to divide by.
    """
    if rank > min(weight.shape):
        raise ValueError(
            f"a weight of {tuple(weight.shape)} has no {rank} factors for the initialization "
            f"{name}: choose a smaller rank"
        )
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if name == "olora":
        Q, R = torch.linalg.qr(wide)
        return R[:rank], Q[:, :rank]
    if not scaling > 0:
        raise ValueError(f"lora_alpha has to be above 0 for the initialization {name}")
    U, S, Vh = torch.linalg.svd(wide, full_matrices=False)
    root = (S[:rank] / scaling).sqrt()
    return root[:, None] * Vh[:rank], U[:, :rank] * root


@torch.no_grad()
def orthogonal(A: Tensor, B: Tensor, r: int) -> None:
    """Initializes the stacked A (r·e, …) and B (width·e, …) so that the product of each pair is 0.

    The rows of a random orthogonal r × r matrix are dealt out in turn: A's rows lie in the space of
    one half, B's in that of the other. It is computed in float32 or wider.
    """
    rows_A, rows_B = A.flatten(1), B.flatten(1)
    rank, wide = rows_B.shape[1], torch.promote_types(A.dtype, torch.float32)
    for pair_A, pair_B in zip(rows_A.split(rank), rows_B.chunk(len(rows_A) // rank), strict=True):
        basis = nn.init.orthogonal_(rows_A.new_empty(rank, rank, dtype=wide))
        for factor, half in ((pair_A.t(), basis[0::2]), (pair_B, basis[1::2])):
            factor.copy_(0.1 * half.new_empty(len(factor), len(half)).normal_() @ half)
