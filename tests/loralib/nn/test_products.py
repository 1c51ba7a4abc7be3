"""Products of large matrices: the same numbers whoever computes them, and gradients where asked."""

import pytest
import torch
import torch.nn.functional as F

from loralib.nn import products

# A product of the first is left to F.linear; the second is large.
SIZES = [(5, 16, 24), (320, 1024, 832)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make(size, dtype, with_bias):
    rows, inputs, outputs = size
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    return x.to(dtype), weight.to(dtype), bias


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_it_is_the_product_to_rounding(size, dtype, with_bias, transposed):
    x, weight, bias = make(size, dtype, with_bias)
    given = weight.t().contiguous().t() if transposed else weight
    out = products.linear(x, given, bias)
    assert (out.dtype, out.is_contiguous()) == (dtype, True)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error <= TOLERANCES[dtype]


@torch.no_grad()
def test_inputs_that_are_not_contiguous():
    x, weight, bias = make(SIZES[1], torch.float32, with_bias=True)
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    torch.testing.assert_close(products.linear(wide, weight, bias), F.linear(x, weight, bias))
    row = x[:1].expand(len(x), -1)  # as the gradient of a sum is
    torch.testing.assert_close(products.linear(row, weight, bias), F.linear(row, weight, bias))


def test_gradients_are_recorded_where_they_are_on():
    x, weight, bias = (tensor.requires_grad_() for tensor in make(SIZES[1], torch.float32, True))
    leaves, grad = (x, weight, bias), torch.randn(len(x), len(weight))
    found = torch.autograd.grad(products.linear(x, weight, bias), leaves, grad)
    for ours, theirs in zip(
        found, torch.autograd.grad(F.linear(x, weight, bias), leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
