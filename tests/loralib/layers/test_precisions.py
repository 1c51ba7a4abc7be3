"""Tests of LoRA layers in half precision, in mixed precision, and under autocast."""

import copy

import pytest
import torch
from compare import assert_same_bits, rounding
from layer_cases import (
    CASES,
    LINEAR,
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
from simulated_gpu import GPUS, to_cpu

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LINEAR)
def test_a_second_backward_pass_has_the_firsts_gradients_even_within_autocast(name, dtype):
    layer, x = built(CASES[name]), CASES[name].x()
    layer.scaling = 0.3  # no power of two
    base_of(layer).weight.data = base_of(layer).weight.data.bfloat16()
    rows = x.to(dtype).flatten(0, -2).requires_grad_()
    out = layer(rows)
    passes = []
    for within in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            torch.autograd.backward(out, torch.ones_like(out), retain_graph=True)
        passes.append({n: p.grad for n, p in layer.named_parameters() if p.grad is not None})
        passes[-1]["x"] = rows.grad
        layer.zero_grad()
        rows.grad = None
    assert {"lora_A", "lora_B"} <= passes[0].keys()
    assert_same_bits(*passes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", GPUS)
def test_a_gpus_gradients_of_factors_are_not_rounded_to_half_precision(kind, dtype):
    torch.manual_seed(0)
    with kind():
        layer = lora.Linear(24, 24, r=4, lora_alpha=6)
        torch.nn.init.normal_(layer.lora_B)
        layer.weight.data = layer.weight.data.to(dtype)
        layer.to("cuda")
        layer(torch.randn(40, 24, dtype=dtype).to("cuda")).square().sum().backward()
        for factor in (layer.lora_A, layer.lora_B):
            gradient = to_cpu(factor.grad)
            assert gradient.dtype == torch.float32
            assert factor.grad.is_contiguous()  # else autograd copies it
            assert not torch.equal(gradient, gradient.to(dtype).float())


def test_a_trained_scaling_is_not_rounded_to_the_factors_precision():
    layer = lora.Linear(16, 16, r=4)
    torch.nn.init.normal_(layer.lora_B)
    for factor in (layer.lora_A, layer.lora_B):
        factor.data = factor.data.bfloat16()
    layer.scaling = torch.nn.Parameter(torch.tensor(0.3))
    x = torch.randn(5, 16)
    A, B, W, b, wide = (
        t.double() for t in (layer.lora_A, layer.lora_B, layer.weight, layer.bias, x)
    )
    expected = wide @ W.t() + b + layer.scaling.double() * (wide @ A.t() @ B.t())
    error = (layer(x).double() - expected).abs().max()
    assert error <= rounding(0, 2 * (16 + 4), torch.float32, float(expected.abs().max()))
