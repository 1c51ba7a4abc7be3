"""Tests of compiling layers, without a compiler."""

import copy

import pytest
import torch
from torch import nn

from loralib.errors import TrainingError
from loralib.training import compiled


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.inner(x))


@pytest.fixture
def layers():
    torch.compiler.reset()
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(2))


def test_compiled_layers_keep_their_results_and_their_tensors_names(layers, monkeypatch):
    monkeypatch.setattr(compiled, "_BACKEND", "eager")
    expected = copy.deepcopy(layers)
    compiled.compile_layers(layers, torch.device("cpu"))
    assert [*layers.state_dict()] == [*expected.state_dict()]
    for tokens in (1, 2, 5):
        x = torch.randn(tokens, 3)
        for ours, theirs in zip(layers, expected, strict=True):
            assert torch.equal(ours(x), theirs(x))


def test_a_missing_compiler_is_an_error_of_one_line(layers, monkeypatch):
    def missing(graph, inputs):
        raise RuntimeError("no compiler found\nat all")

    monkeypatch.setattr(compiled, "_BACKEND", missing)
    message = r"torch.compile does not work here \(no compiler found\): train without it"
    with pytest.raises(TrainingError, match=f"^{message}$"):
        compiled.compile_layers(layers, torch.device("cpu"))


def test_an_unsupported_python_is_an_error_of_one_line(layers, monkeypatch):
    def compile(*args, **settings):
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(TrainingError, match=r"not supported on Python 3.99\+\): train without it"):
        compiled.compile_layers(layers, torch.device("cpu"))
