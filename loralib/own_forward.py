"""Classes with a forward of their own: what they compute, tried on small weights.

A subclass of one of PyTorch's layers may spell out what the layer does, or scale it. Whether that
is all is tried on a stand-in: an object of the class, with the module's attributes but other
parameters. So the module itself may be on any device and in any precision, and stays as it is.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# How an embedding looks up rows that are not those of its vocabulary.
OF_ANY_ROWS = {"padding_idx": None, "scale_grad_by_freq": False, "sparse": False}


def gives_product(module: Any) -> bool:
    """Whether a subclass of `nn.Linear` gives x Wᵀ + b, as upstream's Falcon's does."""
    if {*module._parameters, *module._buffers, *module._modules} != {"weight", "bias"}:
        return False
    draw = _draw()
    x, weight = draw(2, 4, 5), draw(3, 5)
    bias = None if module.bias is None else draw(3)
    sizes = {"in_features": 5, "out_features": 3}
    results = _tried(module, x, {"weight": weight, "bias": bias}, **sizes)
    return all(_are_same(result, F.linear(x, weight, bias)) for result in results)


def scales_rows(module: Any) -> bool:
    """Whether a subclass of `nn.Embedding` gives c · W[i], as upstream's Gemma's and BART's do."""
    buffers = {name: each for name, each in module._buffers.items() if each is not None}
    is_plain = not module._modules and module._parameters.keys() == {"weight"}
    if not is_plain or any(each.dim() > 0 for each in buffers.values()):
        return False
    draw = _draw()
    weight, numbers = draw(4, 3), torch.tensor([[3, 0, 3], [1, 2, 0]], device="cpu")
    held: dict[str, Any] = {"_buffers": {name: draw(()) for name in buffers}, **OF_ANY_ROWS}
    results = _tried(module, numbers, {"weight": weight}, **held)
    rows, others = weight[numbers], _tried(module, draw(2, 4), {"weight": weight}, **held)
    is_scaled = all(_are_same(result, rows * _ratio(result, rows)) for result in results)
    return is_scaled and others == [None]  # what is given no row numbers, it does not take either


def computed_as(
    kind: type[nn.Module],
    module: nn.Module,
    x: Tensor,
    parameters: dict[str, Tensor | None],
    **attributes: Any,
) -> Any:
    """What the forward of a class gives for a module with other parameters and attributes.

    Args:
        kind: the class, which the module is of or was of.
        module: the module, on which nothing is changed.
        x: the input.
        parameters: all of them.
        attributes: those that differ from the module's.
    """
    stand_in = object.__new__(kind)
    vars(stand_in).update(vars(module), _parameters=parameters, **attributes)
    return kind.forward(stand_in, x)


def _draw() -> Any:
    """Draws tensors in float64, the same ones each time."""
    return partial(torch.randn, dtype=torch.float64, device="cpu", generator=torch.Generator())


def _tried(
    module: Any, x: Tensor, parameters: dict[str, Tensor | None], **attributes: Any
) -> list[Any]:
    """What a module's class computes with other parameters, in evaluation and in training.

    None where that is an error: it needs what is not there.
    """
    kind = type(module)
    try:
        with torch.no_grad():
            return [
                computed_as(kind, module, x, parameters, **attributes, training=training)
                for training in (False, True)
            ]
    except Exception:
        return [None]


def _are_same(result: object, expected: Tensor) -> bool:
    """Whether a result is this tensor, but for the last bits."""
    return (
        isinstance(result, Tensor)
        and (result.dtype, result.shape) == (expected.dtype, expected.shape)
        and torch.allclose(result, expected, rtol=1e-9, atol=1e-9)
    )


def _ratio(result: Any, rows: Tensor) -> float:
    """What the first number was multiplied by."""
    is_alike = isinstance(result, Tensor) and result.shape == rows.shape
    return (result.flatten()[0] / rows.flatten()[0]).item() if is_alike else 0.0
