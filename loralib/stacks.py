"""Finds parameters that are stacks of matrices, such as the weights of all experts of a layer.

It also defines how they are laid out, and the names of their LoRA layers.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from .module_names import joined

_ENDING = "_lora"


class Stack(NamedTuple):
    """A stack of matrices: the module that owns it, and the parameter's name there."""

    owner: nn.Module
    parameter: str

    @property
    def weight(self) -> Tensor:
        """The parameter."""
        return stacks_in(self.owner)[self.parameter]


def stacks_in(module: nn.Module) -> dict[str, Tensor]:
    """Returns a module's own parameters that are stacks of matrices, by name.

    Kernels of convolutions are not stacks.
    """
    if isinstance(module, _ConvNd):
        return {}
    return {n: p for n, p in module._parameters.items() if p is not None and _is_stack(p)}


def _is_stack(parameter: Tensor) -> bool:
    return not is_lazy(parameter) and parameter.dim() == 3 and min(parameter.shape) > 1


def stacked_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the stacks of all modules of a model, by their names in the model."""
    return {
        joined(name, last): parameter
        for name, module in model.named_modules()
        for last, parameter in stacks_in(module).items()
    }


def stack_named(model: nn.Module, name: str) -> Stack | None:
    """Returns the stack of this name, such as "experts.down_proj"; None if that is not a stack."""
    at, _, parameter = name.rpartition(".")
    owner = model.get_submodule(at)
    return Stack(owner, parameter) if parameter in stacks_in(owner) else None


def is_suggested(model: nn.Module, stack: str) -> bool:
    """Returns whether errors and warnings may suggest a stack as a target.

    They do not suggest the tensors that a parametrized weight is computed from, such as those of a
    weight-normed kernel; users who mean these can still name them. Nor do they suggest those of an
    `nn.ParameterList` or an `nn.ParameterDict`, where LoRA would have no effect, or the kernel of a
    convolution, under the name that a module around the convolution gives it.
    """
    at, _, parameter = stack.rpartition(".")
    owner = model.get_submodule(at)
    if isinstance(owner, ParametrizationList | nn.ParameterList | nn.ParameterDict):
        return False
    weight = owner.get_parameter(parameter)
    convolutions = (each for each in owner.modules() if isinstance(each, _ConvNd))
    return all(each._parameters.get("weight") is not weight for each in convolutions)


def is_transposed(owner: nn.Module) -> bool:
    """Returns whether a module says that its stacks are (experts, in, out), as Hugging Face's do.

    If a module with that layout lacks the attribute, A is on the side of the outputs. PEFT cannot
    tell the layout then, either.
    """
    return bool(getattr(owner, "is_transposed", False))


def matrices(owner: nn.Module, stack: Tensor) -> Tensor:
    """Returns a view of a stack as (experts, out, in)."""
    return stack.mT if is_transposed(owner) else stack


def layer_of_stack(parameter: str) -> str:
    """Returns the name of the LoRA layer of a parameter with this name."""
    return f"{parameter}{_ENDING}"


def stack_of_layer(layer: str) -> str:
    """Returns the name of the parameter: the reverse of `layer_of_stack`."""
    return layer.removesuffix(_ENDING)
