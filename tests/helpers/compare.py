"""How the tests compare tensors: by name to the bit, and to what rounding leaves open."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def assert_same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """The same names, and by name the same dtype, shape and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        own, expected = (
            t.detach().contiguous().flatten().view(torch.uint8) for t in (ours[name], tensor)
        )
        assert torch.equal(own, expected), name


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """The same names, and by name the same dtype, shape and values: zeros may differ in sign."""
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
    """How far two results of one formula may lie apart, on any machine.

    Other processors, libraries, numbers of threads and batch sizes add the same numbers up in
    another order. Each addition rounds by up to eps / 2 of its size, up or down, and of n such
    errors about √n remain. Four times that covers the largest of many results; twice, that both
    sides round. What is wrong in a formula changes results by far more, by 1e-3 and above here.

    Args:
        expected: the result; its largest entry counts.
        terms: n, how many additions follow one another: the terms of a sum, and of the sums that
            it is made from.
        dtype: what is added up.
        magnitude: the least size of what is added up, where it may be larger than the result: 1
            are the states of a network.
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
    """The same up to `rounding`; infinities at the same places."""
    finite = theirs.detach()[theirs.detach().isfinite()]
    allowed = rounding(finite, terms, dtype, magnitude) if finite.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)


def error_of(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """How far off results are: the root mean square of the tensors' relative errors.

    Each relative error is one of norms. Ways that round as often, in another order, have about the
    same: of thousands of numbers, each of which is off by its own little.
    """
    assert found.keys() == exact.keys()
    squares = [
        float((found[name] - expected).norm() / expected.norm()) ** 2
        for name, expected in exact.items()
    ]
    return math.sqrt(sum(squares) / len(squares))


def factor_of(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """By what results are larger than they should be, all in all; 1 if by nothing.

    Rounding, which is as often up as down, leaves it near 1. Each tensor counts alike.
    """
    assert found.keys() == exact.keys()
    parts = [
        float((found[name] * expected).sum() / expected.square().sum())
        for name, expected in exact.items()
    ]
    return sum(parts) / len(parts)
