"""Tests of digests of files and folders."""

import hashlib
import os
import sys

import pytest

from loralib.io import digests


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_a_files_digest_covers_all_of_its_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(digests, "_BLOCK", 8)
    content = bytes(range(size))
    (tmp_path / "file").write_bytes(content)
    assert digests.file_digest(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_a_lines_digest_does_not_depend_on_line_ends(tmp_path):
    unix, windows = tmp_path / "unix", tmp_path / "windows"
    unix.write_bytes(b"a\nb\n")
    windows.write_bytes(b"a\r\nb\r\n")
    digest = digests.lines_digest(unix)
    assert digest == digests.file_digest(unix) == digests.lines_digest(windows)
    windows.write_bytes(b"a\r\n\r\nb\r\n")
    assert digest != digests.lines_digest(windows)


def test_short_digest_shortens_only_digests():
    assert digests.short_digest("0123456789abcdef" * 4) == "0123456789abcdef…"
    for value in ("0123456789abcdef", 3, None, "x" * 64):
        assert digests.short_digest(value) == value


def test_a_folders_digest_covers_names_and_contents(tmp_path):
    (tmp_path / "a" / "below").mkdir(parents=True)
    path = tmp_path / "a" / "below" / "rows.json"
    seen = []
    for text in ("b", "c"):
        path.write_text(text)
        seen.append(digests.folder_digest(tmp_path / "a"))
    path.rename(path.with_name("other.json"))
    seen.append(digests.folder_digest(tmp_path / "a"))
    assert len({*seen}) == 3
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "moved" / ".hidden").write_text("")
    (tmp_path / "moved" / "nowhere").symlink_to(tmp_path / "absent")
    assert digests.folder_digest(tmp_path / "moved") == seen[-1]


def test_a_folders_digest_is_the_same_on_all_systems(tmp_path, monkeypatch):
    """Paths in it are joined by "/"."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "naïve.txt").write_text("a")
    content = hashlib.sha256(b"a").hexdigest()
    expected = hashlib.sha256(f"below/naïve.txt\n{content}\n".encode()).hexdigest()
    assert digests.folder_digest(tmp_path) == expected

    def relpath(file, start):
        return original(file, start).replace("/", "\\")

    original = os.path.relpath
    monkeypatch.setattr(digests.os.path, "relpath", relpath)
    monkeypatch.setattr(digests.os, "sep", "\\")
    assert digests.folder_digest(tmp_path) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' names are UTF-8")
def test_names_in_a_folder_need_not_be_utf_8(tmp_path):
    seen = []
    for name in (b"na\xefve", b"na\xeeve"):
        path = os.path.join(os.fsencode(tmp_path), name)
        with open(path, "wb"):
            seen.append(digests.folder_digest(tmp_path))
        os.unlink(path)
    assert seen[0] != seen[1]


def test_links_back_to_a_folder_are_not_followed_endlessly(tmp_path):
    """Two such links double the paths at each level, until a path is too long for the system."""
    (tmp_path / "below").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("l1", "l2"):
        (tmp_path / name).symlink_to(".")
    seen = []
    for target in (".", "below", "other"):
        (tmp_path / "l3").unlink(missing_ok=True)
        (tmp_path / "l3").symlink_to(target)
        seen.append(digests.folder_digest(tmp_path))
    assert len({*seen}) == 3
    (tmp_path / "below" / "file").write_text("a")
    assert digests.folder_digest(tmp_path) not in seen
