"""What tells one file from another: its content, all of it."""

import hashlib

import pytest

from loralib.io import digests


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_a_file_s_digest_is_of_all_its_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(digests, "_BLOCK", 8)
    content = bytes(range(size))
    (tmp_path / "file").write_bytes(content)
    assert digests.file_digest(tmp_path / "file") == hashlib.sha256(content).hexdigest()
