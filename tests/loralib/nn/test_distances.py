"""Tests of attention with relative distances: against the formula, row by row."""

import pytest
import torch
from compare import assert_close_to_rounding
from row_masks import masks_by_row
from torch.utils._python_dispatch import TorchDispatchMode

from loralib.nn.distances import skew
from loralib.nn.row_attention import attend_rows

HEADS, DIM, LONGEST = 2, 4, 9
LENGTHS = (6, 1, 9, 4)
SCALE = 0.3
SETTINGS = {"lengths": LENGTHS, "heads": HEADS, "scale": SCALE}
# Rounded sums: a score of three terms, a softmax and a mean over up to 9, a gradient over 20.
TERMS = 3 * 4 + 9 + 9 + 20
TERM_NAMES = [("c2p", "p2c"), ("c2p",), ("p2c",)]


@pytest.mark.parametrize("is_compiling", [False, True])
def test_skew(is_compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    scores = torch.arange(2 * 3 * 6.0).view(2, 3, 6)
    skewed = skew(scores, 4)
    assert skewed[1].tolist() == [[20, 21, 22, 23], [25, 26, 27, 28], [30, 31, 32, 33]]
    assert torch.equal(skew(scores.transpose(0, 1)[1:], 5)[1, 1], scores[1, 2, :5])
    assert torch.equal(skew(scores, 3), skewed[..., :3])
    assert torch.equal(skew(scores[:, :1], 3), scores[:, :1, :3])
    assert skew(scores[:, :2], 5)[1].tolist() == [[19, 20, 21, 22, 23], [24, 25, 26, 27, 28]]


def literal(query, key, value, keep=None, c2p=None, p2c=None, lengths=LENGTHS):
    """The formula, row by row and head by head; `keep` scales the probabilities."""
    out = []
    longest = max(lengths)
    one_query = len(query) == len(lengths)
    queries = query.split([1] * len(lengths) if one_query else lengths)
    parts = zip(queries, key.split(lengths), value.split(lengths), strict=True)
    for row, (q, k, v) in enumerate(parts):
        heads = []
        distance = torch.arange(len(k)) - torch.arange(len(q))[:, None]  # key - query
        for head in range(HEADS):
            part = slice(head * DIM, (head + 1) * DIM)
            scores = SCALE * q[:, part] @ k[:, part].T
            if c2p is not None:
                far = c2p[:, part][longest - 1 + distance]
                scores = scores + torch.einsum("id,ijd->ij", q[:, part], far)
            if p2c is not None:
                far = p2c[:, part][longest - 1 - distance]
                scores = scores + torch.einsum("jd,ijd->ij", k[:, part], far)
            weights = scores.softmax(dim=1)
            if keep is not None:
                weights = weights * keep[row][head]
            heads.append(weights @ v[:, part])
        out.append(torch.cat(heads, dim=1))
    return torch.cat(out)


def draw(dtype, terms, one_query, lengths=LENGTHS):
    """Random queries, keys, values and vectors of distances, by name."""
    generator = torch.Generator().manual_seed(0)
    tokens, distances = sum(lengths), 2 * max(lengths) - 1
    counts = {"query": len(lengths) if one_query else tokens, "key": tokens, "value": tokens}
    counts |= dict.fromkeys(terms, distances)
    return {
        name: torch.randn(count, HEADS * DIM, generator=generator).to(dtype)
        for name, count in counts.items()
    }


def with_gradients(attend, tensors, weights):
    """The output and the gradients, by name."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    out = attend(**leaves)
    (out * weights).sum().backward()
    return {"out": out, **{name: leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.parametrize("one_query", [False, True])
@pytest.mark.parametrize("terms", TERM_NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_output_and_gradients_are_the_formula(dtype, terms, one_query):
    tensors = draw(dtype, terms, one_query)
    weights = torch.randn(len(tensors["query"]), HEADS * DIM, dtype=dtype)
    ours, theirs = (
        with_gradients(attend, tensors, weights)
        for attend in (
            lambda **given: attend_rows(**given, **SETTINGS, dropout_p=0.0),
            literal,
        )
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_close_to_rounding(ours[name], tensor, TERMS, dtype)
        assert name == "out" or tensor.abs().max() > 1e-2


@pytest.mark.parametrize("one_query", [False, True])
def test_dropout_is_the_formula_with_the_drawn_masks(drawn_masks, one_query):
    tensors = draw(torch.float32, ("c2p", "p2c"), one_query)
    weights = torch.randn(len(tensors["query"]), HEADS * DIM)
    ours = with_gradients(
        lambda **given: attend_rows(**given, **SETTINGS, dropout_p=0.3), tensors, weights
    )
    (drawn,) = drawn_masks
    assert (drawn == 0).any()
    keep = masks_by_row(drawn, LENGTHS, HEADS, one_query)
    theirs = with_gradients(lambda **given: literal(**given, keep=keep), tensors, weights)
    for name, tensor in theirs.items():
        assert_close_to_rounding(ours[name], tensor, TERMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one_query", [False, True])
def test_half_precision_is_the_formula_up_to_rounding(one_query, dtype):
    tensors = draw(dtype, ("c2p", "p2c"), one_query)
    weights = torch.randn(len(tensors["query"]), HEADS * DIM).to(dtype)
    ours = with_gradients(
        lambda **given: attend_rows(**given, **SETTINGS, dropout_p=0.0), tensors, weights
    )
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    theirs = with_gradients(literal, exact, weights.double())
    for name, tensor in theirs.items():
        assert ours[name].dtype == dtype
        assert_close_to_rounding(ours[name].double(), tensor, 8, dtype)


# Distances are multiplied in blocks of 64 tokens.
LONG = (70, 5, 131, 33, 17)


@pytest.mark.parametrize("one_query", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_several_blocks_are_the_formula(dtype, one_query):
    tensors = draw(dtype, ("c2p", "p2c"), one_query, LONG)
    weights = torch.randn(len(tensors["query"]), HEADS * DIM).to(dtype)
    ours = with_gradients(
        lambda **given: attend_rows(**given, **SETTINGS | {"lengths": LONG}, dropout_p=0.0),
        tensors,
        weights,
    )
    theirs = with_gradients(
        lambda **given: literal(**given, lengths=LONG),
        {name: tensor.double() for name, tensor in tensors.items()},
        weights.double(),
    )
    # Sums: three terms of a score, softmax and mean over 131, a gradient over all tokens. In half
    # precision, only intermediate results are rounded.
    terms = 3 * DIM + 2 * 131 + sum(LONG) if dtype == torch.float64 else 8
    for name, tensor in theirs.items():
        assert_close_to_rounding(ours[name].double(), tensor, terms, dtype)


class _ProductSizes(TorchDispatchMode):
    """Records the matrix sizes of all batched products."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.out):
            first, second = args[-2:]
            self.sizes |= {*first.shape[1:], *second.shape[1:]}
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("one_query", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_half_precision_all_sizes_of_products_are_multiples_of_16(dtype, one_query):
    """oneDNN compiles a kernel for each size, so few sizes should occur."""
    heads, hidden = 2, 32
    queries, distances = len(LONG) if one_query else sum(LONG), 2 * max(LONG) - 1
    counts = (queries, sum(LONG), sum(LONG), distances, distances)
    leaves = [torch.randn(count, hidden).to(dtype).requires_grad_() for count in counts]
    query, key, value, c2p, p2c = leaves
    with _ProductSizes() as recorded:
        out = attend_rows(query, key, value, LONG, heads, 0.1, c2p=c2p, p2c=p2c)
        out.sum().backward()
    assert len(recorded.sizes) > 3
    are_multiples = all(size % 16 == 0 for size in recorded.sizes)
    assert are_multiples == (dtype != torch.float32)


def test_only_tensors_that_require_a_gradient_get_one():
    tensors = draw(torch.float32, ("c2p", "p2c"), one_query=False)
    tensors["key"].requires_grad_()
    tensors["p2c"].requires_grad_()
    attend_rows(**tensors, **SETTINGS, dropout_p=0.0).sum().backward()
    assert tensors["p2c"].grad.abs().max() > 1e-2
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == ["key", "p2c"]


def test_rows_may_be_shorter_than_the_longest_distance():
    tensors = draw(torch.float32, ("c2p", "p2c"), one_query=False)
    known = {
        name: tensor[3:-3] if len(tensor) == 17 else tensor for name, tensor in tensors.items()
    }
    rows = {"lengths": (6, 1, 6, 6, 1), "heads": HEADS, "scale": SCALE, "dropout_p": 0.0}
    whole = attend_rows(**tensors, **rows)
    assert_close_to_rounding(attend_rows(**known, **rows), whole, TERMS)
