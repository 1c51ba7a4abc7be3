"""How the tests compare tensors: bit for bit by name, and up to rounding."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def assert_same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Asserts the same names, and by name the same dtype, shape and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        own, expected = (
            t.detach().contiguous().flatten().view(torch.uint8) for t in (ours[name], tensor)
        )
        assert torch.equal(own, expected), name


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Asserts the same names, dtypes, shapes and values; zeros may differ in sign."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def rounding(
    expected: Tensor | float,
    terms: int,
    dtype: torch.dtype = torch.float32,
    magnitude: float = 1.0,
) -> float:
    """How far two results of one formula may differ, on any machine.

    Other processors, libraries, numbers of threads and batch sizes add the same numbers in another
    order. Each addition rounds by up to eps / 2 of its size, up or down, and n such errors add up
    to about √n of them. A factor of four covers the largest of many results, and a factor of two
    that both sides round. Mistakes in a formula change results by far more, here by at least 1e-3.

    Args:
        expected: the result; its largest entry counts.
        terms: n, the number of successive additions: the terms of a sum, and of the sums that these
            terms are made from.
        dtype: the dtype of the sums.
        magnitude: a size to assume at least for the numbers that are added, which may be larger
            than the result; in a network, about 1.
    """
    largest = max(magnitude, float(torch.as_tensor(expected).detach().abs().max()))
    return 4 * torch.finfo(dtype).eps * math.sqrt(terms) * largest


def assert_close_to_rounding(
    ours: Tensor,
    theirs: Tensor,
    terms: int,
    dtype: torch.dtype = torch.float32,
    magnitude: float = 1.0,
) -> None:
    """Asserts that both are the same up to `rounding`, with infinities at the same places."""
    finite = theirs.detach()[theirs.detach().isfinite()]
    allowed = rounding(finite, terms, dtype, magnitude) if finite.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)


def error_of(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The error of results: the root mean square of the tensors' relative errors, by their norms.

    Methods that round equally often, in another order, have about the same error, as it is that of
    thousands of numbers with independent small errors.
    """
    assert found.keys() == exact.keys()
    squares = [
        float((found[name] - expected).norm() / expected.norm()) ** 2
        for name, expected in exact.items()
    ]
    return math.sqrt(sum(squares) / len(squares))


def factor_of(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The mean factor by which results are larger than the exact ones; 1 if they are unbiased.

    Rounding, which is up as often as down, leaves it near 1. All tensors count the same.
    """
    assert found.keys() == exact.keys()
    parts = [
        float((found[name] * expected).sum() / expected.square().sum())
        for name, expected in exact.items()
    ]
    return sum(parts) / len(parts)
