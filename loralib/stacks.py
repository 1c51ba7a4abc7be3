"""Parameters that are stacks of matrices, such as the weights of all experts of a layer.

Which they are, how they are laid out, and what their LoRA layers are called.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

_ENDING = "_lora"


class Stack(NamedTuple):
    """A stack: the module that has it, and what it is called there."""

    owner: nn.Module
    parameter: str

    @property
    def weight(self) -> Tensor:
        """The parameter."""
        return stacks_in(self.owner)[self.parameter]


def stacks_in(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module itself that hold several matrices each, by their names.

    Not the kernels of convolutions.
    """
    own = module._parameters
    if not own or isinstance(module, nn.modules.conv._ConvNd):
        return {}
    return {n: p for n, p in own.items() if p is not None and _is_stack(p)}


def _is_stack(parameter: Tensor) -> bool:
    return not is_lazy(parameter) and parameter.dim() == 3 and min(parameter.shape) > 1


def stacked_weights(model: nn.Module) -> dict[str, Tensor]:
    """Those of all modules of a model."""
    return {
        f"{name}.{last}" if name else last: parameter
        for name, module in model.named_modules()
        for last, parameter in stacks_in(module).items()
    }


def stack_named(model: nn.Module, name: str) -> Stack | None:
    """A model's stack of this name, such as "experts.down_proj"; None where it is none."""
    at, _, parameter = name.rpartition(".")
    owner = model.get_submodule(at)
    return Stack(owner, parameter) if parameter in stacks_in(owner) else None


def is_suggested(model: nn.Module, stack: str) -> bool:
    """Whether errors and warnings may name a stack as one to adapt.

    Not what a parameter is computed from, as a weight-normed kernel is: who means that names it.
    """
    owner = model.get_submodule(stack.rpartition(".")[0])
    return not isinstance(owner, ParametrizationList)


def is_transposed(owner: nn.Module) -> bool:
    """Whether a module holds its stacks as (experts, in, out): upstream's say so by this attribute.

    Of one that does not say it, which PEFT cannot tell either, A is on the side of the outputs.
    """
    return bool(getattr(owner, "is_transposed", False))


def matrices(owner: nn.Module, stack: Tensor) -> Tensor:
    """A stack as (experts, out, in), a view."""
    return stack.mT if is_transposed(owner) else stack


def layer_of_stack(parameter: str) -> str:
    """What the LoRA layer of a parameter is called, by the parameter's name."""
    return f"{parameter}{_ENDING}"


def stack_of_layer(layer: str) -> str:
    """The reverse of `layer_of_stack`."""
    return layer.removesuffix(_ENDING)
