"""Tests of attention of packed rows on a GPU: by one kernel if it can be used, else padded."""

import math
from types import SimpleNamespace

import pytest
import torch
from compare import rounding
from simulated_gpu import SimulatedGpu, on_cpu
from torch.autograd import forward_ad

from loralib.nn import flash
from loralib.nn.packing import PackedRows, attend

LENGTHS = [3, 7, 1, 5]
HEADS = 2
# Rounding of the scores, of the weighted sum, and of the result.
TERMS = 32


@pytest.fixture
def gpu():
    with SimulatedGpu() as gpu:
        yield gpu


def drawn(dtype, width=16, one_query=False):
    torch.manual_seed(1)
    rows = len(LENGTHS) if one_query else sum(LENGTHS)
    return [torch.randn(n, width).to(dtype) for n in (rows, sum(LENGTHS), sum(LENGTHS))]


def attended(inputs, device, **options):
    """The output and the inputs' gradients, on the CPU."""
    rows = PackedRows.from_lengths(LENGTHS).to(device)
    leaves = [x.clone().to(device).requires_grad_() for x in inputs]
    out = attend(*leaves, rows, HEADS, **options)
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    return [on_cpu(x.detach()).cpu() for x in (out, *found)]


def largest_product(inputs, out):
    """A bound of the numbers whose differences are the gradients of query and key.

    These are Σ p (do · v - do · o) k / √d and the same with q, where do is the output's gradient.
    """
    query, key, value, do = (x.float().unflatten(1, (HEADS, -1)) for x in (*inputs, 2 * out))
    width = query.shape[-1]
    products = float(do.norm(dim=-1).max() * value.norm(dim=-1).max())
    return products * max(float(x.abs().max()) for x in (query, key)) / math.sqrt(width)


def assert_same(inputs, **options):
    expected = attended([x.float() for x in inputs], "cpu", **options)
    # Not less where the difference is, as in a row with one key: there both gradients are zero.
    differences = rounding(0, TERMS, torch.float32, largest_product(inputs, expected[0]))
    for ours, theirs in zip(attended(inputs, "cuda:0", **options), expected, strict=True):
        allowed = rounding(0, TERMS, inputs[0].dtype, float(theirs.abs().max())) + differences
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"one_query": True}])
def test_one_kernel_computes_all_rows_without_padding(gpu, dtype, options):
    one_query = options.get("one_query", False)
    inputs = drawn(dtype, one_query=one_query)
    assert_same(inputs, causal=options.get("causal", False))
    assert gpu.launches["_flash_attention_forward"] == 1
    assert gpu.launches["_flash_attention_backward"] == 1
    assert gpu.launches["index_copy_"] == gpu.launches["index_select"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"one_query": True}])
def test_on_a_gpu(dtype, options):
    inputs = drawn(dtype, one_query=options.get("one_query", False))
    assert_same(inputs, causal=options.get("causal", False))


def test_the_kernel_applies_dropout(gpu):
    inputs = [x.to("cuda:0") for x in drawn(torch.bfloat16)]
    rows = PackedRows.from_lengths(LENGTHS).to("cuda:0")
    outputs = [on_cpu(attend(*inputs, rows, HEADS, dropout_p=p)) for p in (0.0, 0.5)]
    assert gpu.launches["_flash_attention_forward"] == 2
    assert not torch.equal(*outputs)


def _old_gpu(monkeypatch):
    properties = SimpleNamespace(major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)


def _flash_switched_off(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_flash_sdp_enabled", lambda: False)


def _pytorch_without_flash(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)


def _fast_paths_off(monkeypatch):
    monkeypatch.setattr("loralib.nn.fast_paths._off", True)


@pytest.mark.parametrize(
    ("dtype", "width", "change"),
    [
        (torch.float32, 16, None),
        (torch.bfloat16, 12, None),
        (torch.bfloat16, 2 * 200, None),
        (torch.bfloat16, 16, _old_gpu),
        (torch.bfloat16, 16, _flash_switched_off),
        (torch.bfloat16, 16, _pytorch_without_flash),
        (torch.bfloat16, 16, _fast_paths_off),
    ],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_rows_are_padded_where_the_kernel_cannot_be_used(
    gpu, monkeypatch, dtype, width, change, options
):
    if change is not None:
        change(monkeypatch)
    assert_same(drawn(dtype, width), **options)
    assert gpu.launches["_flash_attention_forward"] == 0
    fused = [name for name in gpu.launches if name.startswith("_scaled_dot_product")]
    assert len(fused) == 2  # forward and backward


@pytest.mark.parametrize("dual", [None, 0, 1, 2])
def test_the_kernel_is_not_used_for_forward_derivatives(gpu, dual):
    inputs = [x.to("cuda:0") for x in drawn(torch.bfloat16)]
    with forward_ad.dual_level():
        if dual is not None:
            inputs[dual] = forward_ad.make_dual(inputs[dual], torch.ones_like(inputs[dual]))
        assert flash.suits(*inputs, HEADS) == (dual is None)


def test_only_queries_keys_and_values_are_padded(gpu):
    """One copy each; the mask was made with the batch, once for all layers."""
    inputs = [x.to("cuda:0") for x in drawn(torch.float32)]
    rows = PackedRows.from_lengths(LENGTHS).to("cuda:0")
    gpu.launches.clear()
    attend(*inputs, rows, HEADS)
    copies = {name: count for name, count in gpu.launches.items() if "index" in name}
    assert copies == {"index_copy_": 3, "index_select": 1}
    assert gpu.launches["fill_"] + gpu.launches["new_full"] == 3


def test_arguments_and_shapes_fit_the_operator():
    """The operator's meta kernel checks them, which needs no GPU."""
    query, key, value = (x.to("meta").requires_grad_() for x in drawn(torch.bfloat16))
    ends = torch.zeros(len(LENGTHS) + 1, dtype=torch.int32, device="meta")
    out = flash.attend(query, key, value, ends, 7, HEADS, 0.1, causal=False)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in (query, key, value))
