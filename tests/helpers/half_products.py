"""Products that are multiplied in bfloat16, which a processor may have no instructions for."""

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
    """Notes the operators, and counts the products of other dtypes.

    Attention without gradients is not among them: PyTorch's kernel converts by itself.
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
        What was multiplied; the loss, what was evaluated, and the gradients by name.
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
    """A step in bfloat16 is about as near to that in float32 as PyTorch's own operations come.

    Args:
        model: in training; its weights are rounded to bfloat16, so that all steps have the same.
        loss_of: a copy of it -> its loss.
        ratio: how many times the plain path's error it may have.
        off: by what factor it may be too large or too small.
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
    """From here on the processor has instructions for bfloat16, or none; nothing is measured.

    Args:
        patch: undoes it.
        has_bfloat16: whether it has.
        large: whether all products are large ones, for which there are several ways.
    """
    patch.setattr(processor, "has_bfloat16", lambda: has_bfloat16)
    patch.setattr(products, "_chosen", {})
    for name in ("_LARGE", "_LARGE_OF_FEW"):
        patch.setattr(products, name, 1 if large else 2**60)
