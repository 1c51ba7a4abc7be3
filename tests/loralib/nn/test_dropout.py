"""Tests of the fast CPU dropout: its distribution and gradient, and when PyTorch's is used."""

import math

import pytest
import torch
from torch import nn

import loralib as lora
from loralib.nn.dropout import dropout, keep_mask
from loralib.nn.fast_paths import fast_paths_off

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def p_value(kept, count, share):
    from scipy import stats  # takes a while, for every worker that collects tests

    return stats.binomtest(kept, count, share).pvalue


def kept_scale(p):
    """The factor of kept elements, with p rounded to a multiple of 2^-16."""
    return 2**16 / (2**16 - round(p * 2**16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_keeps_the_right_share_and_scales_it(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(200_000, dtype=dtype)
    out = dropout(x, p)
    assert out.dtype == dtype
    assert set(out.unique().tolist()) == {0.0, (x[0] * kept_scale(p)).item()}
    kept = int((out != 0).sum())
    assert p_value(kept, x.numel(), 1 - p) > 1e-3


@pytest.mark.parametrize("lane", range(4))
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_every_lane_of_a_random_number_has_the_same_probability(lane, p):
    torch.manual_seed(1)
    mask = keep_mask((100_000, 4), p)[:, lane]
    assert p_value(int((mask != 0).sum()), len(mask), 1 - p) > 1e-3


def test_lanes_and_neighbors_are_independent():
    torch.manual_seed(2)
    kept = keep_mask((50_000, 4), 0.3).double()
    correlation = torch.corrcoef(torch.cat([kept[1:], kept[:-1]], dim=1).t())
    assert (correlation - torch.eye(8)).abs().max() < 5 / math.sqrt(len(kept))


def test_the_mean_is_unbiased():
    torch.manual_seed(3)
    x = torch.tensor([1.0, -2.0, 5.0])
    mean = dropout(x.expand(200_000, 3), 0.1).mean(dim=0)
    error = x.abs() * math.sqrt(0.1 / 0.9 / 200_000)
    assert ((mean - x).abs() < 4 * error).all()


@pytest.mark.parametrize("p", [1e-7, 0.999999])
def test_probabilities_at_the_edge_of_the_resolution(p):
    out = dropout(torch.ones(1000), p)
    assert out.isfinite().all()
    assert (out != 0).float().mean().round() == round(1 - p)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5, 7), (2, 3, 5)])
def test_any_shape(shape):
    assert keep_mask(shape, 0.5).shape == shape
    assert dropout(torch.ones(shape), 0.5).shape == shape


def test_a_seed_and_a_generator_state_reproduce_it():
    torch.manual_seed(4)
    first = dropout(torch.ones(1001), 0.5)
    state = torch.get_rng_state()
    second = dropout(torch.ones(1001), 0.5)
    torch.set_rng_state(state)
    assert torch.equal(dropout(torch.ones(1001), 0.5), second)
    torch.manual_seed(4)
    assert torch.equal(dropout(torch.ones(1001), 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_passes_where_the_output_does(dtype):
    # Adding 1 avoids zeros, which random numbers in half precision may be in some PyTorch versions.
    x = torch.rand(40, 30).add_(1).to(dtype).requires_grad_()
    out = dropout(x, 0.4)
    weights = torch.randn_like(x)
    (grad,) = torch.autograd.grad(out, x, weights)
    torch.testing.assert_close(grad, torch.where(out != 0, weights * kept_scale(0.4), 0))


def test_gradients_of_both_orders():
    def function(x):
        torch.manual_seed(5)
        return dropout(x, 0.5).sin()

    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_dropped_infinities_in_a_transposed_tensor_are_zero():
    torch.manual_seed(6)
    x = torch.full((6, 50), torch.inf).t()
    out = dropout(x, 0.5)
    assert set(out.unique().tolist()) == {0.0, torch.inf}  # 0, not 0 · inf = NaN


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.3, False), (1.0, False)])
def test_switched_off_it_returns_its_input(p, training):
    x = torch.ones(3)
    assert dropout(x, p, training) is x
    assert lora.Dropout(p).train(training)(x) is x


def test_everything_dropped():
    # Enough that the one of 2^16 values that keeps an element at any p < 1 would occur.
    x = torch.ones(2**20, requires_grad=True)
    out = dropout(x, 1.0)
    out.sum().backward()
    assert not out.any()
    assert not x.grad.any()


def test_the_input_is_not_written():
    x = torch.ones(100)
    dropout(x, 0.5)
    assert x.sum() == 100


def test_the_module_is_a_drop_in():
    module = lora.Dropout(0.25)
    assert repr(module) == repr(nn.Dropout(0.25))
    assert isinstance(module, nn.Dropout)
    assert (module(torch.ones(1000)) == 0).any()
    assert not module.state_dict()


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
def test_the_error_names_a_probability_out_of_range(p):
    with pytest.raises(ValueError, match=f"between 0 and 1, but got {p}"):
        lora.Dropout(p)
    with pytest.raises(ValueError, match=f"between 0 and 1, but got {p}"):
        dropout(torch.ones(3), p)


@pytest.mark.slow
def test_compiled_it_uses_pytorchs_own():
    compiled = torch.compile(lora.Dropout(0.5), backend="aot_eager", fullgraph=True)
    x = torch.ones(10_000, requires_grad=True)
    out = compiled(x)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_on_other_devices_it_uses_pytorchs_own():
    assert dropout(torch.ones(3, device="meta"), 0.5).shape == (3,)


def test_nested_tensors_are_dropped_by_pytorchs_own():
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    dropped = dropout(torch.nested.nested_tensor(rows, layout=torch.jagged), 0.5)
    for row, own in zip(rows, dropped.unbind(), strict=True):
        assert own.shape == row.shape
        assert set(own.flatten().tolist()) <= {0.0, 2.0}


def test_with_fast_paths_off_it_is_pytorchs_own(drawn_masks):
    torch.manual_seed(4)
    expected = nn.functional.dropout(torch.ones(1000), 0.3)
    torch.manual_seed(4)
    with fast_paths_off():
        assert torch.equal(dropout(torch.ones(1000), 0.3), expected)
    assert drawn_masks == []
    dropout(torch.ones(1000), 0.3)
    assert len(drawn_masks) == 1
