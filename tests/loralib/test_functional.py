"""Tests of the low-rank update against its formula, block by block."""

import itertools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import loralib as lora
from loralib import functional
from loralib.functional import VARIANTS, Delta, merge, variant_of

WIDTH, RANK, INPUTS = 4, 3, 5
# The updated slices' starts, and the size of the output.
SHAPES = {
    "whole": ((0,), WIDTH),
    "first and last of three": ((0, 2 * WIDTH), 3 * WIDTH),
    "last of two": ((WIDTH,), 2 * WIDTH),
}


def make(shape: str, dtype: torch.dtype = torch.float64) -> Delta:
    starts, outputs = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(starts))
    A = torch.randn(len(starts) * RANK, INPUTS, generator=generator, dtype=torch.float64)
    B = torch.randn(len(starts) * WIDTH, RANK, generator=generator, dtype=torch.float64)
    return Delta(A.to(dtype), B.to(dtype), Delta.scale(6, RANK), starts, outputs)


def dense(delta: Delta) -> torch.Tensor:
    """s · B A as one (out, in) matrix, each block by the formula."""
    matrix = delta.A.new_zeros(delta.out_features, INPUTS)
    for index, start in enumerate(delta.starts):
        A = delta.A[index * RANK : (index + 1) * RANK]
        B = delta.B[index * WIDTH : (index + 1) * WIDTH]
        matrix[start : start + WIDTH] = 6 / RANK * B @ A
    return matrix


@pytest.fixture
def x():
    return torch.randn(7, INPUTS, dtype=torch.float64)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("lora", 16 / 9), ("rslora", 16 / 3), ("dora", 16 / 9), ("rslora+dora", 16 / 3)],
)
def test_scaling(variant, expected):
    assert variant_of(variant).scale(16, 9) == expected
    assert variant_of(variant).scale(16, 0) == 0
    layers = [
        lora.Linear(4, 4, r=9, lora_alpha=16, variant=variant),
        lora.MergedLinear(4, 4, r=9, lora_alpha=16, enable_lora=[True, False], variant=variant),
        lora.Embedding(4, 4, r=9, lora_alpha=16, variant=variant),
    ]
    if not variant_of(variant).has_magnitude:
        layers.append(lora.Conv2d(4, 4, 3, r=9, lora_alpha=16, variant=variant))
    for layer in layers:
        assert layer.scaling == expected
        assert layer.variant == variant


def test_every_variant_is_in_the_table_above():
    """Each is derived from `Delta`, whose methods are tested below."""
    assert VARIANTS.keys() == {"lora", "rslora", "dora", "rslora+dora"}
    assert all(issubclass(variant, Delta) for variant in VARIANTS.values())


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="unknown variant 'qlora' of LoRA"):
        lora.Linear(4, 4, r=2, variant="qlora")


@pytest.mark.parametrize("shape", SHAPES)
def test_adding_to_an_output(shape, x):
    delta = make(shape)
    out = torch.randn(7, delta.out_features, dtype=torch.float64)
    expected = out + x @ dense(delta).T
    delta.add_to(out, x, torch.zeros(out.shape[1], x.shape[1]), None)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_merging_into_a_weight(shape):
    delta = make(shape)
    weight = torch.randn(delta.out_features, INPUTS, dtype=torch.float64)
    merged = merge(weight, delta, lambda matrix: matrix)
    torch.testing.assert_close(merged, weight + dense(delta))
    torch.testing.assert_close(merge(weight.T, delta, torch.t), merged.T)
    assert delta.merge_(weight) is weight
    assert torch.equal(weight, merged)


