"""Attention of packed rows on a pretended GPU: by one kernel where there is one, else padded."""

from types import SimpleNamespace

import pytest
import torch
from compare import rounding
from pretended_device import PretendedGpu, on_cpu
from torch.autograd import forward_ad

from loralib.nn import flash
from loralib.nn.packing import PackedRows, attend

LENGTHS = [3, 7, 1, 5]
HEADS = 2
# The scores, the weighted sum, and rounding to the result's dtype.
TERMS = 32


@pytest.fixture
def gpu():
    with PretendedGpu() as gpu:
        yield gpu


def drawn(dtype, width=16, one_query=False):
    torch.manual_seed(1)
    rows = len(LENGTHS) if one_query else sum(LENGTHS)
    return [torch.randn(n, width).to(dtype) for n in (rows, sum(LENGTHS), sum(LENGTHS))]


def attended(inputs, device, **how):
    """The output and the inputs' gradients, on the CPU."""
    rows = PackedRows.from_lengths(LENGTHS).to(device)
    leaves = [x.clone().to(device).requires_grad_() for x in inputs]
    out = attend(*leaves, rows, HEADS, **how)
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    return [on_cpu(x.detach()).cpu() for x in (out, *found)]


def assert_same(inputs, **how):
    expected = attended([x.float() for x in inputs], "cpu", **how)
    for ours, theirs in zip(attended(inputs, "cuda:0", **how), expected, strict=True):
        allowed = rounding(0, TERMS, inputs[0].dtype, float(theirs.abs().max()))
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"one_query": True}])
def test_one_kernel_without_padding(gpu, dtype, how):
    one_query = how.get("one_query", False)
    inputs = drawn(dtype, one_query=one_query)
    assert_same(inputs, causal=how.get("causal", False))
    assert gpu.launches["_flash_attention_forward"] == 1
    assert gpu.launches["_flash_attention_backward"] == 1
    assert gpu.launches["index_copy_"] == gpu.launches["index_select"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"one_query": True}])
def test_on_a_gpu(dtype, how):
    inputs = drawn(dtype, one_query=how.get("one_query", False))
    assert_same(inputs, causal=how.get("causal", False))


def test_dropout_is_the_kernels(gpu):
    inputs = [x.to("cuda:0") for x in drawn(torch.bfloat16)]
    rows = PackedRows.from_lengths(LENGTHS).to("cuda:0")
    outputs = [on_cpu(attend(*inputs, rows, HEADS, dropout_p=p)) for p in (0.0, 0.5)]
    assert gpu.launches["_flash_attention_forward"] == 2
    assert not torch.equal(*outputs)


def _old(monkeypatch):
    properties = SimpleNamespace(major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)


def _switched_off(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_flash_sdp_enabled", lambda: False)


def _not_built(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)


def _plain(monkeypatch):
    monkeypatch.setattr("loralib.nn.fast_paths._off", True)


@pytest.mark.parametrize(
    ("dtype", "width", "change"),
    [
        (torch.float32, 16, None),
        (torch.bfloat16, 12, None),
        (torch.bfloat16, 2 * 200, None),
        (torch.bfloat16, 16, _old),
        (torch.bfloat16, 16, _switched_off),
        (torch.bfloat16, 16, _not_built),
        (torch.bfloat16, 16, _plain),
    ],
)
@pytest.mark.parametrize("how", [{}, {"causal": True}])
def test_padded_where_there_is_no_kernel(gpu, monkeypatch, dtype, width, change, how):
    if change is not None:
        change(monkeypatch)
    assert_same(drawn(dtype, width), **how)
    assert gpu.launches["_flash_attention_forward"] == 0
    fused = [name for name in gpu.launches if name.startswith("_scaled_dot_product")]
    assert len(fused) == 2  # there and back


@pytest.mark.parametrize("dual", [None, 0, 1, 2])
def test_what_has_a_forward_derivative_has_no_kernel(gpu, dual):
    inputs = [x.to("cuda:0") for x in drawn(torch.bfloat16)]
    with forward_ad.dual_level():
        if dual is not None:
            inputs[dual] = forward_ad.make_dual(inputs[dual], torch.ones_like(inputs[dual]))
        assert flash.suits(*inputs, HEADS) == (dual is None)


def test_only_queries_keys_and_values_are_padded(gpu):
    """Each by one copy; the mask is there with the batch, for all layers."""
    inputs = [x.to("cuda:0") for x in drawn(torch.float32)]
    rows = PackedRows.from_lengths(LENGTHS).to("cuda:0")
    gpu.launches.clear()
    attend(*inputs, rows, HEADS)
    copies = {name: count for name, count in gpu.launches.items() if "index" in name}
    assert copies == {"index_copy_": 3, "index_select": 1}
    assert gpu.launches["fill_"] + gpu.launches["new_full"] == 3


def test_shapes_and_signature_are_the_operators_own():
    """By PyTorch's own description of it, which needs no GPU."""
    query, key, value = (x.to("meta").requires_grad_() for x in drawn(torch.bfloat16))
    ends = torch.zeros(len(LENGTHS) + 1, dtype=torch.int32, device="meta")
    out = flash.attend(query, key, value, (ends, ends), (7, 7), HEADS, 0.1, causal=False)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in (query, key, value))
