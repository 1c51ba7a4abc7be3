"""Tests of layer normalization in half precision: bit-exact inside and outside of autocast."""

import pytest
import torch
import torch.nn.functional as F

from loralib.nn.norm import LayerNorm

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=HALVES, ids=str)
def norm(request):
    torch.manual_seed(0)
    norm = LayerNorm(8)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    norm.weight.data = norm.weight.data.to(
        request.param
    )  # the bias stays in float32, as if trained
    return norm


def test_it_computes_in_its_weights_precision(norm):
    x = torch.randn(3, 8)
    dtype = norm.weight.dtype
    expected = F.layer_norm(x.to(dtype), (8,), norm.weight, norm.bias.to(dtype), norm.eps)
    assert norm(x).dtype == dtype
    assert torch.equal(norm(x), expected)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(norm(x), expected)


def test_autocast_is_turned_off_only_where_it_is_on(norm, monkeypatch):
    entered = []
    autocast = torch.autocast

    def record(*args, **settings):
        entered.append((args, settings))
        return autocast(*args, **settings)

    monkeypatch.setattr(torch, "autocast", record)
    norm(torch.randn(3, 8))
    assert entered == []
    with autocast("cpu", dtype=norm.weight.dtype):
        norm(torch.randn(3, 8))
    assert entered == [(("cpu",), {"enabled": False})]
