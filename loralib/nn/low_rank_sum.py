"""A weight with a low-rank update, W + L R, whose products are computed without the sum:

    x @ (W + L R)  =  x @ W + (x @ L) @ R

This needs no gradient of W's size, and costs r / in + r / out more than x @ W. Other functions of
PyTorch, and a tensor's other methods, work with the sum itself, which is computed for them as a
tensor. `isinstance(w, Tensor)` is False. An `autograd.Function` would take a `LowRankSum` for a
constant and give the factors no gradients, so if these are trained, using it in one is an error.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import without_autocast

# Attributes that are read from the weight, because the sum has the same.
_OF_WEIGHT = {"shape", "dtype", "device", "ndim", "size", "dim", "is_cuda", "is_meta"}
# Functions that multiply two operands.
_MATMULS = {
    *(torch.matmul, torch.bmm, torch.mm),
    *(Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__),
}
# `torch._grouped_mm` needs rows whose size in bytes is a multiple of this.
_GROUPED_BYTES = 16
_HAS_FORWARD_DERIVATIVES = getattr(torch._C, "_is_fwd_grad_enabled", lambda: True)


class LowRankSum:
    """W + L R, whose products are computed without the sum; see the module's docstring.

    Indexing the first dimension of a stack, transposing, and `to` return another `LowRankSum`. It
    is not a tensor, so code that does not call `__torch_function__`, such as a kernel, refuses it.

    Args:
        weight: (…, n, m).
        left: (…, n, r).
        right: (…, r, m).
    """

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor):
        self.weight, self.left, self.right = weight, left, right
        self._of_each: dict[bool, list[LowRankSum]] = {}

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns W, L and R, to compute with.

        Raises:
            RuntimeError: L or R is trained, and an `autograd.Function` asks for them, which would
                give them no gradients.
        """
        is_trained = self.left.requires_grad or self.right.requires_grad
        if is_trained and _is_in_function():
            raise RuntimeError(
                "an autograd.Function computes with experts that have LoRA, which would get no "
                "gradients: choose another implementation (experts_implementation='grouped_mm'); "
                "or checkpoint the module as a whole, if this is a checkpoint within its forward; "
                "with DeepSpeed's ZeRO 3, set memory_efficient_linear to false in its config"
            )
        return self.weight, self.left, self.right

    @property
    def tensor(self) -> Tensor:
        """The sum itself, through which gradients reach the factors."""
        weight, left, right = self.parts()
        with without_autocast(weight.device.type):
            return weight + left @ right

    def _matrix(self, index: int) -> "LowRankSum":
        """Returns the sum for one matrix of a stack.

        The stack is unbound as a whole, so that autograd writes one gradient for all matrices.
        """
        has_grad, parts = torch.is_grad_enabled(), self.parts()
        if has_grad not in self._of_each:
            unbound = (each.unbind() for each in parts)
            self._of_each[has_grad] = [LowRankSum(*one) for one in zip(*unbound, strict=True)]
        return self._of_each[has_grad][index]

    @property
    def mT(self) -> "LowRankSum":
        """The transposed sum, Wᵀ + Rᵀ Lᵀ."""
        weight, left, right = self.parts()
        return LowRankSum(weight.mT, right.mT, left.mT)

    def to(self, *args: Any, **kwargs: Any) -> "LowRankSum":
        """Like `Tensor.to`."""
        return LowRankSum(*(each.to(*args, **kwargs) for each in self.parts()))

    def transpose(self, dim0: int, dim1: int) -> "LowRankSum | Tensor":
        """Like `Tensor.transpose`."""
        dims = self.weight.dim()
        is_of_matrices = {dim0 % dims, dim1 % dims} == {dims - 2, dims - 1}
        return self.mT if is_of_matrices else self.tensor.transpose(dim0, dim1)

    def __getitem__(self, index: Any) -> "LowRankSum | Tensor":
        if self.weight.dim() < 3 or not _is_of_first(index):
            return self.tensor[_plain(index)]
        if isinstance(index, Tensor) and index.dim() == 0:
            index = int(index)
        if isinstance(index, int):
            return self._matrix(index)
        return LowRankSum(*(each[index] for each in self.parts()))

    def __matmul__(self, other: Any) -> Any:
        own: Any = self
        return torch.matmul(own, other)

    # Hashed by identity, as tensors are, although `==` compares elements.
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self.weight)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.weight if name in _OF_WEIGHT else self.tensor, name)

    def data_ptr(self) -> int:
        """Returns the weight's address on a CPU, where callers check its alignment.

        Raises:
            RuntimeError: the weight is on another device, where a kernel would take the address
                for that of the sum.
        """
        if not self.weight.is_cpu:
            raise RuntimeError(
                "a kernel asks for the memory of experts that have LoRA, whose sum W + B A is not "
                "computed: choose another implementation (experts_implementation='grouped_mm')"
            )
        return self.weight.data_ptr()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Computes products without the sum, and everything else with it."""
        kwargs = kwargs or {}
        found = _product(func, args, kwargs)
        return func(*_plain(args), **_plain(kwargs)) if found is None else found


def _is_in_function() -> bool:
    """Returns whether the forward of an `autograd.Function` is running.

    Like `torch.no_grad`, it turns gradients off; unlike that, also forward-mode derivatives.
    """
    is_recorded = torch.is_grad_enabled() or _HAS_FORWARD_DERIVATIVES()
    return not (is_recorded or torch.is_inference_mode_enabled())


# Operators, by their methods' names. Python looks these up on the class, past `__getattr__`.
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("lt", "le", "eq", "ne", "gt", "ge"),
    *("neg", "pos", "abs", "bool", "contains"),
)


def _operator(name: str) -> Callable[..., Any]:
    """Returns a tensor's operator, applied to the sum."""

    def compute(self: LowRankSum, *others: Any) -> Any:
        return getattr(self.tensor, name)(*_plain(others))

    return compute


