"""Tests of `load_into`: what fits is loaded bit-exact, anything else is refused with a reason."""

from dataclasses import replace

import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits
from tiny_adapters import FORMATS, INFO, A, Tiny, refuses, tiny_adapter
from torch import nn

import loralib as lora
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.loading import load_into
from loralib.adapters.names import lora_targets
from loralib.adapters.saving import adapter_of
from loralib.errors import CheckpointError
from loralib.lora_layer import lora_layers


def test_lora_layers_finds_layers_and_lora_targets_their_last_names():
    layers = lora_layers(Tiny(targets=("key",)))
    assert sorted(layers) == ["roberta.layer.0.key", "roberta.layer.1.key"]
    assert lora_targets(layers) == ("key",)
    assert lora_targets(["b.value", "a.query", "c.value", "top"]) == ("query", "top", "value")
    assert lora_layers(Tiny(targets=())) == {}


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FORMATS)
def test_load_into_copies_the_adapter_bit_exact_and_nothing_else(tmp_path, name, mode):
    adapter = tiny_adapter(seed=1)
    write_adapter(tmp_path / name, adapter)
    model, x = Tiny(seed=2).train(mode), torch.randn(2, 8)
    frozen = {n: t.clone() for n, t in model.state_dict().items() if n not in adapter.tensors}
    layer = model.roberta["layer"][0].query
    before = layer(x)
    assert load_into(model, read_adapter(tmp_path / name), INFO.base_fingerprint) == []
    state = model.state_dict()
    assert_same_bits({n: state[n] for n in adapter.tensors}, adapter.tensors)
    assert_same_bits({n: state[n] for n in frozen}, frozen)
    update = adapter.tensors[A.replace("_A", "_B")] @ adapter.tensors[A]
    expected = nn.functional.linear(x, layer.weight + 2 * update, layer.bias)
    assert_close_to_rounding(layer(x), expected, terms=8 + 2 * INFO.rank)
    assert not torch.allclose(layer(x), before)


def test_alpha_may_be_an_integer_or_a_float():
    assert load_into(Tiny(), tiny_adapter(replace(INFO, alpha=4))) == []


def test_the_error_names_a_module_with_another_alpha():
    model, adapter = Tiny(), tiny_adapter()
    layer = model.roberta["layer"][0].query
    layer.lora_alpha, layer.scaling = 2 * layer.lora_alpha, 2 * layer.scaling
    refuses(model, adapter, "alpha 4.0, the model was built with 8 (in roberta.layer.0.query)")


def test_slices_of_the_same_shapes_are_compared():
    def built(*enabled):
        return nn.Sequential(lora.MergedLinear(8, 24, r=2, lora_alpha=4, enable_lora=[*enabled]))

    model = built(True, False, True)
    adapter = adapter_of(model)
    assert load_into(built(True, False, True), adapter, backbones=["0."]) == []
    other = built(False, True, True)
    in_file, in_model = r"\[True, False, True\]", r"\[False, True, True\]"
    message = f"slices of 0 {in_file}, the model was built with {in_model}"
    with pytest.raises(CheckpointError, match=f"^Sequential: was trained with {message}"):
        load_into(other, adapter, backbones=["0."])
    # Without a record of slices in the file, they are not compared.
    unknown = replace(adapter, metadata=replace(adapter.metadata, slices=None))
    assert load_into(other, unknown, backbones=["0."]) == []


def test_new_head_keeps_the_models_head_if_shapes_differ():
    model, adapter = Tiny(labels=2, seed=5), tiny_adapter()
    head = model.classifier.weight.clone()
    message = r"classifier.weight is \(3, 8\) in the file, \(2, 8\) in the model$"
    with pytest.raises(CheckpointError, match=message):
        load_into(model, adapter)
    skipped = load_into(model, adapter, new_head=True)
    assert sorted(skipped) == ["classifier.bias", "classifier.weight"]
    assert torch.equal(model.classifier.weight, head)
    assert torch.equal(model.state_dict()[A], adapter.tensors[A])

    same_shape = Tiny(seed=5)
    assert load_into(same_shape, adapter, new_head=True) == []
    assert torch.equal(same_shape.classifier.bias, adapter.tensors["classifier.bias"])
    refuses(Tiny(rank=4), replace(adapter, metadata=None), "rank 2, not 4", new_head=True)
