"""Tests of viewing a tensor's bits as integers."""

import pytest
import torch

from loralib.nn.bits import bits_of, integer_of

DTYPES = (
    *(torch.bool, torch.uint8, torch.int64),
    *(torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_share_memory_and_can_be_viewed_as_values_again(dtype):
    tensor = torch.rand(3, 4).mul(9).to(dtype).t()
    bits = bits_of(tensor)
    assert not bits.is_floating_point()
    assert bits.shape == (4, 3, *([2] if dtype.is_complex else []))
    assert bits.data_ptr() == tensor.data_ptr()
    back = bits.view(dtype.to_real())
    values = torch.view_as_real(tensor) if dtype.is_complex else tensor
    assert torch.equal(back.double(), values.double())  # float8 has no `equal`


def test_bits_distinguish_zeros_and_equate_nans():
    nan, zero = torch.tensor([float("nan"), 0.0]), torch.tensor([0.0, -0.0])
    assert torch.equal(bits_of(nan), bits_of(nan.clone()))
    assert zero[0] == zero[1]
    assert bits_of(zero)[0] != bits_of(zero)[1]


def test_there_is_no_integer_as_large_as_complex128():
    assert integer_of(torch.bfloat16) is torch.int16
    with pytest.raises(KeyError):
        integer_of(torch.complex128)
