"""Tests of how layers hold their weights."""

import pytest
import torch
from any_models import Conv1D
from torch import nn

import loralib as lora
from loralib.layer_kinds import out_in


@pytest.mark.parametrize(
    ("module", "held_in_out"),
    [
        (nn.Linear(3, 3), False),
        (lora.Linear(3, 3), False),
        (lora.Linear(3, 3, fan_in_fan_out=True), True),
        (lora.MergedLinear(3, 3), False),
        (lora.MergedLinear(3, 3, fan_in_fan_out=True), True),
        (Conv1D(3, 3), True),
        (nn.Embedding(3, 3), True),
    ],
)
def test_out_in_is_a_view(module, held_in_out):
    weight = torch.arange(9.0).reshape(3, 3)
    view = out_in(module, weight)
    assert torch.equal(view, weight.t() if held_in_out else weight)
    view[0, 1] = -1
    assert (weight == -1).any()
