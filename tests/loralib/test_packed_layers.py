"""Tests that LoRA and banks keep bitsandbytes from packing 4-bit layers for evaluation on CPUs."""

import copy
import types

import pytest
from quantized_linears import Linear4bit, Net
from torch import nn

import loralib as lora

R = 2


def adapted(targets):
    model = Net("bitsandbytes")
    lora.add_lora(model, targets, r=R)
    return model


PACKED = r"the weight of layers.0.up has been packed for evaluation on this CPU: load the model ag"


def packed(**state):
    """A net in which bitsandbytes has packed a weight, and whose state dict must not be read."""
    model = Net("bitsandbytes")
    state = state or {"packing_format_for_cpu": True}
    layer = model.layers[0]["up"]
    layer.weight.quant_state = types.SimpleNamespace(**state)
    layer._save_to_state_dict = None
    return model


# The state of a layer that was packed, and then unpacked by `state_dict()` to other numbers.
UNPACKED = {"packing_format_for_cpu": False, "original_nested": True}


@pytest.mark.parametrize("state", [{}, UNPACKED])
@pytest.mark.parametrize("targets", ["up", "layers.1.down"])
def test_a_base_that_was_packed_for_evaluation_is_refused(tmp_path, targets, state):
    trained = adapted(targets)
    for name in ("a", "a.safetensors"):
        lora.save_adapter(trained, tmp_path / name)
        with pytest.raises(ValueError, match=PACKED):
            lora.load_adapter(packed(**state), tmp_path / name)
    with pytest.raises(ValueError, match=PACKED):
        lora.add_lora(packed(**state), targets)
    with pytest.raises(ValueError, match=PACKED):
        lora.AdapterBank(packed(**state))
    lora.add_lora(packed(packing_format_for_cpu=False), targets)


def test_a_packed_model_is_refused_when_it_is_saved(tmp_path):
    """Which layers come after the part with LoRA is unknown, so that any packed layer counts."""
    model = packed()
    lora.add_lora(model.layers[1], "up", r=R)
    with pytest.raises(ValueError, match=r"evaluation on this CPU: save the part that add_lora wa"):
        lora.save_adapter(model, tmp_path / "a")
    with pytest.raises(ValueError, match=PACKED):
        lora.lora_state_dict(model)
    lora.save_adapter(model.layers[1], tmp_path / "a")  # as the error says
    part = Net("bitsandbytes").layers[1]
    assert lora.load_adapter(part, tmp_path / "a") == ("up",)


def packing():
    """The net on a CPU for which bitsandbytes packs, with packing turned off in one layer."""
    model = Net("bitsandbytes")
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = name != "layers.1.down"
    return model


def packing_flags(model):
    layers = (m for m in model.modules() if isinstance(m, Linear4bit))
    return [layer.support_avx512bf16_for_cpu for layer in layers]


AS_BEFORE = [True, True, True, False]


def adapt(model, _):
    lora.add_lora(model, "layers.1.up")


def load(model, path):
    lora.save_adapter(adapted("layers.0.up"), path)
    lora.load_adapter(model, path)


@pytest.mark.parametrize("add", [adapt, load])
def test_no_layer_of_a_model_with_lora_is_packed(tmp_path, add, caplog):
    model = packing()
    add(model, tmp_path / "a")
    assert "packs" not in caplog.text
    assert not any(packing_flags(model))
    assert not any(packing_flags(copy.deepcopy(model)))
    lora.add_lora(model, "down")
    lora.remove_lora(model)
    assert packing_flags(model) == AS_BEFORE
    before = [vars(module).keys() for module in packing().modules()]
    assert [vars(module).keys() for module in model.modules()] == before


def test_layers_of_a_users_own_class_are_not_packed_either():
    model = packing()
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.__class__ = type("Mine", (Linear4bit,), {})
    lora.add_lora(model, "embed", r=R)
    assert not any(packing_flags(model))
    lora.remove_lora(model)
    assert packing_flags(model) == AS_BEFORE


@pytest.mark.parametrize("undo", [lora.remove_lora, lora.merge])
def test_a_part_without_lora_is_not_packed_while_the_rest_has_some(undo):
    model = packing()
    model.layers[1]["between"] = nn.Linear(8, 8)
    lora.add_lora(model, ["layers.0.up", "between"], r=R)
    undo(model.layers[1])
    assert not any(packing_flags(model))
    lora.remove_lora(model)
    assert packing_flags(model) == AS_BEFORE


def test_removing_what_a_second_call_added_does_not_let_that_part_be_packed():
    model = packing()
    adapt(model, None)
    lora.add_lora(model.layers[0], "up")
    lora.remove_lora(model.layers[0])
    assert not any(packing_flags(model))
    lora.remove_lora(model)
    assert packing_flags(model) == AS_BEFORE


def test_no_layer_of_a_model_with_a_bank_is_packed():
    model = packing()
    banks = [lora.AdapterBank(model) for _ in range(2)]
    assert not any(packing_flags(model))
    assert not any(packing_flags(copy.deepcopy(model)))
    adapt(model, None)
    lora.remove_lora(model)
    assert not any(packing_flags(model))
    banks[0].close()
    banks[0].close()
    assert not any(packing_flags(model))
    adapt(model, None)
    banks[1].close()
    lora.remove_lora(model)
    assert not any(packing_flags(model))  # the model could get no other bank then


def test_packing_can_be_turned_off_by_hand_in_a_model_with_lora():
    model = packing()
    adapt(model, None)
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
