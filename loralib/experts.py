"""LoRA on stacks of matrices: parameters of three dimensions, as the experts of a mixture are held.

    the module's own forward reads     self.gate_up_proj          (experts, out, in)
    and gets, while it runs            W + s · B A, a `LowRankSum`, of each expert

The sum is not computed. Products with it, in whatever way a forward makes them, are

    x @ (W + L R)  =  x @ W + (x @ L) @ R

which holds no gradient of W's size, and costs r / in more than x @ W. What else PyTorch's functions
and a tensor's own methods do with it is done with the sum itself, as a tensor. It is no tensor to
what asks `isinstance(w, torch.Tensor)`, and an `autograd.Function` that is given it fails.

The module becomes one of a class derived from its own. It has a child for each adapted parameter,
an `AdaptedStack`, with A and B. Outside of its own forward the parameter is the frozen one: read by
its parent, by another of its methods, by another thread, or where a checkpoint of a part of the
forward computes that again (a reentrant one, wrongly; the other is an error).
"""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adapted_layers import AdaptedProjection
from .functional import Delta, merge, without_autocast
from .model_checks import stacks_in

_ENDING = "_lora"


def layer_of_stack(parameter: str) -> str:
    """What the LoRA layer of a parameter is called, by the parameter's name."""
    return f"{parameter}{_ENDING}"


def stack_of_layer(layer: str) -> str:
    """The reverse of `layer_of_stack`."""
    return layer.removesuffix(_ENDING)


def is_layer_of_stack(model: nn.Module, name: str) -> bool:
    """Whether a name is that of a LoRA layer of a stack which a model has, adapted or not."""
    at, _, last = name.rpartition(".")
    stack = stack_of_layer(last)
    return stack != last and stack in stacks_in(model.get_submodule(at))


def is_transposed(owner: nn.Module) -> bool:
    """Whether a module holds its stacks as (experts, in, out): upstream's say so by this attribute.

    Of one that does not say it, which PEFT cannot tell either, A is on the side of the outputs.
    """
    return bool(getattr(owner, "is_transposed", False))


def matrices(owner: nn.Module, stack: Tensor) -> Tensor:
    """A stack as (experts, out, in), a view."""
    return stack.mT if is_transposed(owner) else stack


@torch.no_grad()
def merge_stack(owner: nn.Module, stack: Tensor, delta: Delta) -> Tensor:
    """A stack with its update merged into it, as `merge` does it: a new tensor of its shape.

    One matrix after the other, as all in float32 may not fit in memory.

    Args:
        owner: the module that has it.
        stack: unchanged.
        delta: of the matrices one below the other, (experts · out, in).
    """
    merged = torch.empty_like(stack, memory_format=torch.contiguous_format)
    parts = zip(matrices(owner, merged), matrices(owner, stack), delta.blocks(), strict=True)
    for result, matrix, block in parts:
        of_one = replace(delta, A=block.A, B=block.B, starts=(0,), out_features=0)
        result.copy_(merge(matrix, of_one, lambda weight: weight))
    return merged


class AdaptedStack(AdaptedProjection):
    """The update of a parameter that is a stack of matrices: W_e + s · B_e A_e of each expert e.

    Shapes:
        lora_A (experts · r, in), lora_B (experts · out, r): those of the experts one below the
        other, as a `MergedLinear` has those of its slices.
    """

    @property
    def frozen_weight(self) -> nn.Parameter:
        """The owner's parameter, also while the owner's forward runs."""
        return own_value(self.base, self.frozen_name)

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return matrices(self.base, weight).flatten(0, 1)

    def _add_update(self, dtype: torch.dtype | None = None) -> None:
        """Creates the parameters of the update."""
        experts, out, width = matrices(self.base, self.frozen_weight).shape
        self._starts = tuple(range(0, experts * out, out))
        self._add_lora_parameters((experts * self.r, width), (experts * out, self.r), dtype)

    def _merge(self) -> Tensor:
        return merge_stack(self.base, self.frozen_weight, self._delta())

    def forward(self, weight: Tensor) -> "LowRankSum | Tensor":
        """What the owner's forward computes with in this parameter's place.

        It is called as any module is, for hooks that load A and B when they are needed.

        Args:
            weight: the parameter, as the owner holds it now.

        Raises:
            RuntimeError: A and B are on another device; of the meta device, PyTorch says nothing.
        """
        merged = self._merged_weight()
        if merged is not None:
            return merged
        for factor in (self.lora_A, self.lora_B):
            if factor.device != weight.device:
                raise RuntimeError(
                    f"the update of {self.frozen_name} is on {factor.device}, and the weight on "
                    f"{weight.device}: move the model as a whole, or let the hooks that load the "
                    "weight load LoRA's as well (accelerate's: dispatch the adapted model)"
                )
        delta = self._delta(weight.dtype)
        A, B = (each.unflatten(0, (len(weight), -1)) for each in (delta.A, delta.B))
        B = delta.scaling * B
        factors = (A.mT, B.mT) if is_transposed(self.base) else (B, A)
        return LowRankSum(weight, *factors)


