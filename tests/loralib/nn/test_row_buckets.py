"""Tokens that fill a batch up: when there are some, how many, and as what rows."""

import pytest
import torch

from loralib.nn.fast_paths import fast_paths_off
from loralib.nn.packing import PackedRows
from loralib.nn.routing import Routing, routed
from loralib.nn.row_buckets import bucketed, fill, with_filler_rows

HALF = torch.empty(0, dtype=torch.bfloat16)
ROWS = PackedRows.from_lengths([40, 70, 30])  # 140 tokens


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([8, 7], [8, 7]),  # few
        ([10, 7], [10, 7, 1]),  # multiples of 2
        ([100, 27], [100, 27, 1]),  # of 8
        ([100, 28], [100, 28]),  # 128
        ([40, 70, 30], [40, 70, 30, 4]),  # of 16
        ([200, 57], [200, 57, 31]),  # of 32
        ([600, 505], [600, 505, 47]),  # of 64
        ([10] * 52 + [1], [10] * 52 + [1] + [10] * 5 + [5]),  # no row is longer than the longest
        ([10] * 51 + [4], [10] * 51 + [4] + [10] * 6 + [2]),
    ],
)
def test_numbers_recur(lengths, expected):
    rows = PackedRows.from_lengths(lengths)
    filled = with_filler_rows(rows, HALF)
    assert filled.lengths == expected
    assert (filled is rows) == (lengths == expected)
    assert filled.offsets[: len(lengths) + 1].tolist() == rows.offsets.tolist()
    assert filled.first[: len(lengths)].tolist() == rows.first.tolist()


@pytest.mark.parametrize(
    ("like", "largest", "doublings"), [(HALF, 64, 5), (HALF.half(), 64, 5), (HALF.float(), 16, 3)]
)
def test_few_numbers_are_left(like, largest, doublings):
    """Eight for each doubling from 16 on, and multiples of the largest step from there on."""
    numbers = {bucketed(count, like) for count in range(16, 4097)}
    assert len(numbers) == doublings * 8 + 4096 // largest - 16 * 2**doublings // largest + 1
    for count in range(1, 4097):
        assert 0 <= bucketed(count, like) - count <= min(count / 8, largest - 1)


def test_targets_stay():
    rows = PackedRows.from_lengths([40, 70, 30])
    rows.targets = torch.tensor([3, 139])
    assert with_filler_rows(rows, HALF).targets is rows.targets


def test_fill():
    x = torch.arange(1.0, 281).view(140, 2).requires_grad_()
    filled = fill(x, 144)
    assert torch.equal(filled, torch.cat([x, x[:1], x[:1], x[:1], x[:1]]))
    filled.sum().backward()
    assert torch.equal(x.grad, torch.ones(140, 2))  # nothing comes back from what was added
    assert fill(x[:, 0], 144).shape == (144,)
    assert fill(x, 140) is x


def test_only_where_kernels_are_compiled():
    assert with_filler_rows(ROWS, HALF) is not ROWS
    assert with_filler_rows(ROWS, HALF.half()) is not ROWS
    assert with_filler_rows(ROWS, HALF.float()) is not ROWS
    assert with_filler_rows(ROWS, HALF.double()) is ROWS
    assert with_filler_rows(ROWS, HALF.to("meta")) is ROWS
    assert bucketed(1105, HALF.float()) == 1120
    with torch.autocast("cpu", torch.bfloat16):
        assert bucketed(1105, HALF.float()) == 1152
    with fast_paths_off():
        assert with_filler_rows(ROWS, HALF) is ROWS


def test_not_where_tokens_are_counted_or_have_padding_between():
    with routed(Routing(key=None, adapters=(None,))):
        assert with_filler_rows(ROWS, HALF) is ROWS
    mask = torch.ones(2, 100)
    mask[0, 50] = 0
    rows = PackedRows(mask)
    assert with_filler_rows(rows, HALF) is rows
