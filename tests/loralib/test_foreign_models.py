"""Tests of models with attributes, forwards and state of their own."""

import functools

import pytest
import torch
from small_nets import Net, close, drawn
from torch import nn

import loralib as lora
from loralib.errors import UnsupportedLayerError


@pytest.mark.parametrize("value", [0.5, nn.Parameter(torch.ones(1)), nn.Buffer(torch.ones(1))])
@pytest.mark.parametrize("name", ["scaling", "r", "merged", "base"])
def test_a_layer_with_an_attribute_that_lora_needs_is_refused(name, value):
    model = Net()
    setattr(model.a, name, value)
    with pytest.raises(UnsupportedLayerError, match=f"a has an attribute '{name}'"):
        lora.add_lora(model, ["a", "b"], r=2)
    assert type(model.b) is nn.Linear
    lora.add_lora(model, ["b"], r=2)


@pytest.mark.parametrize("name", ["lora_A", "lora_B", "lora_magnitude_vector", "lora_B_start"])
def test_a_buffer_called_like_a_part_of_an_update_is_refused(name):
    """The update would replace it, and removing the update would not bring it back."""
    model = Net()
    model.a.register_buffer(name, torch.ones(1))
    with pytest.raises(UnsupportedLayerError, match=f"a has an attribute '{name}'"):
        lora.add_lora(model, "a", r=2)


def test_a_layer_on_the_meta_device_is_refused(tmp_path):
    model = drawn(Net(), ["a"])
    lora.save_adapter(model, tmp_path / "a")
    model.a.to("meta")
    for refused in (
        lambda: lora.load_adapter(Net().to("meta"), tmp_path / "a"),
        lambda: lora.AdapterBank(Net().to("meta")).add("a", lora.read_adapter(tmp_path / "a")),
        lambda: lora.save_adapter(model, tmp_path / "b"),
        lambda: lora.merge(model),
    ):
        with pytest.raises(ValueError, match=r"a(.weight)? is on the meta device: load .* first"):
            refused()


def test_a_forward_that_was_set_can_be_deleted_as_the_error_says():
    model = drawn(Net(), ["a"])
    forward, x = model.a.forward, torch.randn(2, 6)
    expected = model(x)
    model.a.forward = lambda x: 2 * forward(x)
    with pytest.raises(ValueError, match=r"\(del model\.get_submodule\('a'\)\.forward\)$"):
        lora.merge(model)
    with pytest.raises(ValueError, match=r"^the layer has a .* \(del model\.forward\)$"):
        lora.merge(model.a)
    del model.get_submodule("a").forward
    close(lora.merge(model)(x), expected)


def test_a_layer_whose_forward_was_replaced_is_not_merged_or_restored():
    """Accelerate's offloading hooks do this, and keep the LoRA layer's forward."""
    model = drawn(Net(), ["a"])
    model.a.forward = functools.partial(model.a.forward)
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match=r"a has a forward of its own, set .*: delete it"):
            undo(model)
    model.a._hf_hook = object()
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match=r"a has a forward of its own, .*: remove these"):
            undo(model)
        assert isinstance(model.a, lora.LoRALayer)
    x = torch.randn(2, 6)
    model.a.forward = model.a.forward.func  # as these hooks leave it
    expected = model(x)
    lora.merge(model)
    assert "forward" not in vars(model.a)
    close(model(x), expected)
    model.a.forward = model.a.forward
    lora.add_lora(model, "a", r=2)
    nn.init.normal_(model.a.lora_B)
    assert not torch.allclose(model(x), expected, atol=1e-3)


class WithState(Net):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


@torch.no_grad()
def test_a_model_with_an_extra_state_that_is_not_a_tensor_works(tmp_path):
    base, x = WithState().eval(), torch.randn(2, 6)
    model = drawn(base, ["a"])
    lora.save_adapter(model, tmp_path / "a")
    lora.load_adapter(base, tmp_path / "a")
    assert torch.equal(base.eval()(x), model(x))