for _name in _OPERATORS:
    setattr(LowRankSum, f"__{_name}__", _operator(f"__{_name}__"))


def _is_of_first(index: Any) -> bool:
    """Returns whether an index is of the first dimension alone; a mask may be of several."""
    if isinstance(index, Tensor):
        return not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)
    return isinstance(index, int | slice) and not isinstance(index, bool)


def _product(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Returns the product with exactly one `LowRankSum`, or None if the call is anything else."""
    if len(args) < 2 or isinstance(args[0], LowRankSum) is isinstance(args[1], LowRankSum):
        return None
    x, y = args[:2]
    weight, left, right = (y if isinstance(y, LowRankSum) else x).parts()
    if func is F.linear and isinstance(y, LowRankSum):
        return F.linear(x, weight, *args[2:], **kwargs) + F.linear(F.linear(x, right), left)
    if _is_grouped(func, args, kwargs):
        ends, product = args[2:], partial(func, **kwargs)
        left, right = _padded(left, right)
        return product(x, weight, *ends) + product(product(x, left, *ends), right, *ends)
    # Not with vectors: a vector times a stack of factors is a matrix, and matmul would then read
    # that as rows to multiply with every matrix of the other stack.
    if func not in _MATMULS or len(args) > 2 or kwargs or min(x.dim(), y.dim()) < 2:
        return None
    if isinstance(y, LowRankSum):
        return func(x, weight) + func(func(x, left), right)
    return func(weight, y) + func(left, func(right, y))


def _is_grouped(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether this is a grouped product of rows with a stack, without further options."""
    others = [*args[3:], *(value for name, value in kwargs.items() if name != "offs")]
    is_one = "grouped_mm" in getattr(func, "__name__", "") and isinstance(args[1], LowRankSum)
    return is_one and args[1].weight.dim() == 3 and all(each is None for each in others)


def _padded(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors, their rank padded with zeros to whole blocks of `_GROUPED_BYTES`."""
    more = -left.shape[-1] % (_GROUPED_BYTES // left.element_size())
    return (F.pad(left, (0, more)), F.pad(right, (0, 0, 0, more))) if more else (left, right)


def _plain(value: Any) -> Any:
    """Returns arguments in which each `LowRankSum` is replaced by its sum, a tensor."""
    if isinstance(value, LowRankSum):
        return value.tensor
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(_plain, value))
    return value
