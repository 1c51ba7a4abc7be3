"""LoRA on stacks of matrices: 3-dimensional parameters, such as the experts' weights of an MoE.

    the module's own forward reads     self.gate_up_proj          (experts, out, in)
    and gets, while it runs            W + s · B A, a `LowRankSum`, of each expert

The sum is not computed: see nn/low_rank_sum.py.

The module's class changes to one derived from its own. For each adapted parameter it has a child,
an `AdaptedStack`, with A and B. The parameter has its update only while the module's own forward
runs. Whatever else reads it gets the frozen one: the module's parent, another of its methods, or
another thread. So does a checkpointed part of the forward when it is recomputed, which is an error.
"""

from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import update_wrapper
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .adapted_layers import AdaptedProjection
from .functional import Delta, merge
from .nn.low_rank_sum import LowRankSum
from .stacks import is_transposed, layer_of_stack, matrices
from .wrappers import contains, without_checkpoint


@torch.no_grad()
def merge_stack(owner: nn.Module, stack: Tensor, delta: Delta) -> Tensor:
    """Returns a copy of a stack with its update merged into it, as by `merge`.

    The matrices are merged one by one, as all of them in float32 may not fit in memory.

    Args:
        owner: the module that owns the stack.
        stack: the stack, which is not changed.
        delta: the update of the matrices concatenated along their rows, (experts · out, in).
    """
    merged = torch.empty_like(stack, memory_format=torch.contiguous_format)
    parts = zip(matrices(owner, merged), matrices(owner, stack), delta.blocks(), strict=True)
    for result, matrix, block in parts:
        of_one = replace(delta, A=block.A, B=block.B, starts=(0,), out_features=0)
        result.copy_(merge(matrix, of_one, lambda weight: weight))
    return merged


