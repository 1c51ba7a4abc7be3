"""Rows in groups: which rows share one, that nothing is lost or mixed, that calls are few."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loralib.nn.row_attention import attend_rows
from loralib.nn.row_groups import _LARGEST, ONE_ROWS_CALLS, _divide, group_rows

HEADS = 12
LONG = math.isqrt(ONE_ROWS_CALLS // HEADS) + 1  # tokens of the shortest row that stays alone
MIXED = (5, LONG, 3, 1, 3 * LONG, 8, LONG - 1)


def test_long_rows_stay_alone_and_short_ones_share_groups():
    alone, *shared = _divide([LONG + 1, LONG - 1], HEADS)
    assert (alone, shared) == ([0], [[1]])
    groups = _divide(MIXED, HEADS)
    assert groups[:2] == [[1], [4]]
    assert sorted(row for group in groups for row in group) == list(range(len(MIXED)))


def test_groups_are_small():
    lengths = [LONG - 1, 2] * 100
    groups = _divide(lengths, HEADS)
    sizes = [HEADS * len(rows) * max(lengths[row] for row in rows) ** 2 for rows in groups]
    assert 1 < len(groups) < 20
    assert max(sizes) <= _LARGEST
    assert sorted(row for rows in groups for row in rows) == list(range(200))


@pytest.mark.parametrize("step", [1, 16])
@pytest.mark.parametrize("one_query", [False, True])
@pytest.mark.parametrize(
    "lengths", [MIXED, (4, 4, 4), (LONG, 2 * LONG), (7,), (1, 1), (32, 17), (16, 16, 7)]
)
def test_what_is_read_is_packed_again(lengths, one_query, step):
    queries, keys = group_rows(lengths, HEADS, one_query, step)
    for side, counts in ((keys, lengths), (queries, [1] * len(lengths) if one_query else lengths)):
        x = torch.randn(sum(counts), HEADS * 2)
        memory, parts = side.empty(like=x)
        memory.fill_(torch.nan)
        rows = iter(x.split(list(counts)))
        seen = {tuple(row.flatten().tolist()) for row in rows}
        groups = side.clear_padding(side.read(x))
        for group, hidden, part, shape in zip(
            groups, side.hidden(), parts, side.shapes, strict=True
        ):
            assert group.shape == (*shape, 2)
            assert shape[2] % step == 0
            part.copy_(group[:, :, : part.shape[2]])
            for number in range(shape[1]):
                real = shape[2] if hidden is None else int((hidden[number] == 0).sum())
                assert not group[:, number, real:].any()
                own = group[:, number, :real].transpose(0, 1).flatten()
                seen.remove(tuple(own.tolist()))
        assert not seen
        assert torch.equal(side.pack(memory), x)


class Calls(TorchDispatchMode):
    """Counts products of many matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.bmm.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("length", "groups"), [(6, 1), (LONG, 16)])
def test_short_rows_take_few_calls(length, groups):
    x = torch.randn(3, 16 * length, 24).requires_grad_()
    with Calls() as calls:
        attend_rows(*x, [length] * 16, HEADS, 0.1).sum().backward()
    assert calls.count == 6 * groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 2])
def test_what_is_wrong_in_a_row_stays_in_it(row, bad, dtype):
    """Of the rows of one group, padded to the same length."""
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
