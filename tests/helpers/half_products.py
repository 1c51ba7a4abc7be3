"""Products in bfloat16, on processors with and without instructions for it."""

import copy
from collections.abc import Callable

import torch
from compare import error_of, factor_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from loralib.nn import processor, products
from loralib.nn.fast_paths import fast_paths_off
from loralib.training.precision import Precision, cast_frozen

_OPERATORS = {"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "_linear_pointwise"}


class HalfProducts(TorchDispatchMode):
    """Records the products in bfloat16, and counts those in other dtypes.

    Attention without gradients is not among them: PyTorch's kernel converts its inputs itself.
    """

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.others = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in _OPERATORS:
            if args[1].dtype is torch.bfloat16:
                self.seen.append(f"{name} {[tuple(x.shape) for x in args[:3]]}")
            else:
                self.others += 1
        return function(*args, **(kwargs or {}))


def step_and_evaluate(
    model: nn.Module, loss_of: Callable[[], Tensor], evaluate: Callable[[], Tensor]
) -> tuple[HalfProducts, dict[str, Tensor]]:
    """A training step in bfloat16, as the scripts make it, and an evaluation.

    Returns:
        The recorded products; the loss, what `evaluate` returned, and the gradients by name.
    """
    model.train().zero_grad()
    precision = Precision(torch.bfloat16, "cpu")
    with HalfProducts() as halves:
        with precision.autocast():
            loss = loss_of()
        precision.backward(loss)
        model.eval()
        with torch.no_grad(), precision.autocast():
            evaluated = evaluate()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return halves, {"loss": loss.detach(), "evaluated": evaluated, **grads}


def assert_as_exact_as_plain(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], ratio: float, off: float
) -> None:
    """Asserts that a step in bfloat16 is about as exact as one by PyTorch's own operations.

    Args:
        model: in training mode; its weights are rounded to bfloat16, so that all steps start alike.
        loss_of: a copy of the model -> its loss.
        ratio: the factor by which the error may exceed that of PyTorch's own operations.
        off: how far `factor_of` may be from 1.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())

    def step(dtype: torch.dtype) -> dict[str, Tensor]:
        own, precision = copy.deepcopy(model), Precision(dtype, "cpu")
        cast_frozen(own, dtype)
        with precision.autocast():
            loss = loss_of(own)
        precision.backward(loss)
        grads = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **grads}

    with fast_paths_off():
        exact, theirs = step(torch.float32), step(torch.bfloat16)
    ours = step(torch.bfloat16)
    assert 0 < error_of(ours, exact) < ratio * error_of(theirs, exact)
    assert abs(factor_of(ours, exact) - 1) <= off


def choose_processor(patch, has_bfloat16: bool, large: bool) -> None:
    """Pretends that the processor has instructions for bfloat16, or none, and measures nothing.

    Args:
        patch: pytest's monkeypatch, which undoes it.
        has_bfloat16: whether it has these instructions.
        large: whether all products count as large ones, for which there are several methods.
    """
    patch.setattr(processor, "has_bfloat16", lambda: has_bfloat16)
    patch.setattr(products, "_chosen", {})
    for name in ("_LARGE", "_LARGE_OF_FEW"):
        patch.setattr(products, name, 1 if large else 2**60)
