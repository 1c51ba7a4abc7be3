"""A table of LoRA layers × what becomes of their weights: saved, copied, merged."""

import copy
import pickle

import pytest
import torch
from layer_cases import (
    CASES,
    WITH_DROPOUT,
    base_of,
    bits,
    built,
    close,
    randomised,
    reference,
    run_plain,
    same_as_plain,
    trainable,
)
from torch import nn

import loralib as lora

# ---- The frozen weight, and what is saved ----


def test_the_frozen_weight_keeps_its_bits(case, tmp_path):
    layer, x = built(case), case.x()
    before = bits(layer)
    optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.1)
    for _ in range(3):
        layer.train()
        layer(x).sum().backward()
        optimizer.step()
        layer.eval()
        with torch.no_grad():
            layer(x)
        torch.save(layer.state_dict(), tmp_path / "state.pt")
        layer.to("cpu").to(torch.float32)
        layer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        layer = copy.deepcopy(layer)
        layer(x)
        optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.1)
    assert torch.equal(bits(layer), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_weight_keeps_its_bits_through_a_wider_dtype(case, dtype):
    layer, x = built(case).to(dtype), case.x()
    before = bits(layer)
    for _ in range(3):
        layer.float().eval()
        with torch.no_grad():
            layer(x)
        layer.train().to(dtype)
    assert torch.equal(bits(layer), before)


@pytest.mark.parametrize("saved_in", [True, False])
@pytest.mark.parametrize("loaded_in", [True, False])
def test_states_are_the_same_in_both_modes(case, saved_in, loaded_in):
    layer, other, x = built(case), built(case), case.x()
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        expected = layer(x)
        layer.train(saved_in)(x)
        other.train(loaded_in)(x)
        torch.testing.assert_close(layer.state_dict(), state, atol=0, rtol=0)
        other.load_state_dict(layer.state_dict(), strict=True)
        for mode in (loaded_in, True, False):
            close(other.train(mode)(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_is_whole_and_its_own(case, copied):
    layer, x = built(case).eval(), case.x()
    with torch.no_grad():
        expected = layer(x)
        other = copied(layer)
        assert other._merged_copy is None
        close(other(x), expected)
        randomised(other)
        close(other(x), reference(other, x))
        close(layer(x), expected)


# ---- The merged copy is never stale ----


def step(**kwargs):
    def change(layer):
        layer.lora_A.grad = torch.ones_like(layer.lora_A)
        torch.optim.AdamW([layer.lora_A], lr=0.3, **kwargs).step()

    return change


def assign_data(layer):
    layer.lora_B.data = layer.lora_B.data + 1


def assign_parameter(layer):
    layer.lora_B = nn.Parameter(layer.lora_B.detach() + 1)


def load(layer, assign=False):
    state = {name: value * 1.5 for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


CHANGES = {
    "step": step(foreach=False),
    "foreach-step": step(foreach=True),
    "load": load,
    "load-assign": lambda layer: load(layer, assign=True),
    "assign-data": assign_data,
    "assign-parameter": assign_parameter,
    "base-in-place": lambda layer: base_of(layer).weight.detach().mul_(2),
    "base-data-then-eval": lambda layer: (base_of(layer).weight.data.mul_(2), layer.eval()),
    "cast": lambda layer: layer.bfloat16().float(),
    "cast-part": lambda layer: base_of(layer).bfloat16().float(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_merged_copy_follows_every_change(case, change, mode):
    layer, x = built(case).eval(), case.x()
    with mode():
        before = layer(x)
        made = layer._merged_copy
        layer(x)
        assert layer._merged_copy is made  # it is made once
    change(layer)
    with mode():
        assert not torch.allclose(layer(x), before, atol=1e-4)
        close(layer(x), reference(layer, x))


def test_a_fused_step_after_a_backward_in_evaluation_mode_is_seen(case):
    layer, x = built(case).eval(), case.x()
    optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.3, fused=True)
    for _ in range(2):
        with torch.no_grad():
            close(layer(x), reference(layer, x))
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        close(layer(x), reference(layer, x))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_step_after_a_forward_between_it_and_its_backward_is_seen(case, kind):
    layer, x = built(case).eval(), case.x()
    optimizer = kind(trainable(layer).values(), lr=0.1, fused=True)
    layer(x).square().sum().backward()
    with torch.no_grad():
        layer(x)  # somebody logs something, for which the merged copy is made
        optimizer.step()
        close(layer(x), reference(layer, x))


def test_a_frozen_layer_keeps_its_copy_while_another_model_is_trained():
    layer, x = built(CASES["linear"]).eval().requires_grad_(False), CASES["linear"].x()
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([other], lr=0.1)
    copies = []
    for _ in range(2):
        layer(x)
        copies.append(layer._merged_copy)
        other.sum().backward()
        optimizer.step()
    assert copies[0] is copies[1]


def test_a_parametrization_of_a_factor_is_seen():
    layer = built(CASES["linear"]).eval()
    torch.nn.utils.parametrize.register_parametrization(layer, "lora_A", nn.Tanh())
    x = CASES["linear"].x()
    with torch.no_grad():
        layer(x)
        layer.parametrizations.lora_A.original.mul_(3)
        close(layer(x), reference(layer, x))


def test_the_scaling_can_be_changed(case):
    layer, x = built(case).eval(), case.x()
    with torch.no_grad():
        layer(x)
        layer.scaling = 0
        close(layer(x), run_plain(layer, x, base_of(layer).weight))


def test_a_layer_made_in_inference_mode_computes(case):
    with torch.inference_mode():
        layer, x = built(case).eval(), case.x()
        close(layer(x), reference(layer, x))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_copy_made_in_inference_mode_serves_autograd(name):
    layer, x = built(CASES[name]).requires_grad_(False).eval(), CASES[name].x()
    with torch.inference_mode():
        layer(x)
    made = layer._merged_copy
    x.requires_grad = True
    layer(x).sum().backward()
    assert layer._merged_copy is made
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("leave", [lambda layer: layer.train(), lambda layer: layer.half()])
def test_the_merged_copy_is_dropped(case, leave):
    layer = built(case).eval()
    with torch.no_grad():
        layer(case.x())
    assert layer._merged_copy is not None
    leave(layer)
    assert layer._merged_copy is None


# ---- merge ----


def test_merge_of_a_layer_gives_its_plain_counterpart(case):
    layer, plain, x = built(case), case.plain(), case.x()
    before = bits(layer)
    folded = lora.merge(layer.eval())
    assert type(folded) is type(plain)
    assert repr(folded) == repr(plain)
    assert folded.training is False
    plain.load_state_dict(folded.state_dict(), strict=True)
    close(plain(x), reference(layer, x))
    assert torch.equal(bits(layer), before)
    assert folded.weight.is_contiguous()
    assert folded.weight.requires_grad is False


def test_merge_of_rank_0_shares_the_weights(case):
    layer, x = case.make(r=0), case.x()
    folded = lora.merge(layer)
    assert type(folded) is type(case.plain())
    same_as_plain(layer, layer(x), folded(x))
    assert folded.weight.data_ptr() == base_of(layer).weight.data_ptr() or layer.fan_in_fan_out
