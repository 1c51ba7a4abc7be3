"""Tests of rows in groups: which rows share one, and that groups hold exactly their rows."""

import itertools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loralib.nn import row_groups
from loralib.nn.row_attention import attend_rows
from loralib.nn.row_groups import _LARGEST, GROUP_OVERHEAD, _divide, group_rows

HEADS = 12
MIXED = (5, 41, 3, 1, 123, 8, 40)
TOO_LARGE = 200  # tokens: such a row alone has more probabilities than a group may have


def probabilities(lengths, rows):
    """The number of a group's probabilities, including padding."""
    return HEADS * len(rows) * max(lengths[row] for row in rows) ** 2


def cost(lengths, groups):
    return sum(GROUP_OVERHEAD + probabilities(lengths, rows) for rows in groups)


def all_divisions(ascending):
    """Every way to cut a list into parts."""
    places = range(1, len(ascending))
    for count in range(len(ascending)):
        for cuts in itertools.combinations(places, count):
            ends = (0, *cuts, len(ascending))
            yield [ascending[start:stop] for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("longest", [30, 80, 300])
@pytest.mark.parametrize("largest", [_LARGEST, 20_000])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_division_costs_less(longest, largest, seed, monkeypatch):
    monkeypatch.setattr(row_groups, "_LARGEST", largest)
    draw = random.Random(seed)
    lengths = [draw.randint(1, longest) for _ in range(9)]
    groups = _divide(lengths, HEADS)
    ascending = sorted(range(9), key=lengths.__getitem__)
    allowed = [
        division
        for division in all_divisions(ascending)
        if all(len(rows) == 1 or probabilities(lengths, rows) <= largest for rows in division)
    ]
    assert sorted(row for rows in groups for row in rows) == list(range(9))
    assert cost(lengths, groups) == min(cost(lengths, division) for division in allowed)


def test_rows_of_similar_length_share_a_group():
    assert _divide([100, 21, 101, 20], HEADS) == [[0, 2], [1, 3]]
    assert _divide([TOO_LARGE, 20, TOO_LARGE, 21], HEADS) == [[0], [1, 3], [2]]


def test_groups_are_small():
    lengths = [40, 2] * 100
    groups = _divide(lengths, HEADS)
    assert 1 < len(groups) < 20
    assert max(probabilities(lengths, rows) for rows in groups) <= _LARGEST
    assert sorted(row for rows in groups for row in rows) == list(range(200))


@pytest.mark.parametrize("step", [1, 16])
@pytest.mark.parametrize("one_query", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "lengths", [MIXED, (4, 4, 4), (41, 82), (7,), (1, 1), (32, 17), (16, 16, 7)]
)
def test_packing_what_was_read_gives_the_tokens_back(lengths, wide, one_query, step):
    """Slices of a wider tensor too, such as queries, keys and values from one product."""
    queries, keys = group_rows(lengths, HEADS, one_query, step)
    for side, counts in ((keys, lengths), (queries, [1] * len(lengths) if one_query else lengths)):
        x = torch.randn(sum(counts), 3 if wide else 1, HEADS * 2)[:, -2 if wide else 0]
        slots = side.clear_padding(side.read(x))
        seen = {tuple(row.flatten().tolist()) for row in x.split(list(counts))}
        groups = side.split(slots)
        for group, hidden, shape in zip(groups, side.hidden(), side.shapes, strict=True):
            matrices, length = shape
            assert group.shape == (matrices, length, 2)
            assert length % step == 0
            by_row = group.view(HEADS, -1, length, 2).unbind(1)
            padding = torch.zeros(matrices, 1, length) if hidden is None else hidden
            for row, of_heads in zip(
                by_row, padding.view(HEADS, -1, length).unbind(1), strict=True
            ):
                real = int((of_heads[0] == 0).sum())
                assert (of_heads == of_heads[0]).all()
                assert not row[:, real:].any()
                own = row[:, :real].transpose(0, 1).flatten()
                seen.remove(tuple(own.tolist()))
        assert not seen
        copied = side.empty(like=x).fill_(torch.nan)
        for part, group in zip(side.split(copied), groups, strict=True):
            part.copy_(group)
        assert torch.equal(side.pack(copied), x)


def test_a_transposed_tensor_can_be_read():
    keys, _ = group_rows((3, 5), HEADS, False, 1)
    x = torch.randn(HEADS * 2, 8).t()
    assert torch.equal(keys.pack(keys.read(x)), x)


class Calls(TorchDispatchMode):
    """Counts batched products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.baddbmm.out
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("length", "groups"), [(6, 1), (40, 2), (TOO_LARGE, 16)])
def test_rows_take_few_calls(length, groups):
    x = torch.randn(3, 16 * length, 24).requires_grad_()
    with Calls() as calls:
        attend_rows(*x, [length] * 16, HEADS, 0.1).sum().backward()
    assert calls.count == 6 * groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_key_that_is_not_finite_does_not_reach_earlier_causal_tokens(bad, dtype):
    """A value does reach them, because a probability of 0 times NaN is NaN."""
    torch.manual_seed(0)
    query, key, value = (t.to(dtype) for t in torch.randn(3, 12, 24))
    key[6] = bad  # token 3 of the second row
    out = attend_rows(query, key, value, (3, 6, 3), HEADS, 0.1, causal=True)
    assert out[:6].isfinite().all()
    assert out[9:].isfinite().all()
    assert not out[6:9].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 2])
def test_a_row_that_is_not_finite_does_not_reach_the_others(row, bad, dtype):
    """All rows are in one group, padded to the same length."""
    torch.manual_seed(0)
    lengths = (3, 6, 5)
    own = torch.arange(3).repeat_interleave(torch.tensor(lengths)) == row
    leaves = [t.to(dtype) for t in torch.randn(3, 14, 24)]
    for leaf in leaves:
        leaf[own] = bad
        leaf.requires_grad_()
    out = attend_rows(*leaves, lengths, HEADS, 0.1)
    out.sum().backward()
    for x in (out, *(leaf.grad for leaf in leaves)):
        assert x[~own].isfinite().all()
    assert not out[own].isfinite().any()
