"""What torch.compile makes of a model, without compiling the graphs, and without a GPU."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from simulated_kernels import HALF, VARLEN_KERNELS
from torch import Tensor, nn

from loralib.nn import flash

aten = torch.ops.aten


def graph_breaks(step: Callable[..., Any], *inputs: Any) -> list[str]:
    """The reasons why a function is more than one graph; none if it is one."""
    torch.compiler.reset()
    found = torch._dynamo.explain(step)(*inputs)
    assert found.graph_count == 1 + found.graph_break_count
    return [str(reason) for reason in found.break_reasons]


def compile_layers(layers: Iterable[nn.Module]) -> list[Any]:
    """Makes each layer run as one graph for inputs of any size; raises an error if it cannot.

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


@contextmanager
def flash_on_cpu() -> Iterator[list[Any]]:
    """Makes attention in half precision take a GPU's kernel for packed rows, computed on the CPU.

    Yields:
        A list to which the longest row of every forward pass is added.
    """
    calls: list[Any] = []
    kernels = torch.library.Library("aten", "IMPL")
    forward = aten._flash_attention_forward.default

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[6])
        return VARLEN_KERNELS[forward](*args, **kwargs)

    for operator, kernel in {**VARLEN_KERNELS, forward: note}.items():
        kernels.impl(operator, kernel, "CPU")
    try:
        with mock.patch.object(flash, "suits", lambda query, *_: query.dtype in HALF):
            yield calls
    finally:
        kernels._destroy()


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """A loss's gradients by parameter; those of the parameters are reset to None."""
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found
