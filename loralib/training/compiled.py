"""torch.compile of a model's layers."""

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import TrainingError
from ..text import first_line

_BACKEND = "inductor"
# Graphs that a layer may have, beyond which PyTorch gives up: one each for training and evaluation,
# with and without a gradient of the input, for batches of one row and of several, and so on.
_GRAPHS = 64


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Has each layer computed as one graph, for any number of tokens.

    The layers stay what they are: their tensors keep their names.

    Args:
        layers: changed in place; compiled when they are first called.
        device: that they compute on.

    Raises:
        TrainingError: nothing can be compiled here.
    """
    _check_compiler(device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    for layer in layers:
        layer.compile(backend=_BACKEND, fullgraph=True, dynamic=True)


def _check_compiler(device: torch.device) -> None:
    """Compiles an addition, which takes what layers take: a Python and a compiler that it knows."""
    try:
        torch.compile(lambda x: x + 1, backend=_BACKEND)(torch.zeros(2, device=device))
    except Exception as error:
        # Of any kind: each part of the compiler has its own. Dynamo's holds the one that matters.
        why = first_line(getattr(error, "inner_exception", error))
        raise TrainingError(
            f"torch.compile does not work here ({why}): train without it"
        ) from error