def test_a_merge_is_rounded_once():
    """It is summed in float32, because bfloat16 would round in each step."""
    delta = make("whole", torch.bfloat16)
    weight = torch.randn(WIDTH, INPUTS).bfloat16()
    merged = merge(weight, delta, lambda matrix: matrix)
    expected = weight.float() + dense(delta.to(torch.float32))
    assert merged.dtype is torch.bfloat16
    # Half a unit in the last of bfloat16's eight binary digits.
    assert ((merged.float() - expected).abs() <= 1.001 * 2**-8 * expected.abs()).all()


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_linear_layer_and_its_gradients(shape, dropped, x):
    delta = make(shape)
    x.requires_grad_()
    weight = torch.randn(delta.out_features, INPUTS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(delta.out_features, dtype=torch.float64, requires_grad=True)
    mask = (torch.rand(7, INPUTS) < 0.5).double() * 2 if dropped else torch.ones(7, INPUTS)

    def run(x, weight, bias, A, B):
        adapted = Delta(A, B, delta.scaling, delta.starts, delta.out_features)
        return adapted.linear(x, x * mask if dropped else None, weight, bias)

    A, B = delta.A.requires_grad_(), delta.B.requires_grad_()
    expected = F.linear(x, weight, bias) + (x * mask) @ dense(delta).T
    out, inputs = run(x, weight, bias, A, B), (x, weight, bias, A, B)
    torch.testing.assert_close(out, expected)
    # With create_graph, the backward pass computes B's gradient in another way.
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), inputs, create_graph=True),
        torch.autograd.grad(expected.square().sum(), inputs),
    )
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_factors_in_half_precision_are_multiplied_in_the_inputs_dtype(shape, x):
    """Only their gradients are rounded to half precision, once."""
    given = replace(make(shape, torch.bfloat16), scaling=1.3)  # no power of two
    wide = given.to(torch.float64)
    outs, gradients = [], []
    for delta in (given, wide):
        A, B = delta.A.requires_grad_(), delta.B.requires_grad_()
        out = delta.linear(x, None, torch.ones(delta.out_features, INPUTS, dtype=x.dtype), None)
        outs.append(out)
        gradients.append(torch.autograd.grad(out.square().sum(), [A, B]))
    torch.testing.assert_close(*outs)
    assert [g.dtype for g in gradients[0]] == 2 * [torch.bfloat16]
    assert all(map(torch.equal, gradients[0], [g.bfloat16() for g in gradients[1]]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_keeps_no_factors(shape, x, monkeypatch):
    """Neither the cast ones, nor A times s."""
    made, delta = [], make(shape, torch.float32)
    original = functional._scaled

    def note(*args):
        update = original(*args)
        made.extend(map(weakref.ref, (update.A, update.B)))
        return update

    monkeypatch.setattr(functional, "_scaled", note)
    A, B = delta.A.requires_grad_(), delta.B.requires_grad_()
    weight = torch.ones(delta.out_features, INPUTS, dtype=x.dtype)
    out = checkpoint(delta.linear, x, None, weight, None, use_reentrant=False)
    assert [tensor() for tensor in made] == [None, None]
    out.square().sum().backward()
    expected = (x @ (weight + dense(delta.to(x.dtype))).T).square().sum()
    torch.testing.assert_close([A.grad, B.grad], list(torch.autograd.grad(expected, [A, B])))


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_the_linear_layer_if_some_tensors_are_frozen(shape, dropped, x):
    """What is kept for the backward pass depends on which gradients it needs."""
    delta = make(shape)
    weight = torch.randn(delta.out_features, INPUTS, dtype=torch.float64)
    tensors = {"x": x, "weight": weight, "A": delta.A, "B": delta.B}
    mask = (torch.rand(7, INPUTS) < 0.5).double() * 2 if dropped else torch.ones(7, INPUTS)
    for is_trained in itertools.product([False, True], repeat=len(tensors)):
        for tensor, flag in zip(tensors.values(), is_trained, strict=True):
            tensor.requires_grad_(flag)
        trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
        if trained:
            out = delta.linear(x, x * mask if dropped else None, weight, None)
            expected = F.linear(x, weight) + (x * mask) @ dense(delta).T
            torch.testing.assert_close(
                torch.autograd.grad(out.square().sum(), trained),
                torch.autograd.grad(expected.square().sum(), trained),
            )


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_linear_layer_and_its_gradients(shape, is_dynamic, x, monkeypatch):
    """PyTorch 2.11 compiles a function that writes to its own output to one without gradients."""
    torch.compiler.reset()  # so that sizes are static at first
    delta = make(shape)
    weight = torch.randn(delta.out_features, INPUTS, dtype=torch.float64)
    inputs = [x.requires_grad_(), delta.A.requires_grad_(), delta.B.requires_grad_()]

    def run(x, A, B):
        adapted = Delta(A, B, delta.scaling, delta.starts, delta.out_features)
        return adapted.linear(x, None, weight, None).square().sum()

    expected = torch.autograd.grad(run(*inputs), inputs)
    monkeypatch.setattr(Delta, "expand_into", None)  # which writes to the output
    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=is_dynamic)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
