"""Tests of modules that a model has under several names, or calls several times."""

import copy
from dataclasses import replace

import pytest
import torch
from any_models import names_of
from small_nets import close, drawn
from torch import nn

import loralib as lora
from loralib.adaptation import LayerSettings
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError
from loralib.inject import adapt


class Shared(nn.Module):
    """A linear layer that is used in two places."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 4)}) for _ in range(2))
        self.layers[1]["down"] = self.layers[0]["up"]

    def forward(self, x):
        return self.layers[1]["down"](torch.tanh(self.layers[1]["up"](self.layers[0]["up"](x))))


def test_a_module_under_two_names_is_adapted_once():
    model = Shared()
    assert lora.add_lora(model, "down", r=2) == ("layers.0.up",)
    assert model.layers[1]["down"] is model.layers[0]["up"]
    assert names_of(model) == ["layers.0.up"]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [p.shape for p in trained] == [(2, 4), (4, 2)]
    assert lora.remove_lora(model) == ("layers.0.up",)
    assert lora.add_lora(model, ["up", "down"], r=2) == ("layers.0.up", "layers.1.up")
    x = torch.ones(1, 4)
    with torch.no_grad():
        for layer in (model.layers[0]["up"], model.layers[1]["up"]):
            layer.lora_B.add_(0.5)
    expected = model(x)
    torch.testing.assert_close(lora.merge(model)(x), expected)


@pytest.mark.parametrize("settings", [{"layers": [1]}, {"exclude": "layers.0.up"}])
def test_a_module_targeted_under_one_name_and_left_out_under_another_is_refused(settings):
    message = "layers.1.down and layers.0.up are the same module, and the latter is left out"
    with pytest.raises(ValueError, match=message):
        lora.add_lora(Shared(), ["down"], r=2, **settings)


@pytest.mark.parametrize(
    "names", [("layers.0.up", "layers.1.down"), ("layers.1.down", "layers.0.up")]
)
def test_different_settings_for_one_module_are_refused(names):
    settings = {name: LayerSettings(r=rank, lora_alpha=1) for rank, name in enumerate(names, 1)}
    with pytest.raises(ValueError, match=f"{names[0]} and {names[1]} are the same module"):
        adapt(Shared(), settings)
    same = dict.fromkeys(settings, LayerSettings(r=1, lora_alpha=1))
    assert adapt(Shared(), same) == ("layers.0.up",)


def test_modules_to_train_cannot_contain_an_adapted_module_under_another_name():
    model = Shared()
    with pytest.raises(ValueError, match=r"layers.1 cannot be trained .* layers.0.up is ad"):
        lora.add_lora(model, "0.up", r=2, modules_to_train="layers.1")


class Repeated(nn.Module):
    """One block in three places, as in ALBERT, and a layer after it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh())] * 3)
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@torch.no_grad()
def test_an_update_that_a_file_has_under_one_or_several_names_is_added_once(tmp_path):
    base, x = Repeated().eval(), torch.randn(2, 6)
    model = drawn(base, ["layers.*.0", "last"])
    torch.save(lora.lora_state_dict(model), tmp_path / "a.bin")
    adapter = lora.read_adapter(tmp_path / "a.bin", lora_alpha=16)
    assert len(adapter.tensors) == 8
    others = ("layers.0.0.", "layers.2.0.")
    tensors = {name: t for name, t in adapter.tensors.items() if not name.startswith(others)}
    for each in (adapter, replace(adapter, tensors=tensors)):
        bank = lora.AdapterBank(base)
        bank.add("a", each)
        with bank.use("a"):
            close(base(x), model(x))
        merged = copy.deepcopy(base)
        merge_into(merged, each)
        close(merged(x), model(x))
    adapter.tensors["layers.1.0.lora_B"] = torch.ones(6, 2)
    with pytest.raises(CheckpointError, match=r"layers.1.0 and layers.0.0 are the same module"):
        merge_into(copy.deepcopy(base), adapter)


@pytest.mark.parametrize("file", ["a.safetensors", "folder_of_peft"])
@pytest.mark.parametrize(
    "apply",
    [
        pytest.param(lora.load_adapter, id="load"),
        pytest.param(lambda model, file: merge_into(model, lora.read_adapter(file)), id="merge"),
        pytest.param(
            lambda model, file: lora.AdapterBank(model).add("a", lora.read_adapter(file)), id="bank"
        ),
    ],
)
def test_an_adapter_of_a_repeated_block_is_refused_by_a_model_with_separate_blocks(
    apply, file, tmp_path
):
    """Their weights have equal names and values, but only the first block would get the update."""
    base = Repeated().eval()
    lora.save_adapter(drawn(base, ["layers.*.0", "last"]), tmp_path / file)
    blocks = base.layers[0], copy.deepcopy(base.layers[0])
    message = rf"{file}.*: layers\.0 and layers\.[12] are two modules here, but were one in the"
    for places in ([0, 0, 1], [0, 1, 0]):
        other = copy.deepcopy(base)
        other.layers = nn.ModuleList(blocks[place] for place in places)
        with pytest.raises(CheckpointError, match=message):
            apply(other, tmp_path / file)
    lora.save_adapter(drawn(base, ["last"]), tmp_path / f"last_{file}")
    apply(other, tmp_path / f"last_{file}")  # it does not reach the blocks
    apply(base, tmp_path / file)
