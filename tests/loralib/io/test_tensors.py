"""Tests of reading and writing files of tensors."""

import errno
import io
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from compare import assert_same_bits

from loralib.errors import CheckpointError, DiskFullError
from loralib.io import tensors as io_tensors
from loralib.io.tensors import first_not_finite, read_tensors, write_tensors, write_torch


def archive(path: Path, legacy: bool = False) -> bytes:
    torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=not legacy)
    return path.read_bytes()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_both_formats_of_torch_can_be_read(tmp_path, legacy, suffix):
    path = tmp_path / f"model{suffix}"
    archive(path, legacy)
    assert torch.equal(read_tensors(path)[0]["a"], torch.ones(1000))


@pytest.mark.parametrize("name", ["a.bin", "a.pt", "a"])
def test_safetensors_are_recognized_by_their_content(tmp_path, name):
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(3)}, {"rank": "2"})
    (tmp_path / "a.safetensors").rename(tmp_path / name)
    tensors, metadata = read_tensors(tmp_path / name)
    assert torch.equal(tensors["a"], torch.ones(3))
    assert metadata["rank"] == "2"


class SmallDisk(io.FileIO):
    """A file that takes at most 100 bytes at a time, and `space` bytes in all."""

    space = math.inf

    def write(self, data):
        if self.tell() >= self.space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(memoryview(data)[:100])


def test_a_torch_file_may_be_written_piece_by_piece(tmp_path, monkeypatch):
    """A system may write less than it is given."""
    write_torch(tmp_path / "at_once.pt", {"a": torch.arange(1000)})
    monkeypatch.setattr(io_tensors, "open", lambda path, *_, **__: SmallDisk(path, "w"), False)
    write_torch(tmp_path / "in_pieces.pt", {"a": torch.arange(1000)})
    files = [(tmp_path / name).read_bytes() for name in ("at_once.pt", "in_pieces.pt")]
    assert files[0] == files[1]


def test_a_torch_file_that_does_not_fit_is_an_error_that_says_its_size(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    write_torch(path, {"a": torch.arange(1000)})
    before = path.read_bytes()
    monkeypatch.setattr(SmallDisk, "space", 1000)
    monkeypatch.setattr(io_tensors, "open", lambda path, *_, **__: SmallDisk(path, "w"), False)
    with pytest.raises(DiskFullError, match=f"the file takes at least {len(before):,} bytes"):
        write_torch(path, {"a": torch.zeros(1000, dtype=torch.int64)})
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("written", [0, 1000])
def test_writing_a_torch_file_can_be_interrupted(tmp_path, monkeypatch, written):
    """Otherwise torch's error about its unfinished archive would replace the interrupt."""

    class Interrupted(io.FileIO):
        def write(self, data):
            if self.tell() >= written:
                raise KeyboardInterrupt
            return super().write(data)

    monkeypatch.setattr(io_tensors, "open", lambda path, *_, **__: Interrupted(path, "w"), False)
    with pytest.raises(KeyboardInterrupt):
        write_torch(tmp_path / "a.pt", {"a": torch.arange(1000)})
    assert not [*tmp_path.iterdir()]


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["a.bin", "a.safetensors"])
def test_only_a_views_part_of_its_storage_is_written(tmp_path, name):
    large = torch.randn(1000, 64)
    tensors = {"a": large[:2], "b": large[5:9].t(), "c": large[:2]}
    write_tensors(tmp_path / name, tensors)
    assert_same_bits(read_tensors(tmp_path / name)[0], tensors)
    assert (tmp_path / name).stat().st_size < 10_000


@pytest.mark.parametrize("name", ["a.bin", "a.safetensors"])
def test_views_that_are_conjugated_or_negated_when_read_are_written_with_their_values(
    tmp_path, name
):
    given = {"a": torch.tensor([1j, 2]).conj(), "b": torch._neg_view(torch.tensor([1.0, 2.0]))}
    write_tensors(tmp_path / name, given)
    read, _ = read_tensors(tmp_path / name)
    assert all(torch.equal(read[key], tensor) for key, tensor in given.items())


def test_tensors_with_storage_of_their_own_are_not_copied(tmp_path, monkeypatch):
    """A model of gigabytes, which may be mapped from its file, is written without a second one."""
    write_tensors(tmp_path / "a.bin", {"a": torch.randn(3, 4)})
    mapped, _ = read_tensors(tmp_path / "a.bin")
    base = torch.randn(6)
    given = {**mapped, "own": torch.randn(5), "whole": base, "part": base[:2], "t": base[2:]}
    copied = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda own: copied.append(own) or own.add(0))
    write_tensors(tmp_path / "b.safetensors", given)
    assert [*map(len, copied)] == [6, 2, 4]
    monkeypatch.undo()
    assert_same_bits(read_tensors(tmp_path / "b.safetensors")[0], given)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.bin", lambda path: b"", "it is empty"),
        ("a.safetensors", lambda path: b"", "it is empty"),
        ("a.bin", lambda path: b"<html>", "it is neither safetensors nor a torch file"),
        ("a.bin", lambda path: b"P", "it is neither safetensors nor a torch file"),
        ("a.bin", lambda path: LFS_POINTER, "it is Git LFS's pointer to a file: git lfs pull"),
        ("a.safetensors", lambda path: LFS_POINTER, "it is Git LFS's pointer to a file"),
        ("a.bin", lambda path: archive(path)[:3000], "it is cut off"),
        ("a.bin", lambda path: archive(path, legacy=True)[:900], "damaged"),
        ("a.bin", lambda path: pickle.dumps([1], 2), "damaged"),
        ("a.safetensors", lambda path: b"<html>", "damaged"),
    ],
)
def test_the_error_says_why_a_file_has_no_tensors(tmp_path, name, make, message):
    path = tmp_path / name
    path.write_bytes(make(path))
    with pytest.raises(CheckpointError) as caught:
        read_tensors(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_an_expanded_tensor_without_values_is_read(tmp_path):
    torch.save({"a": torch.empty(1, 0).expand(5, 0)}, tmp_path / "a.bin")
    assert read_tensors(tmp_path / "a.bin")[0]["a"].shape == (5, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_first_not_finite_names_the_first_such_tensor(value):
    tensors = [("a", torch.ones(2)), ("b", torch.tensor([1, value])), ("c", torch.tensor(value))]
    assert first_not_finite(tensors) == "b"
    assert first_not_finite(tensors[:1]) is None
