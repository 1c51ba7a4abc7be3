"""Attention's own gradient of a softmax, with and without PyTorch's private operation for it."""

import pytest
import torch
from compare import assert_close_to_rounding

from loralib.nn.row_attention import _softmax_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_private", [True, False])
def test_softmax_gradient(is_private, dtype, monkeypatch):
    if not is_private:
        monkeypatch.delattr(torch, "_softmax_backward_data")
    scores = torch.randn(2, 3, 4, 7, dtype=torch.float64).requires_grad_()
    scores.data[..., -1] = float("-inf")  # padding
    p = torch.softmax(scores, dim=-1)
    rounded = p.detach().to(dtype)
    grad = torch.randn(p.shape).to(dtype)
    p.backward(grad.double())
    found = _softmax_gradient(grad, rounded)
    assert found.dtype == dtype
    assert_close_to_rounding(found.double(), scores.grad, 8, dtype)
    assert not found[..., -1].any()