# ------------------------------------------------------------------------------------------------
# The module around it
# ------------------------------------------------------------------------------------------------

# For each module whose forward runs in this thread, what its parameters are in effect.
_running: ContextVar[Mapping[nn.Module, Mapping[str, Any]]] = ContextVar(
    "_running", default=MappingProxyType({})
)


class _WithStacks(nn.Module):
    """What a module becomes of which parameters are adapted: see `with_stacks`."""

    _kind: ClassVar[type[nn.Module]]
    _stacks: ClassVar[tuple[str, ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, in which the parameters have their updates."""
        in_effect = {
            layer.frozen_name: layer(own_value(self, layer.frozen_name))
            for layer in self._modules.values()
            if isinstance(layer, AdaptedStack)
        }
        token = _running.set({**_running.get(), self: in_effect})
        try:
            return super().forward(*args, **kwargs)
        finally:
            _running.reset(token)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """A class that is made at run time is made again where the module is read or copied."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        return _new, (self._kind, self._stacks), reduced[2]


_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def with_stacks(kind: type[nn.Module], stacks: tuple[str, ...]) -> type[nn.Module]:
    """The class of modules of a kind whose parameters of these names may be adapted."""
    if (kind, stacks) not in _classes:
        # A compiled forward would see the parameters, and not what is in effect in their place.
        reason = "experts have LoRA: compile without fullgraph=True, or call lora.merge first"
        forward = torch.compiler.disable(_WithStacks.forward, reason=reason)
        own = {"forward": forward, "_kind": kind, "_stacks": stacks, "__module__": kind.__module__}
        attributes = own | {name: _reading(name) for name in stacks}
        _classes[kind, stacks] = type(f"Adapted{kind.__name__}", (_WithStacks, kind), attributes)
    return _classes[kind, stacks]


def _new(kind: type[nn.Module], stacks: tuple[str, ...]) -> nn.Module:
    adapted = with_stacks(kind, stacks)
    return adapted.__new__(adapted)


def _reading(name: str) -> property:
    """The attribute of a parameter; FSDP and `nn.DataParallel` set and delete it as a tensor."""

    def read(module: nn.Module) -> Any:
        in_effect = _running.get().get(module, {})
        return in_effect[name] if name in in_effect else own_value(module, name)

    def write(module: nn.Module, value: Any) -> None:
        vars(module)[name] = value

    def delete(module: nn.Module) -> None:
        del vars(module)[name]

    return property(read, write, delete)


def own_value(module: nn.Module, name: str) -> Any:
    """A parameter as its module holds it."""
    for held in (vars(module), module._parameters, module._buffers):
        if name in held:
            return held[name]
    raise AttributeError(
        f"{type(module).__name__} no longer has its parameter {name}, which has LoRA: undo what "
        "has replaced it (parametrize.remove_parametrizations)"
    )


# ------------------------------------------------------------------------------------------------
# The sum
# ------------------------------------------------------------------------------------------------

# What is asked of the weight: the sum has the same.
_OF_WEIGHT = {"shape", "dtype", "device", "ndim", "size", "dim", "is_cuda", "is_meta"}
# The products of two operands.
_MATMULS = {
    *(torch.matmul, torch.bmm, torch.mm),
    *(Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__),
}
# `torch._grouped_mm` takes rows of whole blocks of memory.
_GROUPED_BYTES = 16


class LowRankSum:
    """W + L R, of which products are computed without the sum; see the module's head.

    Indexing the first dimension of a stack, and transposing, give another one. It is not a tensor,
    so that what does not ask `__torch_function__`, such as a kernel, refuses it.

    Args:
        weight: (…, n, m).
        left: (…, n, r).
        right: (…, r, m).
    """

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor):
        self.weight, self.left, self.right = weight, left, right
        self._of_each: dict[bool, list[LowRankSum]] = {}

    @property
    def tensor(self) -> Tensor:
        """The sum itself, through which gradients reach the factors."""
        with without_autocast(self.weight.device.type):
            return self.weight + self.left @ self.right

    def _matrix(self, index: int) -> "LowRankSum":
        """That of one matrix of a stack: of all of them at once, autograd writes one gradient."""
        has_grad = torch.is_grad_enabled()
        if has_grad not in self._of_each:
            parts = (each.unbind() for each in (self.weight, self.left, self.right))
            self._of_each[has_grad] = [LowRankSum(*one) for one in zip(*parts, strict=True)]
        return self._of_each[has_grad][index]

    @property
    def mT(self) -> "LowRankSum":
        """The transposed sum, Wᵀ + Rᵀ Lᵀ."""
        return LowRankSum(self.weight.mT, self.right.mT, self.left.mT)

    def to(self, *args: Any, **kwargs: Any) -> "LowRankSum":
        """As that of a tensor."""
        parts = (self.weight, self.left, self.right)
        return LowRankSum(*(each.to(*args, **kwargs) for each in parts))

    def transpose(self, dim0: int, dim1: int) -> "LowRankSum | Tensor":
        """As that of a tensor."""
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
        return LowRankSum(self.weight[index], self.left[index], self.right[index])

    def __matmul__(self, other: Any) -> Any:
        own: Any = self
        return torch.matmul(own, other)

    # As a tensor's, although `==` compares elements.
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self.weight)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.weight if name in _OF_WEIGHT else self.tensor, name)

    def data_ptr(self) -> int:
        """The weight's address on a CPU, where its alignment may be asked for; elsewhere an error.

        A kernel would take it for the address of the sum.
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
        """Products without the sum; what else PyTorch computes, with it."""
        kwargs = kwargs or {}
        found = _product(func, args, kwargs)
        return func(*_plain(args), **_plain(kwargs)) if found is None else found


# What Python's operators ask of the class itself, by what their methods are called.
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("lt", "le", "eq", "ne", "gt", "ge"),
    *("neg", "pos", "abs", "bool", "contains"),
)


def _operator(name: str) -> Callable[..., Any]:
    """A tensor's operator, of the sum."""

    def compute(self: LowRankSum, *others: Any) -> Any:
        return getattr(self.tensor, name)(*_plain(others))

    return compute


