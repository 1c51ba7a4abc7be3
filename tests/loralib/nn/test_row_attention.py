"""Tests of attention of rows in groups: softmax's gradient, autocast, and what is saved."""

import weakref

import pytest
import torch
from compare import assert_close_to_rounding
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from loralib.nn import row_attention
from loralib.nn.row_attention import _softmax_gradient, attend_rows, suits_cpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_private", [True, False])
def test_softmax_gradient_is_the_formula(is_private, dtype, monkeypatch):
    if not is_private:
        monkeypatch.delattr(torch, "_softmax_backward_data", raising=False)
    scores = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    scores[..., -1] = float("-inf")  # padding
    p = torch.softmax(scores, dim=-1).to(dtype)
    grad = torch.randn(p.shape).to(dtype)
    exact, wide = p.double(), grad.double()
    expected = exact * (wide - (exact * wide).sum(dim=-1, keepdim=True))
    found = _softmax_gradient(grad, p)
    assert found.dtype == dtype
    # Rounded: p grad, its sum over 7 columns, and p times the difference.
    assert_close_to_rounding(found.double(), expected, 7, dtype)
    assert not found[..., -1].any()


@pytest.mark.parametrize("wider", [8, 1], ids=["whole heads", "part of one"])
def test_slices_of_a_wider_tensor_give_the_same_output(wider):
    """Such as queries, keys and values of one product. Whole heads are read without a copy."""
    wide = torch.randn(3, 15, 24 + wider).double()
    slices = wide[..., :24]
    expected = attend_rows(*slices.contiguous(), (5, 7, 3), 3, 0.0)
    assert torch.equal(attend_rows(*slices, (5, 7, 3), 3, 0.0), expected)


def test_mixed_dtypes_are_not_for_attention_by_rows():
    q, k, v = torch.randn(3, 15, 24)
    assert suits_cpu(q, k, v, dropout_p=0.1)
    assert not suits_cpu(q, k.double(), v, dropout_p=0.1)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_autocast_does_not_change_gradients(dropout_p):
    """The dtype of queries, keys and values decides the precision, not autocast."""
    leaves = [t.requires_grad_() for t in torch.randn(3, 15, 24).unbind()]
    grads = []
    for forward, backward in ((False, False), (True, False), (False, True), (True, True)):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            out = attend_rows(*leaves, (5, 7, 3), 3, dropout_p)
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            grads.append(torch.autograd.grad(out.sum(), leaves))
    for other in grads[1:]:
        for grad, exact in zip(other, grads[0], strict=True):
            assert torch.equal(grad, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_uninitialized_memory_is_not_read(nan_in_empty_memory, causal, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in torch.randn(3, 15, 24).unbind()]
    out = attend_rows(*leaves, (5, 7, 3), 3, 0.1, causal)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_second_derivatives_are_refused():
    """PyTorch would leave them out of those by `scale`, on which the gradient itself depends."""
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 15, 24).unbind())
    scale = torch.ones((), requires_grad=True)
    out = scale * attend_rows(query * scale, key, value, (5, 7, 3), 3, 0.0)
    (expected,) = torch.autograd.grad(out.sum(), value, retain_graph=True)
    (found,) = torch.autograd.grad(out.sum(), value, create_graph=True)
    assert found.equal(expected)
    for differentiate in (Tensor.backward, lambda x: torch.autograd.grad(x, scale)):
        with pytest.raises(RuntimeError, match=r"^second derivatives .* set LORALIB_PLAIN=1"):
            differentiate(found.square().sum())


def plain(query, key, value):
    """The same attention of rows of 5, 7 and 3 tokens, by PyTorch's own operations."""
    found = []
    for row in zip(*(x.split((5, 7, 3)) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(1, (3, 8)).transpose(0, 1) for x in row)
        p = torch.softmax(q @ k.transpose(1, 2) * 8**-0.5, dim=-1)
        found.append((p @ v).transpose(0, 1).flatten(1))
    return torch.cat(found)


def test_second_derivatives_that_need_only_its_first_ones_are_right():
    """Such as those of a weight above attention, even if others' gradients were asked for too."""
    *leaves, weight = (t.requires_grad_() for t in torch.randn(4, 15, 24).double().unbind())
    found = []
    ours = checkpoint(attend_rows, *leaves, (5, 7, 3), 3, 0.0, use_reentrant=False)
    for out in (ours, plain(*leaves)):
        of_weight, _ = torch.autograd.grad(
            (out * weight).sum(), (weight, leaves[0]), create_graph=True
        )
        found.append(torch.autograd.grad(of_weight.square().sum(), leaves))
    for gradient, expected in zip(*found, strict=True):
        assert_close_to_rounding(gradient, expected, 100)


def test_a_batch_without_rows_has_empty_gradients():
    leaves = [t.requires_grad_() for t in torch.randn(3, 0, 24).unbind()]
    attend_rows(*leaves, (), 3, 0.1).sum().backward()
    assert all(leaf.grad.shape == (0, 24) for leaf in leaves)


def test_saved_tensors_grow_with_tokens_not_with_padding():
    """All but P and its mask: half precision pads these rows to five times their length."""
    leaves = [t.bfloat16().requires_grad_() for t in torch.randn(3, 300, 96).unbind()]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attend_rows(*leaves, [3] * 100, 3, 0.0)
    addresses = {leaf.data_ptr() for leaf in leaves}
    others = [t for t in saved if t.data_ptr() not in addresses]
    assert addresses <= {t.data_ptr() for t in saved}
    assert [t.shape[-2:] for t in others] == [(16, 16)] * len(others)


@pytest.mark.parametrize("recorded", [True, False])
def test_probabilities_are_kept_only_for_a_backward_pass(monkeypatch, recorded):
    lengths = (60, 150, 300)  # too different for one group
    leaves = [t.requires_grad_() for t in torch.randn(3, sum(lengths), 24).unbind()]
    made, alive, zero_dropped = [], [], row_attention._zero_dropped

    def record(p, keep):
        alive.append(sum(each() is not None for each in made))
        made.append(weakref.ref(p))
        return zero_dropped(p, keep)

    monkeypatch.setattr(row_attention, "_zero_dropped", record)
    with torch.set_grad_enabled(recorded):
        attend_rows(*leaves, lengths, 3, 0.0)
    assert alive == ([0, 1, 2] if recorded else [0, 0, 0])  # of the earlier groups
