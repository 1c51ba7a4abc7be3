"""Products that are multiplied in bfloat16, which a processor may have no instructions for."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loralib.nn import products

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


def choose_processor(patch, has_bfloat16: bool, large: bool) -> None:
    """From here on the processor has instructions for bfloat16, or none; nothing is measured.

    Args:
        patch: undoes it.
        has_bfloat16: whether it has.
        large: whether all products are large ones, for which there are several ways.
    """
    patch.setattr(products, "_has_bfloat16", lambda: has_bfloat16)
    patch.setattr(products, "_chosen", {})
    for name in ("_LARGE", "_LARGE_OF_FEW"):
        patch.setattr(products, name, 1 if large else 2**60)
