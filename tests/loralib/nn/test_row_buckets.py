"""Tests of filling batches up: when it is done, and with how many rows of how many tokens."""

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
        ([8, 7], [8, 7]),  # too few tokens
        ([10, 7], [10, 7, 1]),  # a multiple of 2
        ([100, 27], [100, 27, 1]),  # of 8
        ([100, 28], [100, 28]),  # 128
        ([40, 70, 30], [40, 70, 30, 4]),  # of 16
        ([200, 57], [200, 57, 31]),  # of 32
        ([600, 505], [600, 505, 47]),  # of 64
        ([10] * 52 + [1], [10] * 52 + [1] + [10] * 5 + [5]),  # no row is longer than the longest
        ([10] * 51 + [4], [10] * 51 + [4] + [10] * 6 + [2]),
    ],
)
def test_filler_rows_make_the_number_of_tokens_a_multiple(lengths, expected):
    rows = PackedRows.from_lengths(lengths)
    filled = with_filler_rows(rows, HALF)
    assert filled.lengths == expected
    assert (filled is rows) == (lengths == expected)
    assert filled.offsets[: len(lengths) + 1].tolist() == rows.offsets.tolist()
    assert filled.first[: len(lengths)].tolist() == rows.first.tolist()


@pytest.mark.parametrize(
    ("like", "largest", "doublings"), [(HALF, 64, 5), (HALF.half(), 64, 5), (HALF.float(), 16, 3)]
)
def test_few_different_counts_are_left(like, largest, doublings):
    """Eight per doubling from 16 on, then multiples of the largest step."""
    counts = {bucketed(count, like) for count in range(16, 4097)}
    assert len(counts) == doublings * 8 + 4096 // largest - 16 * 2**doublings // largest + 1
    for count in range(1, 4097):
        assert 0 <= bucketed(count, like) - count <= min(count / 8, largest - 1)


def test_filler_rows_do_not_change_targets():
    rows = PackedRows.from_lengths([40, 70, 30])
    rows.targets = torch.tensor([3, 139])
    assert with_filler_rows(rows, HALF).targets is rows.targets


def test_fill_adds_copies_of_the_first_row_without_gradient():
    x = torch.arange(1.0, 281).view(140, 2).requires_grad_()
    filled = fill(x, 144)
    assert torch.equal(filled, torch.cat([x, x[:1], x[:1], x[:1], x[:1]]))
    filled.sum().backward()
    assert torch.equal(x.grad, torch.ones(140, 2))  # none from the copies
    assert fill(x[:, 0], 144).shape == (144,)
    assert fill(x, 140) is x


def test_only_dtypes_and_devices_with_compiled_kernels_are_filled_up():
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


def test_routed_rows_and_rows_with_padding_between_tokens_are_not_filled_up():
    with routed(Routing(key=None, adapters=(None,))):
        assert with_filler_rows(ROWS, HALF) is ROWS
    mask = torch.ones(2, 100)
    mask[0, 50] = 0
    rows = PackedRows(mask)
    assert with_filler_rows(rows, HALF) is rows
