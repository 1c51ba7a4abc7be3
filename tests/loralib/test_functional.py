"""The low-rank update against its formula, block by block."""

import pytest
import torch
import torch.nn.functional as F

from loralib.functional import Delta, merge

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


def test_scaling():
    assert Delta.scale(16, 8) == 2
    assert Delta.scale(16, 0) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_added_to_an_output(shape, x):
    delta = make(shape)
    out = torch.randn(7, delta.out_features, dtype=torch.float64)
    expected = out + x @ dense(delta).T
    delta.add_to(out, x)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_merged_into_a_weight(shape):
    delta = make(shape)
    weight = torch.randn(delta.out_features, INPUTS, dtype=torch.float64)
    merged = merge(weight, delta, lambda matrix: matrix)
    torch.testing.assert_close(merged, weight + dense(delta))
    torch.testing.assert_close(merge(weight.T, delta, torch.t), merged.T)
    assert delta.merge_(weight) is weight
    assert torch.equal(weight, merged)


def test_a_merge_is_rounded_once():
    """Summed in float32, where bfloat16 would lose the update's last bits in each step."""
    delta = make("whole", torch.bfloat16)
    weight = torch.randn(WIDTH, INPUTS).bfloat16()
    merged = merge(weight, delta, lambda matrix: matrix)
    expected = weight.float() + dense(delta.to(torch.float32))
    assert merged.dtype is torch.bfloat16
    # Half a unit in the last of bfloat16's eight digits.
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
    torch.testing.assert_close(run(x, weight, bias, A, B), expected)
    assert torch.autograd.gradcheck(run, (x, weight, bias, A, B))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias, A, B))
