"""Initializations of A and B: the paper's, with a random A and a zero B, and others.

    name         A and B start as                                          source
    default      the paper's (section 4.1): A random, B zero
    orthogonal   random, in orthogonal subspaces: B A = 0, neither zero    as PEFT's "orthogonal"
    pissa        the r largest singular values of W, half in each          Meng et al., 2024,
                 factor: s · B A = U S Vᵀ of rank r                        arXiv:2404.02948, eq. 2-4
    olora        the first r columns of Q and rows of R, of W = Q R        Büyükakyüz, 2024,
                                                                           arXiv:2406.01775, alg. 1

If A and B are made from W, the papers subtract s · B A from W before training. Here W stays
bit-exact: a layer also holds the initial A₀ and B₀, and adds s · (B A − B₀ A₀) x to W x. The sum is
the same, and an adapter still fits every copy of its base.
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
    """Keeps layers in this block from initializing from their weights, which are not loaded yet.

    For models that are built to be loaded into: the caller loads the weights, and then calls
    `start_from_weights`. Otherwise, weights that are about to be overwritten would be decomposed
    for nothing.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def start_is_deferred() -> bool:
    """Returns whether this is called within a `deferring_start` block."""
    return _deferred.get()


class NoInitialization(TorchFunctionMode):
    """A mode in which `torch.nn.init` does nothing: tensors stay uninitialized.

    For models that are built to be loaded into. On the meta device this saves more than the random
    numbers: PyTorch would import its compiler for them, which takes a second.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Skips the functions of `torch.nn.init`."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def initializes() -> bool:
    """Returns whether `torch.nn.init` has an effect.

    It has none while Transformers 4 or Lightning builds a model, or where a quantizer has replaced
    the random functions to build models faster. Each of these disables different functions, so two
    are tried here, on a tensor without elements, which takes no random numbers.
    """
    tensor = torch.empty(0, device="cpu")
    nn.init.constant_(tensor, 0.0)
    nn.init.uniform_(tensor)
    return tensor.is_inference() or tensor._version == 2


def check_initialization(name: str, r: int) -> None:
    """Checks that an initialization of this name exists, and takes this rank.

    Raises:
        ValueError: there is none, or it takes only even ranks and r is odd.
    """
    if name not in INITIALIZATIONS:
        known = ", ".join(INITIALIZATIONS)
        raise ValueError(f"unknown initialization '{name}' of LoRA (known: {known})")
    if name == "orthogonal" and r % 2:
        raise ValueError(f"r has to be even for the orthogonal initialization, got {r}")


def starts_from_weight(name: str) -> bool:
    """Returns whether an initialization makes A and B from factors of the frozen weight."""
    return name in _FROM_WEIGHT


def from_weight(name: str, weight: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Returns A (rank, in) and B (out, rank), made from a weight (out, in), in float32 or wider.

    They are on the weight's device or, if that cannot decompose a weight, on the CPU.

    Raises:
        ValueError: the weight has fewer factors than `rank`; or PiSSA's scaling, whose square
            root divides the factors, is not above 0.
    """
    if rank > min(weight.shape):
        raise ValueError(
            f"a weight of {tuple(weight.shape)} is too small for rank {rank} with the "
            f"initialization {name}: choose a smaller rank"
        )
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    wide = wide if _can_decompose(wide) else wide.cpu()
    if name == "olora":
        Q, R = torch.linalg.qr(wide)
        return R[:rank], Q[:, :rank]
    if not scaling > 0:
        raise ValueError(f"lora_alpha has to be above 0 for the initialization {name}")
    U, S, Vh = torch.linalg.svd(wide, full_matrices=False)
    root = (S[:rank] / scaling).sqrt()
    return root[:, None] * Vh[:rank], U[:, :rank] * root


@torch.no_grad()
def orthogonal(A: Tensor, B: Tensor) -> None:
    """Initializes the stacked A (r·e, …) and B (width·e, …) so that the product of each pair is 0.

    The rows of a random orthogonal r × r matrix go to two halves in turn. The columns of A lie in
    the span of one half, and the rows of B in the span of the other. The matrix is computed in
    float32 or wider.
    """
    # Not views: of a convolution's A in channels_last, there is none.
    rows_A, rows_B = (factor.flatten(1).clone() for factor in (A, B))
    rank, wide = rows_B.shape[1], torch.promote_types(A.dtype, torch.float32)
    for pair_A, pair_B in zip(rows_A.split(rank), rows_B.chunk(len(rows_A) // rank), strict=True):
        basis = rows_A.new_empty(rank, rank, dtype=wide)
        basis.copy_(nn.init.orthogonal_(basis if _can_decompose(basis) else basis.cpu()))
        for factor, half in ((pair_A.t(), basis[0::2]), (pair_B, basis[1::2])):
            factor.copy_(0.1 * half.new_empty(len(factor), len(half)).normal_() @ half)
    A.copy_(rows_A.view(A.shape))
    B.copy_(rows_B.view(B.shape))


def _can_decompose(matrix: Tensor) -> bool:
    """Returns whether PyTorch has a QR and a singular value decomposition for a tensor's device.

    For Apple's GPU it has none in 2.9, and in later versions one or the other, with limits.
    """
    return matrix.device.type != "mps"
