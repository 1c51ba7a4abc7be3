"""Modules with LoRA that are replaced by others: saving says that their LoRA is lost."""

import copy

import pytest
from small_nets import Net, drawn
from torch import nn

import loralib as lora


def said(model, folder):
    remarks = lora.save_adapter(model, folder / f"{len(list(folder.iterdir()))}.safetensors")
    return [remark for remark in remarks if "is lost" in remark]


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_layer_that_was_replaced_is_named(tmp_path, is_copied):
    """As upstream's `resize_token_embeddings` and `dequantize` do."""
    model = Net()
    model.a = nn.Sequential(model.a)
    model = nn.ModuleDict({"net": drawn(model, ["a.0", "head"])})
    model["net"].head = nn.Linear(6, 9)
    if is_copied:
        model = copy.deepcopy(model)
    (remark,) = said(model["net"], tmp_path)
    assert remark == (
        "the LoRA of 1 module (head) is lost: replaced since add_lora, as by "
        "resize_token_embeddings or dequantize; adapt the model after that"
    )
    assert "the LoRA of 1 module (net.head) is lost" in said(model, tmp_path)[0]
    lora.add_lora(model["net"], "head", r=2)  # the way out
    assert not said(model, tmp_path)


def test_a_model_of_which_all_lora_was_replaced_says_so(tmp_path):
    """As libraries do that quantize a model's linear layers."""
    model = drawn(Net(), ["head"])
    model.head = nn.Linear(6, 9)
    message = r"Net has no LoRA to save: that of 1 module \(head\) is lost: replaced since add_lora"
    with pytest.raises(ValueError, match=message):
        lora.save_adapter(model, tmp_path / "a.safetensors")


def test_what_was_wrapped_moved_or_taken_away_is_not_named(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

    model = drawn(Net(), ["a", "b", "head"])
    model.a = Wrapper(model.a)
    del model.head
    assert not said(model, tmp_path)
    model = drawn(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), ["0", "2"])
    model.insert(0, nn.LayerNorm(6))
    assert not said(model, tmp_path)


@pytest.mark.parametrize("end", [lora.remove_lora, lora.merge])
def test_what_has_no_lora_any_more_is_not_named(tmp_path, end):
    model = nn.ModuleDict({"one": Net(), "two": Net()})
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    lora.add_lora(model, ["a", "head"], r=2)
    end(model["one"])
    assert not said(model, tmp_path)
    end(model["two"])
    after = {name: vars(module).keys() for name, module in model.named_modules()}
    assert after == before
