"""Compiles a model's layers with torch.compile."""

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import TrainingError
from ..text import first_line

_BACKEND = "inductor"
# How many graphs a layer may have before PyTorch gives up. It has one each for training and
# evaluation, with and without a gradient of the input, for batches of one row and of several, etc.
_GRAPHS = 64


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Compiles each layer to one graph for any number of tokens.

    The layers stay the same modules, and their tensors keep their names.

    Args:
        layers: changed in place; compiled when they are first called.
        device: where they compute.

    Raises:
        TrainingError: torch.compile does not work here.
    """
    _check_compiler(device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    for layer in layers:
        layer.compile(backend=_BACKEND, fullgraph=True, dynamic=True)


def _check_compiler(device: torch.device) -> None:
    """Compiles an addition, which like layers needs a supported Python and a C++ or GPU compiler.

    Raises:
        TrainingError: it cannot be compiled.
    """
    try:
        torch.compile(lambda x: x + 1, backend=_BACKEND)(torch.zeros(2, device=device))
    except Exception as error:
        # Each part of the compiler has its own errors. Dynamo's wraps the one that matters.
        why = first_line(getattr(error, "inner_exception", error))
        raise TrainingError(
            f"torch.compile does not work here ({why}): train without it"
        ) from error
