"""Tests of `PackedRows`: what it derives from a mask, and that it can be moved with its batch."""

from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from loralib.nn.packing import PackedRows

# Rows of five tokens, of one, and of three with padding in between.
HOLES = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 1, 0]])
TENSORS = ("is_token", "index", "positions", "first", "offsets")


def assert_same_rows(ours, theirs):
    sizes = ("shape", "lengths", "spans", "longest", "used_columns")
    for name in (*sizes, "padded_right", "is_filled", "segments"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in (*TENSORS, "targets"):
        one, other = getattr(ours, name), getattr(theirs, name)
        if other is None:
            assert one is None, name
        else:
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name


# ---- rows of a mask ----


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_rows_of_a_mask(dtype):
    rows = PackedRows(HOLES.to(dtype))
    assert (rows.shape, rows.longest) == ((3, 5), 5)
    assert (rows.lengths, rows.spans) == ([5, 1, 3], [5, 1, 4])
    assert torch.equal(rows.is_token, HOLES.bool())
    assert rows.index.tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 13]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 3]
    assert rows.first.tolist() == [0, 5, 6]
    assert rows.offsets.tolist() == [0, 5, 6, 9]
    assert (rows.index.dtype, rows.first.dtype) == (torch.int64, torch.int64)
    assert rows.offsets.dtype == torch.int32
    assert rows.targets is None
    assert rows.segments == (slice(0, 3),)


@pytest.mark.parametrize("length", [None, 6, 9])
def test_rows_of_lengths_are_those_of_their_mask(length):
    lengths = [3, 6, 1]
    mask = torch.arange(length or 6) < torch.tensor(lengths)[:, None]
    rows = PackedRows.from_lengths(lengths, length)
    assert_same_rows(rows, PackedRows(mask))
    assert rows.spans == rows.lengths == lengths


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3), r"must be \(batch, length\), not \(3,\)"),
        (torch.ones(3, 2, 2), r"must be \(batch, length\), not \(3, 2, 2\)"),
    ],
)
def test_masks_with_other_than_two_dimensions_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        PackedRows(mask)


def test_rows_of_lengths_have_at_least_one_token():
    with pytest.raises(ValueError, match="row 1 of the batch has no token"):
        PackedRows.from_lengths([3, 0])


def test_rows_whose_first_position_is_padding():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    rows = PackedRows(mask)
    assert rows.starts_padded
    assert (rows.lengths, rows.spans) == ([2, 0, 2], [2, 0, 3])
    assert rows.first.tolist() == [0, 2, 2]
    x = torch.arange(1.0, 10.0).view(3, 3)
    assert rows.pack(x).tolist() == [1, 2, 8, 9]
    assert torch.equal(rows.pad(rows.pack(x)), x * mask)
    assert not PackedRows(HOLES).starts_padded
    assert PackedRows(torch.zeros(2, 3)).lengths == [0, 0]


def test_targets_are_numbers_of_packed_tokens():
    rows = PackedRows(HOLES)
    is_target = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])
    with_targets = rows.with_targets(is_target)
    assert with_targets.targets.tolist() == [1, 4, 6, 8]
    assert rows.pack(is_target)[with_targets.targets].all()
    assert rows.with_targets(torch.zeros(3, 5)).targets.tolist() == []
    assert rows.targets is None
    with pytest.raises(ValueError, match=r"attention_mask is \(3, 5\), the batch is \(3, 4\)"):
        rows.with_targets(is_target[:, :4])


# ---- moving ----


def test_only_tensors_move_to_another_device():
    rows = PackedRows(HOLES).with_targets(HOLES)
    moved = rows.to("meta", non_blocking=True)
    for name in (*TENSORS, "targets"):
        assert getattr(moved, name).is_meta
        assert getattr(moved, name).shape == getattr(rows, name).shape
        assert not getattr(rows, name).is_meta
    assert (moved.lengths, moved.spans, moved.shape) == (rows.lengths, rows.spans, rows.shape)
    x = torch.empty(3, 5, 4, device="meta")
    assert moved.pack(x).shape == (9, 4)
    assert moved.pad(moved.pack(x)).shape == (3, 5, 4)


def test_rows_without_targets_can_be_moved_too():
    assert PackedRows(HOLES).to("meta").targets is None


def test_rows_can_be_sent_to_another_process():
    rows = PackedRows(HOLES).with_targets(HOLES)
    assert_same_rows(ForkingPickler.loads(ForkingPickler.dumps(rows)), rows)


@pytest.mark.gpu
def test_rows_can_be_pinned_and_moved_to_a_gpu():
    rows = PackedRows(HOLES).with_targets(HOLES)
    pinned = rows.pin_memory()
    assert all(getattr(pinned, name).is_pinned() for name in (*TENSORS, "targets"))
    assert_same_rows(pinned.to("cuda", non_blocking=True).to("cpu"), rows)
    assert_same_rows(PackedRows(HOLES.cuda()).to("cpu"), PackedRows(HOLES))


# ---- other batches of the same rows ----


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, 3), slice(1, 3), slice(0, 3)])
def test_a_part_equals_those_rows_alone(part):
    rows = PackedRows(HOLES).with_targets(HOLES)
    assert_same_rows(rows.part(part), PackedRows(HOLES[part]))


@pytest.mark.parametrize("more", [0, 3])
def test_widened_rows_equal_those_of_a_wider_mask(more):
    wider = torch.nn.functional.pad(HOLES, (0, more))
    assert_same_rows(PackedRows(HOLES).widened(5 + more), PackedRows(wider))


def test_twice_equals_the_rows_of_the_repeated_mask():
    both, is_target = torch.cat([HOLES, HOLES]), HOLES.flip(1)
    assert_same_rows(PackedRows(HOLES).twice(), PackedRows(both))
    twice = PackedRows(HOLES).with_targets(is_target).twice()
    assert_same_rows(twice, PackedRows(both).with_targets(torch.cat([is_target, is_target])))


def test_copied_rows_are_the_same_in_memory_of_their_own():
    rows = PackedRows.from_lengths([3, 1, 2])
    rows = rows.with_targets(rows.is_token)
    copied = rows.copied("cpu")
    assert_same_rows(copied, rows)
    assert len(copied.tensors()) == len(TENSORS) + 1
    for ours, theirs in zip(copied.tensors(), rows.tensors(), strict=True):
        assert ours.data_ptr() != theirs.data_ptr()
