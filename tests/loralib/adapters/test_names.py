"""Tests of what tensors' names show about the layers of their model."""

import pytest
import torch
from torch import nn

import loralib as lora
from loralib.adapters.names import more_layers
from loralib.errors import CheckpointError


@pytest.mark.parametrize(
    ("theirs", "ours", "layers"),
    [
        (["a.0.q", "a.1.q", "a.11.q"], ["a.0.q", "a.1.q"], (12, 2)),
        (["a.2.q"], ["a.0.q", "a.1.q", "head"], (3, 2)),
        (["2.q"], ["0.q"], (3, 1)),
        (["a.0.q"], ["a.0.q", "a.1.q"], None),  # the adapter has fewer layers
        (["a.2.q", "a.0.k"], ["a.0.q", "a.1.q"], None),  # another module too
        (["b.2.q"], ["a.0.q", "a.1.q"], None),  # another model
        (["a.2.q", "out"], ["a.0.q"], None),
        (["a.0.b.5.q"], ["a.0.b.0.q"], None),  # it is unknown which number is the layer's
        (["a.2.b.5.q"], ["a.0.b.0.q"], None),  # so it may not only have more of them
        (["a.0.q", "a.1.q"], ["a.0.q", "a.1.k"], None),  # as many layers, of other kinds
        (["q"], ["k"], None),
        ([], [], None),
    ],
)
def test_more_layers_returns_the_numbers_of_layers_if_only_those_differ(theirs, ours, layers):
    assert more_layers(theirs, ours) == layers


def stack(layers):
    blocks = (nn.ModuleDict({"q": nn.Linear(4, 4)}) for _ in range(layers))
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(4, 2)})


def test_the_error_says_if_an_adapters_base_has_more_layers(tmp_path):
    model, path = stack(12), tmp_path / "a.safetensors"
    lora.add_lora(model, "q", r=2)
    for block in model["blocks"]:
        nn.init.ones_(block["q"].lora_B)
    lora.save_adapter(model, path)
    message = (
        r"no blocks\.\S+ to adapt: its base has at least 12 layers, this model has 3; give the m"
    )
    small = stack(3)
    for load in (
        lambda: lora.load_adapter(small, path),
        lambda: lora.AdapterBank(small).add("a", lora.read_adapter(path)),
    ):
        with pytest.raises(CheckpointError, match=message):
            load()
    assert not any("lora_" in name for name in small.state_dict())
    other = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    with pytest.raises(CheckpointError, match=r"to adapt: give the model that it was trained"):
        lora.load_adapter(other, path)
    again = stack(12)
    again.load_state_dict({n: t for n, t in model.state_dict().items() if "lora_" not in n})
    assert len(lora.load_adapter(again, path)) == 12
    assert torch.equal(again["blocks"][11]["q"].lora_A, model["blocks"][11]["q"].lora_A)
