"""How the tests compare tensors by name."""

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
