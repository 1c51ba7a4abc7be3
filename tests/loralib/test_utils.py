"""Tests of what is trained, what is saved, and merging whole models."""

import copy
import logging

import pytest
import torch
from compare import assert_close_to_rounding
from torch import nn

import loralib as lora

# The terms of consecutive sums in `Model`: a convolution and five products.
TERMS = 3 * 4 + 2 * 8 + 3 * 4


class Model(nn.Module):
    """Every kind of layer, with and without an update, one of them in two places."""

    def __init__(self):
        super().__init__()
        self.embed = lora.Embedding(9, 4, r=2)
        self.conv = lora.Conv1d(4, 4, 3, r=2, padding=1)
        self.blocks = nn.ModuleList([lora.MergedLinear(4, 8, r=2, enable_lora=[True, False])])
        self.down = lora.Linear(8, 4, r=2, fan_in_fan_out=True)
        self.again = self.down
        self.norm = nn.LayerNorm(4)
        self.rank_0 = lora.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.conv(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        x = self.down(self.blocks[0](x)) + x
        return self.head(self.rank_0(self.norm(self.again(torch.cat([x, x], dim=-1)))))


LORA = {
    f"{layer}.lora_{ab}" for layer in ("embed", "conv", "blocks.0", "down", "again") for ab in "AB"
}
LORA_BIASES = {"conv.conv.bias", "blocks.0.bias", "down.bias", "again.bias"}
TRAINED = {
    "none": LORA,
    "lora_only": LORA | LORA_BIASES,
    "all": LORA | LORA_BIASES | {"norm.bias", "rank_0.bias"},
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("bias", TRAINED)
def test_what_is_trainable_is_what_is_saved(model, bias, caplog):
    lora.mark_only_lora_as_trainable(model, bias=bias)
    parameters = model.named_parameters(remove_duplicate=False)
    assert {name for name, p in parameters if p.requires_grad} == TRAINED[bias]
    saved = lora.lora_state_dict(model, bias=bias)
    assert saved.keys() == TRAINED[bias]
    state = model.state_dict()
    assert all(saved[name].data_ptr() == state[name].data_ptr() for name in saved)
    assert not caplog.records


@pytest.mark.parametrize("trained", TRAINED)
def test_what_was_trained_but_is_not_in_the_state_is_warned_of(model, trained, caplog):
    lora.mark_only_lora_as_trainable(model, bias=trained)
    optimizer = torch.optim.SGD(lora.parameter_groups(model, lr=0.1))
    model(torch.arange(9)[None]).square().mean().backward()
    optimizer.step()
    for bias in TRAINED:
        lora.lora_state_dict(model, bias=bias)
        left_out = TRAINED[trained] - TRAINED[bias]
        assert len(caplog.records) == bool(left_out)
        assert all(f"bias={bias!r}) leaves out " in r.getMessage() for r in caplog.records)
        caplog.clear()


def test_the_default_is_no_bias(model):
    lora.mark_only_lora_as_trainable(model)
    assert lora.lora_state_dict(model).keys() == LORA
    assert not any(p.requires_grad for n, p in model.named_parameters() if "bias" in n)


@pytest.mark.parametrize("bias", TRAINED)
def test_the_lora_of_a_model_that_was_frozen_as_a_whole_is_trained(model, bias):
    lora.mark_only_lora_as_trainable(model.requires_grad_(False), bias=bias)
    parameters = model.named_parameters(remove_duplicate=False)
    assert {name for name, p in parameters if p.requires_grad} == TRAINED[bias]


def test_lora_that_was_frozen_by_hand_stays_frozen(model):
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad = False
    lora.mark_only_lora_as_trainable(model)
    parameters = model.named_parameters(remove_duplicate=False)
    assert {name for name, p in parameters if p.requires_grad} == {n for n in LORA if "lora_B" in n}
    fixed = lora.Linear(4, 4, r=2, freeze_A=True)
    lora.mark_only_lora_as_trainable(fixed.requires_grad_(True))
    assert [name for name, p in fixed.named_parameters() if p.requires_grad] == ["lora_B"]
    fixed.requires_grad_(False)
    fixed.register_parameter("lora_index", nn.Parameter(torch.arange(2), requires_grad=False))
    lora.mark_only_lora_as_trainable(fixed)
    assert [name for name, p in fixed.named_parameters() if p.requires_grad] == ["lora_B"]


def test_a_module_with_lora_in_its_name_is_not_unfrozen():
    model = nn.ModuleDict({"flora_net": nn.Linear(4, 4)}).requires_grad_(False)
    lora.mark_only_lora_as_trainable(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_marking_again_with_another_choice_starts_afresh(model):
    """Gradients of what is frozen then are dropped, which an optimizer would still apply."""
    lora.mark_only_lora_as_trainable(model, bias="all")
    model(torch.randint(9, (2, 5))).sum().backward()
    lora.mark_only_lora_as_trainable(model)
    assert not model.norm.bias.requires_grad
    parameters = model.named_parameters(remove_duplicate=False)
    assert {name for name, p in parameters if p.grad is not None} == LORA


@pytest.mark.parametrize("bias", ["some", None, "ALL"])
def test_an_unknown_bias_is_refused_and_nothing_is_changed(model, bias):
    before = [p.requires_grad for p in model.parameters()]
    for function in (lora.mark_only_lora_as_trainable, lora.lora_state_dict):
        with pytest.raises(ValueError, match=f"none, all, lora_only, got {bias!r}"):
            function(model, bias=bias)
    assert [p.requires_grad for p in model.parameters()] == before


def test_a_model_without_lora_is_frozen_with_a_warning(caplog):
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, logger="loralib"):
        lora.mark_only_lora_as_trainable(model)
    assert "Linear has no LoRA parameters" in caplog.text
    assert not any(p.requires_grad for p in model.parameters())
    assert lora.lora_state_dict(model) == {}
    assert "Linear has no LoRA parameters: its lora_state_dict holds none" in caplog.text


def test_the_saved_part_restores_the_model(model):
    ids = torch.randint(9, (2, 5))
    expected = model(ids)
    other = Model()
    base = {name: value for name, value in model.state_dict().items() if "lora_" not in name}
    assert not other.load_state_dict(base, strict=False).unexpected_keys
    assert not torch.allclose(other(ids), expected)
    missing, unexpected = other.load_state_dict(lora.lora_state_dict(model.eval()), strict=False)
    assert not unexpected
    assert not any("lora_" in name for name in missing)
    assert_close_to_rounding(other(ids), expected, TERMS)


@pytest.mark.parametrize("mode", [True, False])
def test_merge_of_a_model(model, mode):
    model.train(mode)
    ids = torch.randint(9, (2, 5))
    expected = model(ids)
    original = copy.deepcopy(model)
    assert lora.merge(model) is model
    assert not any(isinstance(layer, lora.LoRALayer) for layer in model.modules())
    assert not any("lora_" in name for name in model.state_dict())
    assert all(layer.training is mode for layer in model.modules())
    assert model.down is model.again
    assert model.down.weight.shape == (4, 8)
    assert_close_to_rounding(model(ids), expected, TERMS)
    # What was tied to a frozen weight stays the frozen weight.
    assert torch.equal(model.head.weight, original.embed.weight)


@pytest.mark.parametrize("part", ["", "down"])
def test_a_model_that_is_merged_in_inference_mode_can_be_trained(model, part):
    with torch.inference_mode():
        merged = lora.merge(model.get_submodule(part))
    merged.requires_grad_(True)
    x = torch.zeros(2, 5, dtype=torch.long) if merged is model else torch.ones(2, 8)
    merged(x).sum().backward()
    assert all(parameter.grad is not None for parameter in merged.parameters())


def test_merge_of_a_model_without_lora_is_an_error(model):
    """For example if no adapter was loaded. Layers of rank 0 are made plain, however."""
    assert type(lora.merge(nn.Sequential(lora.Linear(2, 2, r=0)))[0]) is nn.Linear
    for plain in (nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), lora.merge(model)):
        with pytest.raises(ValueError, match=r"^the model has no LoRA to merge: load its adapter"):
            lora.merge(plain)


def test_merge_of_a_single_layer_returns_a_new_plain_one(model):
    state = copy.deepcopy(model.down.state_dict())
    merged = lora.merge(model.down)
    assert type(merged) is nn.Linear
    assert type(model.down) is lora.Linear
    torch.testing.assert_close(model.down.state_dict(), state, atol=0, rtol=0)


class Foreign(nn.Module, lora.LoRALayer):
    """A layer written for 0.1.2, outside this package."""

    def __init__(self):
        nn.Module.__init__(self)
        lora.LoRALayer.__init__(self, r=2, lora_alpha=4, lora_dropout=0.0, merge_weights=True)
        self.lora_A = nn.Parameter(torch.ones(2, 3))
        self.bias = nn.Parameter(torch.ones(3))

    def train(self, mode=True):
        nn.Module.train(self, mode)
        self.merged = not mode
        return self


def test_a_layer_of_another_package_derived_from_loralayer():
    layer = Foreign().eval()
    assert (layer.scaling, layer.merged) == (2.0, True)
    lora.mark_only_lora_as_trainable(layer, bias="lora_only")
    assert layer.bias.requires_grad
    assert lora.lora_state_dict(layer, bias="lora_only").keys() == {"lora_A", "bias"}
    with pytest.raises(TypeError, match="Foreign has a forward of its own and no merged_layer"):
        lora.merge(nn.Sequential(layer))
