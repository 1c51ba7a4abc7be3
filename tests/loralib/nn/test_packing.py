"""Tests of attention within packed rows: each path against the formula."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from row_masks import masks_by_row
from torch.utils._python_dispatch import TorchDispatchMode

from loralib.nn.fast_paths import fast_paths_off
from loralib.nn.packing import PackedRows, _attend_one_by_one, _attend_padded, attend
from loralib.nn.row_attention import attend_rows
from loralib.nn.row_groups import group_rows


def trained(query, key, value, rows, heads, dropout_p, causal=False):
    """The path of training on a CPU."""
    return attend_rows(query, key, value, rows.lengths, heads, dropout_p, causal)


def trained_alone(*given):
    """The same path, with each row in a group of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loralib.nn.row_groups._LARGEST", 1)
        group_rows.cache_clear()
        out = trained(*given)
    group_rows.cache_clear()
    return out


PATHS = (attend, trained, trained_alone, _attend_one_by_one, _attend_padded)
HEADS = 2
HALVES = [torch.bfloat16, torch.float16]
# Rounded sums: a score over 4 columns, then a softmax and a mean over up to 10 values.
TERMS = 4 + 10 + 10


def close(ours, theirs, terms=TERMS, dtype=torch.float32):
    assert_close_to_rounding(ours, theirs, terms, dtype)


