"""What torch.compile makes of a model, without a compiler for the graphs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def breaks_of(step: Callable[..., Any], *inputs: Any) -> list[str]:
    """Why a function is more than one graph: nothing where it is one."""
    torch.compiler.reset()
    found = torch._dynamo.explain(step)(*inputs)
    assert found.graph_count == 1 + found.graph_break_count
    return [str(reason) for reason in found.break_reasons]


def compile_layers(layers: Iterable[nn.Module]) -> list[Any]:
    """Has each layer computed as one graph, for any sizes of its inputs; or raises an error.

    Returns:
        A list to which every graph that is made is added.
    """
    torch.compiler.reset()
    graphs: list[Any] = []

    def note(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in layers:
        layer.compile(backend=note, fullgraph=True, dynamic=True)
    return graphs


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """A loss's gradients by parameter; the parameters keep none."""
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found
