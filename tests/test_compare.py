"""`assert_close_to_rounding` allows another order of summation, but no wrong result."""

import pytest
import torch
from compare import assert_close_to_rounding, rounding

WIDTHS = [3, 32, 768, 3072]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_order_is_allowed(width, dtype):
    """Terms added one by one, which is the worst order, against PyTorch's order."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 500, width, dtype=dtype).unbind()
    one_by_one = torch.zeros(500, dtype=dtype)
    for place in range(width):
        one_by_one = one_by_one + x[:, place] * y[:, place]
    assert_close_to_rounding((x * y).sum(1), one_by_one, width, dtype)
    assert_close_to_rounding((x.flip(1) * y.flip(1)).sum(1), one_by_one, width, dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_wrong_results_are_not_allowed(width):
    torch.manual_seed(0)
    x, y = torch.randn(2, 500, width).unbind()
    right = (x * y).sum(1)
    for wrong in (right * 1.001, right + 0.01, (x * y)[:, 1:].sum(1)):
        with pytest.raises(AssertionError):
            assert_close_to_rounding(wrong, right, width)
    # Products with a factor in a narrower dtype.
    with pytest.raises(AssertionError):
        assert_close_to_rounding((x * y.bfloat16()).sum(1), right, width)


def test_the_tolerance_grows_with_the_magnitude_and_the_root_of_the_terms():
    eps = torch.finfo(torch.float32).eps
    assert rounding(0.01, 1) == 4 * eps
    assert rounding(torch.tensor([0.25, -3.0]), 16) == 4 * 4 * 3 * eps
    assert rounding(0.01, 1, magnitude=0.0) == pytest.approx(0.04 * eps)
    assert rounding(1.0, 4, torch.float64) == 8 * torch.finfo(torch.float64).eps


def test_infinities_must_be_in_the_same_places():
    ours = torch.tensor([1.0, float("-inf")])
    assert_close_to_rounding(ours, ours.clone(), 1)
    with pytest.raises(AssertionError):
        assert_close_to_rounding(ours, ours.flip(0), 1)
    with pytest.raises(AssertionError):
        assert_close_to_rounding(torch.zeros(2), torch.full((2,), float("-inf")), 1)