for _name in _OPERATORS:
    setattr(LowRankSum, f"__{_name}__", _operator(f"__{_name}__"))


def _is_of_first(index: Any) -> bool:
    """Whether an index is of the first dimension alone; a mask may be of several."""
    if isinstance(index, Tensor):
        return not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)
    return isinstance(index, int | slice) and not isinstance(index, bool)


def _product(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """A product with one sum, of a matrix or a stack, or None for whatever else this is."""
    if len(args) < 2 or isinstance(args[0], LowRankSum) is isinstance(args[1], LowRankSum):
        return None
    x, y = args[:2]
    if func is F.linear and isinstance(y, LowRankSum):
        more = F.linear(F.linear(x, y.right), y.left)
        return F.linear(x, y.weight, *args[2:], **kwargs) + more
    if _is_grouped(func, args, kwargs):
        (left, right), ends, product = _padded(y), args[2:], partial(func, **kwargs)
        return product(x, y.weight, *ends) + product(product(x, left, *ends), right, *ends)
    # Of a vector and a stack, a product with a factor would be taken for another one.
    if func not in _MATMULS or len(args) > 2 or kwargs or min(x.dim(), y.dim()) < 2:
        return None
    if isinstance(y, LowRankSum):
        return func(x, y.weight) + func(func(x, y.left), y.right)
    return func(x.weight, y) + func(x.left, func(x.right, y))


def _is_grouped(func: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether this is a grouped product of rows with a stack, and gives nothing but that."""
    others = [*args[3:], *(value for name, value in kwargs.items() if name != "offs")]
    is_one = "grouped_mm" in getattr(func, "__name__", "") and isinstance(args[1], LowRankSum)
    return is_one and args[1].weight.dim() == 3 and all(each is None for each in others)


def _padded(of_stack: LowRankSum) -> tuple[Tensor, Tensor]:
    """The factors with a rank whose rows are whole blocks of memory; zeros are added."""
    left, right = of_stack.left, of_stack.right
    more = -left.shape[-1] % (_GROUPED_BYTES // left.element_size())
    return (F.pad(left, (0, more)), F.pad(right, (0, 0, 0, more))) if more else (left, right)


def _plain(value: Any) -> Any:
    """What functions are given, with the sums themselves in it."""
    if isinstance(value, LowRankSum):
        return value.tensor
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(_plain, value))
    return value