class AdaptedStack(AdaptedProjection):
    """The update of a parameter that is a stack of matrices: W_e + s · B_e A_e for each expert e.

    Shapes:
        lora_A (experts · r, in), lora_B (experts · out, r): those of the experts, concatenated
        along their rows as those of the slices of a `MergedLinear` are.
    """

    @property
    def frozen_weight(self) -> nn.Parameter:
        """The owner's frozen parameter, even while the owner's forward runs."""
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

    def forward(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Returns what the owner's forward computes with in this parameter's place.

        It is called like any module, so that hooks and FSDP can load A and B when they are needed.
        FSDP frees them when this returns, so no result is a view of them.

        Args:
            weight: the parameter, as the owner holds it now.

        Returns:
            s · B and A of each expert, or only the merged weight if that is in effect.

        Raises:
            RuntimeError: A and B are on another device. (PyTorch does not notice the meta device.)
        """
        merged = self._merged_weight()
        if merged is not None:
            return (merged,)
        for factor in (self.lora_A, self.lora_B):
            if factor.device != weight.device:
                raise RuntimeError(
                    f"the update of {self.frozen_name} is on {factor.device}, and the weight on "
                    f"{weight.device}: move the model as a whole, or let the hooks that load the "
                    "weight load LoRA's as well (accelerate's: dispatch the adapted model)"
                )
        delta = self._delta(weight.dtype)
        A, B = (each.unflatten(0, (len(weight), -1)) for each in (delta.A, delta.B))
        return delta.scaling * B, A.clone()


# ---- the module around it ----

# Each module whose forward runs in this thread -> its adapted parameters' values, by name, which
# that forward reads.
_running: ContextVar[Mapping[nn.Module, Mapping[str, Any]]] = ContextVar(
    "_running", default=MappingProxyType({})
)


class _WithStacks(nn.Module):
    """The base of the classes that modules with adapted parameters get, see `with_stacks`."""

    _kind: ClassVar[type[nn.Module]]
    _stacks: ClassVar[tuple[str, ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward, in which the parameters have their updates.

        What the forward returns inside of a container, such as a generator in a tuple, is not
        checked: it would compute with the frozen parameters.

        Raises:
            RuntimeError: it returns an iterator or a coroutine, which computes later.
        """
        in_effect = {
            name: _in_effect(self, own_value(self, name), layer)
            for name, layer in adapted_stacks(self).items()
        }
        token = _running.set({**_running.get(), self: in_effect})
        try:
            out = self._kind.forward(self, *args, **kwargs)
        finally:
            _running.reset(token)
        if isinstance(out, Iterator | Coroutine | AsyncGenerator):
            if isinstance(out, Coroutine):
                out.close()
            raise RuntimeError(
                f"the forward of {self._kind.__qualname__} returns what would compute later, "
                f"without LoRA ({type(out).__name__}): compute everything before it returns, or "
                "call lora.merge first"
            )
        return out

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickles and copies how to make the module's class, which exists only at run time."""
        reduced: Any = self._kind.__reduce_ex__(self, protocol)
        return _new, (self._kind, self._stacks), reduced[2]


def adapted_stacks(owner: Any) -> dict[str, nn.Module]:
    """Returns the LoRA layers of a module's stacks, or their wrappers, by the stacks' names."""
    layers = {name: owner._modules.get(layer_of_stack(name)) for name in owner._stacks}
    return {
        name: layer
        for name, layer in layers.items()
        if layer is not None and contains(layer, AdaptedStack)
    }


def _in_effect(owner: nn.Module, weight: Tensor, layer: nn.Module) -> LowRankSum | Tensor:
    """Returns a parameter with its update: a `LowRankSum`, or the merged weight."""
    found = without_checkpoint(layer)(weight)
    if len(found) == 1:
        return found[0]
    B, A = found
    return LowRankSum(weight, A.mT, B.mT) if is_transposed(owner) else LowRankSum(weight, B, A)


_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def with_stacks(kind: type[nn.Module], stacks: Iterable[str]) -> type[nn.Module]:
    """Returns the class derived from `kind` in which the parameters of these names can be adapted.

    If `kind` is such a class, these parameters are added to those that it has.
    """
    stacks = tuple(stacks)
    if issubclass(kind, _WithStacks):
        earlier: type[_WithStacks] = kind
        kind, stacks = earlier._kind, (*earlier._stacks, *stacks)
    if (kind, stacks) not in _classes:
        # A compiled forward would read the frozen parameters, without their updates.
        reason = "experts have LoRA: compile without fullgraph=True, or call lora.merge first"
        forward = torch.compiler.disable(_WithStacks.forward, reason=reason)
        # Trainers read the signature of a model's forward, and other tools its source.
        forward = update_wrapper(forward, kind.forward, updated=())
        own = {"forward": forward, "_kind": kind, "_stacks": stacks, "__module__": kind.__module__}
        own["__reduce_ex__"] = _WithStacks.__reduce_ex__
        attributes = own | {name: _reading(name) for name in stacks}
        # Python lets a module change to a class with the same first base. So `kind` is that, for
        # classes that have `abc.ABC` or `Generic` before `nn.Module`.
        _classes[kind, stacks] = type(f"Adapted{kind.__name__}", (kind, _WithStacks), attributes)
    return _classes[kind, stacks]


def _new(kind: type[nn.Module], stacks: tuple[str, ...]) -> nn.Module:
    adapted = with_stacks(kind, stacks)
    return adapted.__new__(adapted)


def _reading(name: str) -> property:
    """Returns the property that reads a parameter, with its update while the forward runs.

    FSDP and `nn.DataParallel` set it to a plain tensor, and delete that.
    """

    def read(module: nn.Module) -> Any:
        in_effect = _running.get().get(module, {})
        return in_effect[name] if name in in_effect else own_value(module, name)

    def write(module: nn.Module, value: Any) -> None:
        vars(module)[name] = value

    def delete(module: nn.Module) -> None:
        del vars(module)[name]

    return property(read, write, delete)


def own_value(module: nn.Module, name: str) -> Any:
    """Returns a parameter as its module holds it, without its update.

    Raises:
        AttributeError: the module does not hold it any more.
    """
    for held in (vars(module), module._parameters, module._buffers):
        if name in held:
            return held[name]
    raise AttributeError(
        f"{type(module).__name__} no longer has its parameter {name}, which has LoRA: undo what "
        "has replaced it (parametrize.remove_parametrizations)"
    )
