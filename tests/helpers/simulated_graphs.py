"""Simulates CUDA graphs on the simulated GPU: a replay runs the recorded step again.

    with SimulatedGpu(), SimulatedGraphs() as graphs:
        ...
    assert graphs.recorded == 2 and graphs.replays == 10

As with a real graph, the step reads the tensors that it was recorded with, and writes its loss and
gradients to the same memory each time.
"""

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from loralib.training import cuda_graphs
from loralib.training.cuda_graphs import GraphedStep


def _get_random_state(device: torch.device | None = None) -> Tensor:
    return torch.get_rng_state()


def _set_random_state(state: Tensor, device: torch.device | None = None) -> None:
    torch.set_rng_state(state)


_record_of_the_step = GraphedStep._record


def _record(step: GraphedStep, *given: object) -> object:
    """Records a step. Recording computes nothing, so sums of gradients stay as they are."""
    held = {parameter: total.clone() for parameter, total in step._sums.items()}
    recorded = _record_of_the_step(step, *given)
    for parameter, total in held.items():
        step._sums[parameter].copy_(total)
    return recorded


class SimulatedGraphs:
    """CUDA graphs within a ``with`` block; counts graphs and replays."""

    def __init__(self):
        self.recorded = self.replays = 0
        self._patches = [
            mock.patch.object(GraphedStep, "_record", _record),
            mock.patch.object(cuda_graphs, "_warm_up", lambda run, stream: run()),
            mock.patch.object(cuda_graphs, "_capture", self._capture),
            mock.patch("torch.cuda.graph_pool_handle"),
            mock.patch("torch.cuda.Stream"),
            mock.patch("torch.cuda.get_rng_state", _get_random_state),
            mock.patch("torch.cuda.set_rng_state", _set_random_state),
        ]

    def __enter__(self) -> "SimulatedGraphs":
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_) -> None:
        for patch in reversed(self._patches):
            patch.stop()

    def _capture(
        self, run: Callable[[], Tensor], stream: object, pool: object
    ) -> tuple["_Graph", Tensor]:
        state = torch.get_rng_state()
        loss = run()
        torch.set_rng_state(state)  # recording draws no random numbers
        self.recorded += 1
        return _Graph(self, run, loss), loss


class _Graph:
    def __init__(self, graphs: SimulatedGraphs, run: Callable[[], Tensor], loss: Tensor):
        self.graphs, self.run, self.loss = graphs, run, loss

    def replay(self) -> None:
        """Runs the step, which adds to the gradients that the parameters have."""
        self.graphs.replays += 1
        self.loss.copy_(self.run())
