"""Tests of LoRA layers in half precision, in mixed precision, and under autocast."""

import copy

import pytest
import torch
from compare import rounding
from layer_cases import (
    CASES,
    WITH_DROPOUT,
    R,
    base_of,
    built,
    close,
    close_in_half,
    gradients,
    reference,
    update,
)

import loralib as lora


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_can_be_all_in_half_precision(case, mode, dtype):
    layer, x = built(case).to(dtype).train(mode), case.x()
    wide = copy.deepcopy(layer).float()
    x = x.to(dtype) if x.is_floating_point() else x
    out = layer(x)
    assert out.dtype == dtype
    expected = reference(wide, x.float() if x.is_floating_point() else x)
    close_in_half(out.float(), expected, atol=0.2, rtol=0.05)
    assert all(grad.dtype == dtype for grad in gradients(layer, out).values())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_frozen_weights_can_be_in_half_precision_and_trained_ones_in_float32(case, mode, grad):
    layer, x = built(case).train(mode), case.x()
    base_of(layer).weight.data = base_of(layer).weight.data.bfloat16()
    wide = copy.deepcopy(layer).float()
    x = x.bfloat16() if x.is_floating_point() else x
    with torch.set_grad_enabled(grad):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    expected = reference(wide, x.float() if x.is_floating_point() else x)
    close_in_half(out.float(), expected.detach(), atol=0.2, rtol=0.05)
    if grad:
        actual = gradients(layer, out)
        assert {grad.dtype for grad in actual.values()} == {torch.float32}
        expected = gradients(wide, expected)
        if isinstance(layer, lora.Embedding):
            expected["lora_A"][:, layer.padding_idx] = 0
        close_in_half(actual, expected, atol=0.3, rtol=0.05)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", WITH_DROPOUT)
@torch.no_grad()
def test_outputs_are_in_float32_if_only_the_frozen_weight_is_in_half_precision(name, mode):
    layer, x = built(CASES[name]).train(mode), CASES[name].x()
    base_of(layer).weight.data = base_of(layer).weight.data.bfloat16()
    out = layer(x)
    assert out.dtype == torch.float32
    # The merged copy is in the weight's precision.
    expected = reference(copy.deepcopy(layer).float(), x)
    close_in_half(out, expected, atol=1e-5 if mode else 0.1, rtol=0)


def test_a_weight_merged_in_half_precision_is_rounded_once(case):
    layer = built(case)
    base_of(layer).weight.data = base_of(layer).weight.data.bfloat16()
    weight = base_of(lora.merge(layer)).weight
    exact = base_of(layer).weight.double() + update(layer.double()).detach()
    if getattr(layer, "fan_in_fan_out", False):
        exact = exact.t()
    assert weight.dtype == torch.bfloat16
    close_in_half(weight.double(), exact, atol=rounding(exact, R), rtol=2**-8)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_autocast_gives_the_plain_layers_dtype_and_float32_gradients(case, mode, grad):
    layer, plain, x = built(case).train(mode), case.plain(), case.x()
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        assert out.dtype == plain(x).dtype
    close_in_half(out.detach().float(), reference(layer, x).detach(), atol=0.2, rtol=0.05)
    if grad:
        assert {grad.dtype for grad in gradients(layer, out).values()} == {torch.float32}


@pytest.mark.parametrize("mode", [True, False])
def test_autocast_leaves_float64_alone(case, mode):
    layer, x = built(case).double().train(mode), case.x()
    x = x.double() if x.is_floating_point() else x
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        out = layer(x)
    assert out.dtype == torch.float64
    close(out, reference(layer, x).detach())
