"""Recognizes which of PyTorch's layers a module computes like, whichever package it is from.

From that follows how the module holds its weight: as (out, in), or as (in, out).
"""

from typing import Any

from torch import Tensor, nn

from .in_place import unparametrized_class
from .quantized_layers import is_quantized_linear
from .wrappers import package_and_name

# Subclasses of `nn.Linear` and `nn.Conv1d` whose own forward computes the same, by package and
# name; those of whisper, OpenAI's package, in their input's dtype. They have to be listed, because
# code cannot tell what a forward computes.
_PRODUCTS = {
    ("transformers", "FalconLinear"),
    ("timm", "Linear"),
    ("whisper", "Linear"),
    ("whisper", "Conv1d"),
}

# _HARMLESS: what a subclass of a plain layer may define, although its LoRA layer will lack it.
# _CALLED: the double-underscore methods that can change what a module computes.
_HARMLESS = {"reset_parameters", "extra_repr", "_abc_impl", "_is_protocol", "_is_runtime_protocol"}
_CALLED = {"__call__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__"}


def is_linear(module: nn.Module) -> bool:
    """Returns whether "all-linear" counts a module as linear, whichever package it is from."""
    return isinstance(module, nn.Linear | nn.MultiheadAttention) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether this is Hugging Face's Conv1D: a linear layer whose weight is (in, out)."""
    return unparametrized_class(module).__name__ == "Conv1D" and hasattr(module, "nf")


def out_in(module: nn.Module, weight: Tensor) -> Tensor:
    """Returns a view of a module's weight as (out, in).

    Embeddings hold their weight as (in, out), and so do modules with `fan_in_fan_out` and
    upstream's Conv1D, which is not an `nn.Linear`. For a convolution, `in` is the product of all
    dimensions after the first.
    """
    if weight.dim() > 2:
        return weight.flatten(1)
    is_out_in = isinstance(module, nn.Linear | nn.MultiheadAttention)
    held_in_out = not is_out_in or getattr(module, "fan_in_fan_out", False)
    return weight.t() if held_in_out else weight


def unknown_layout(module: nn.Module, weight: Tensor) -> str | None:
    """Returns why `out_in` cannot be relied on for a weight, for an error, or None if it can.

    It takes the weight of an unknown class for (in, out), which its shape shows only if the weight
    is not square.
    """
    kind = unparametrized_class(module).__name__
    is_known = isinstance(module, nn.Embedding) or is_linear(module) or kind == "Conv1D"
    if is_known or weight.dim() != 2 or weight.shape[0] != weight.shape[1]:
        return None
    return f"a {kind}, whose square weight may be (out, in) or (in, out): make it an nn.Linear"


def out_in_sizes(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    """Returns the sizes of a module's weight as (out, in), even if the weight is quantized."""
    if is_quantized_linear(module):  # its weight may be packed
        layer: Any = module
        return layer.out_features, layer.in_features
    out, inner = out_in(module, weight.detach()).shape
    return out, inner


def scales_rows(embedding: nn.Module) -> bool:
    """Returns whether this is Hugging Face's embedding with scaled rows, as in BART and Gemma."""
    package, name = package_and_name(type(embedding))
    is_one = package == "transformers" and name.endswith("ScaledWordEmbedding")
    # T5Gemma 2's has a second parameter, which holds the row of one token.
    return is_one and embedding._parameters.keys() == {"weight"}


def computes_like(kind: type[nn.Module], plain: type[nn.Module]) -> bool:
    """Returns whether a subclass of one of PyTorch's layers computes as that layer does.

    It inherits its forward, or is one of the known classes that have another with the same result.
    """
    methods = ("forward", "_conv_forward")
    inherits = all(getattr(kind, each, None) is getattr(plain, each, None) for each in methods)
    return inherits or package_and_name(kind) in _PRODUCTS


def added_attributes(kind: type[nn.Module], plain: type[nn.Module]) -> set[str]:
    """Returns the attributes and methods that a subclass of a plain layer adds to it.

    Those of a class that comes after the plain layer among the bases count as well.
    """
    names = {name for each in kind.__mro__ if each not in plain.__mro__ for name in vars(each)}
    own = {name for name in names if not name.startswith("__") or name in _CALLED}
    return own - _HARMLESS - vars(plain).keys()