def plain_attention(q, k, v, keep=None, causal=False):
    """softmax(q kᵀ / √d) v of one row, head by head; `keep` scales the probabilities."""
    width = q.shape[1] // HEADS
    out = []
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        scores = q[:, part] @ k[:, part].T / width**0.5
        if causal:
            later = torch.arange(len(k)) > torch.arange(len(q))[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        weights = scores.softmax(dim=1)
        out.append((weights if keep is None else weights * keep[head]) @ v[:, part])
    return torch.cat(out, dim=1)


def plain_rows(q, k, v, rows, **options):
    """`plain_attention` of every row."""
    parts = zip(*(x.split(rows.lengths) for x in (q, k, v)), strict=True)
    return torch.cat([plain_attention(*part, **options) for part in parts])


@pytest.fixture
def qkv():
    """Rows of five tokens, of one, and of three with padding in between."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 1, 0]])
    return PackedRows(mask), *torch.randn(3, 9, 8).unbind()


@pytest.fixture
def ragged():
    """Rows of 6, 1, 9 and 4 tokens, padded on the right to 10."""
    torch.manual_seed(0)
    rows = PackedRows(torch.arange(10) < torch.tensor([6, 1, 9, 4])[:, None])
    return rows, *torch.randn(3, 20, 8).unbind()


# ---- packing ----


def test_pack_and_pad(qkv):
    rows, q, _, _ = qkv
    assert rows.lengths == [5, 1, 3]
    assert rows.first.tolist() == [0, 5, 6]
    padded = rows.pad(q)
    assert padded.shape == (3, 5, 8)
    assert torch.equal(rows.pack(padded), q)
    assert torch.equal(padded[2, 3], q[8])
    assert not padded[1, 1:].any()
    assert not padded[2, [2, 4]].any()


def test_padding_gets_no_gradient(qkv):
    rows, q, _, _ = qkv
    x = torch.randn(3, 5, 8, requires_grad=True)
    (rows.pack(x) * q).sum().backward()
    assert torch.equal(x.grad, rows.pad(q))


def test_pad_has_gradients_of_both_orders(qkv):
    rows, q, _, _ = qkv
    x = q[:, :2].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rows.pad(x.sin(), fill=3.0), x)
    assert torch.autograd.gradgradcheck(lambda x: rows.pad(x.sin(), fill=3.0), x)


@pytest.mark.parametrize(
    ("lengths", "columns", "path"),
    [
        ([30] * 16, 30, "_attend_padded"),
        ([9, 200, 3], 200, "_attend_one_by_one"),
        ([30] * 16, 512, "_attend_one_by_one"),
        ([30], 512, "_attend_one_by_one"),
    ],
)
def test_rows_are_computed_one_by_one_if_padding_would_cost_more(
    monkeypatch, lengths, columns, path
):
    called = []
    packing = importlib.import_module("loralib.nn.packing")
    for name in ("_attend_one_by_one", "_attend_padded"):
        monkeypatch.setattr(packing, name, lambda *_, name=name: called.append(name))
    x = torch.zeros(sum(lengths), 24)
    attend(x, x, x, PackedRows.from_lengths(lengths, columns), 12, 0.0)
    assert called == [path]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_attention_computes_rows_in_groups(monkeypatch, dtype, recorded):
    """Otherwise PyTorch's is used, with scores in float32, but never all of long rows."""
    called = []
    monkeypatch.setattr("loralib.nn.packing.attend_rows", lambda *_: called.append("groups"))
    sdpa = "torch.nn.functional.scaled_dot_product_attention"
    monkeypatch.setattr(sdpa, lambda q, *_: called.append("SDPA") or q)
    x = torch.zeros(212, 24, dtype=dtype, requires_grad=recorded)
    attend(x, x, x, PackedRows.from_lengths([9, 200, 3]), 12)
    assert {*called} == {"groups" if recorded else "SDPA"}


# ---- every token attends to its whole row ----


@pytest.mark.parametrize("path", PATHS)
def test_in_float64_it_is_the_formula(qkv, path):
    rows, *tensors = qkv
    leaves = [t.double().requires_grad_() for t in tensors]
    ours = path(*leaves, rows, HEADS, 0.0)
    close(ours, plain_rows(*leaves, rows), TERMS, torch.float64)


@pytest.mark.parametrize("path", PATHS)
def test_attention_stays_within_rows(qkv, path):
    rows, q, k, v = qkv
    ours = path(q, k, v, rows, HEADS, 0.0)
    close(ours, plain_rows(q, k, v, rows))
    one_each = path(q[rows.first], k, v, rows, HEADS, 0.0)
    close(one_each, ours[rows.first])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_rows_of_one_token(path, causal):
    rows = PackedRows(torch.ones(3, 1))
    q, k, v = torch.randn(3, 3, 8).unbind()
    close(path(q, k, v, rows, HEADS, 0.0, causal), v)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_may_have_no_rows(causal, grad):
    q, k, v = torch.ones(3, 0, 8, requires_grad=grad).unbind()
    assert attend(q, k, v, PackedRows(torch.ones(0, 5)), HEADS, 0.0, causal).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one_query", [False, True])
def test_dropout_is_the_formula_with_the_drawn_masks(drawn_masks, qkv, one_query, dtype):
    """The output and the gradients."""
    rows, *tensors = qkv
    tensors = [t.to(dtype) for t in tensors]
    found = []
    leaves = [t.clone().requires_grad_() for t in tensors]
    queries = leaves[0][rows.first] if one_query else leaves[0]
    weights = torch.randn(len(queries), 8).to(dtype)
    ours = trained(queries, *leaves[1:], rows, HEADS, 0.3)
    (ours * weights).sum().backward()
    found.append([ours, *(leaf.grad for leaf in leaves)])

    (drawn,) = drawn_masks
    assert (drawn == 0).any()
    of_queries = [1, 1, 1] if one_query else rows.lengths
    step = 16 if dtype is torch.bfloat16 else 1
    leaves = [t.double().requires_grad_() for t in tensors]
    queries = leaves[0][rows.first] if one_query else leaves[0]
    parts = zip(
        queries.split(of_queries),
        *(leaf.split(rows.lengths) for leaf in leaves[1:]),
        masks_by_row(drawn, rows.lengths, HEADS, one_query, step),
        strict=True,
    )
    expected = torch.cat([plain_attention(*part) for part in parts])
    (expected * weights).sum().backward()
    found.append([expected, *(leaf.grad for leaf in leaves)])
    # In half precision, sums are computed in float32; intermediate results are rounded to half.
    terms = 3 * TERMS if dtype is torch.float32 else 4
    for own, reference in zip(*found, strict=True):
        close(own.double(), reference, terms, dtype)


def test_dropout_keeps_the_mean(qkv):
    rows, q, k, v = qkv
    torch.manual_seed(0)
    expected = attend(q, k, v, rows, HEADS, 0.0)
    for path in (trained, trained_alone, _attend_one_by_one, _attend_padded):
        mean = sum(path(q, k, v, rows, HEADS, 0.2) for _ in range(800)) / 800
        assert (mean - expected).abs().max() < 0.12


def test_paths_have_the_same_gradients(qkv):
    rows, *tensors = qkv
    gradients = []
    for path in (trained, trained_alone, _attend_one_by_one, _attend_padded):
        leaves = [t.clone().requires_grad_() for t in tensors]
        path(*leaves, rows, HEADS, 0.0).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, *others in zip(*gradients, strict=True):
        for theirs in others:
            close(ours, theirs, 3 * TERMS)


# ---- causal ----


@pytest.mark.parametrize("path", PATHS)
def test_causal_attention_is_the_formula(ragged, path):
    rows, *tensors = ragged
    weights = torch.randn(20, 8)
    found = []
    for attention in (
        lambda q, k, v: path(q, k, v, rows, HEADS, 0.0, True),
        lambda q, k, v: plain_rows(q, k, v, rows, causal=True),
    ):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = attention(*leaves)
        (out * weights).sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, 3 * TERMS)


@pytest.mark.parametrize("path", PATHS)
def test_causal_tokens_do_not_attend_to_later_ones(ragged, path):
    rows, q, k, v = ragged
    before = path(q, k, v, rows, HEADS, 0.0, True)
    # The sixth token of the third row, and the last one of the first.
    for changed in (12, 5):
        other_k, other_v = k.clone(), v.clone()
        other_k[changed] = k[changed].flip(0)
        other_v[changed] += 100
        after = path(q, other_k, other_v, rows, HEADS, 0.0, True)
        first, end = {12: (7, 16), 5: (0, 6)}[changed]
        assert torch.equal(after[first:changed], before[first:changed])
        assert ((after - before)[changed:end].abs() > 0.1).all()
        for some in (slice(0, first), slice(end, None)):
            assert torch.equal(after[some], before[some])


# ---- half precision ----


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", [trained, trained_alone, _attend_one_by_one, _attend_padded])
def test_half_precision_is_the_formula_up_to_rounding(ragged, path, causal, dtype):
    rows, *tensors = ragged
    halves = [t.to(dtype) for t in tensors]
    weights = torch.randn(20, 8).to(dtype)
    ours = [t.clone().requires_grad_() for t in halves]
    out = path(*ours, rows, HEADS, 0.0, causal)
    assert out.dtype == dtype
    (out * weights).sum().backward()
    exact = [t.double().requires_grad_() for t in halves]
    expected = plain_rows(*exact, rows, causal=causal)
    (expected * weights).sum().backward()
    # Sums are computed in float32; intermediate results are rounded to half.
    close(out.double(), expected, 1, dtype)
    for leaf, reference in zip(ours, exact, strict=True):
        close(leaf.grad.double(), reference.grad, 4, dtype)
    with torch.no_grad():
        close(path(*halves, rows, HEADS, 0.0, causal), out, 1, dtype)


class Sizes(TorchDispatchMode):
    """Records the sizes of the matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.baddbmm.out:
            self.seen |= {*args[1].shape[1:], *args[2].shape[1:]}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_multiplies_matrices_of_few_sizes(dtype):
    lengths = [290, 110, 201, 390]  # too different to share a group
    q, k, v = torch.randn(3, sum(lengths), 8).to(dtype).requires_grad_().unbind()
    with Sizes() as sizes:
        attend_rows(q, k, v, lengths, HEADS, 0.1).sum().backward()
    width = 8 // HEADS
    wanted = {*lengths} if dtype is torch.float32 else {112, 208, 304, 400}
    assert sizes.seen == {width, *wanted}


# ---- which path ----


@pytest.mark.parametrize(
    ("is_trained", "dropout_p", "is_off", "fused"),
    [
        (True, 0.0, False, False),
        (True, 0.1, False, False),
        (False, 0.1, False, False),
        (False, 0.0, False, True),
        (True, 0.1, True, True),
    ],
)
def test_pytorchs_own_attention_is_used_for_inference_and_with_fast_paths_off(
    monkeypatch, ragged, is_trained, dropout_p, is_off, fused
):
    rows, *tensors = ragged
    called = []
    whole = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **b: called.append(1) or whole(*a, **b)
    )
    leaves = [t.requires_grad_(is_trained) for t in tensors]
    with fast_paths_off(is_off):
        attend(*leaves, rows, HEADS, dropout_p)
    assert bool(called) == fused


@pytest.mark.parametrize("lengths", [(5, 5, 5), (1, 200, 3)], ids=["padded", "one by one"])
@pytest.mark.parametrize("is_off", [True, False], ids=["plain", "fast"])
def test_probabilities_are_dropped_on_every_path(lengths, is_off):
    """If all values are 1 and no probability is dropped, every output is 1."""
    rows, value = PackedRows.from_lengths(lengths), torch.ones(sum(lengths), 4)
    with fast_paths_off(is_off):
        kept, dropped = (attend(value, value, value, rows, 2, p) for p in (0.0, 0.5))
    torch.testing.assert_close(kept, value)
    assert (dropped != 1).any()
