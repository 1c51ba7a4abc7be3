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


def test_lines_end_in_either_way(tmp_path):
    unix, windows = tmp_path / "unix", tmp_path / "windows"
    unix.write_bytes(b"a\nb\n")
    windows.write_bytes(b"a\r\nb\r\n")
    digest = digests.lines_digest(unix)
    assert digest == digests.file_digest(unix) == digests.lines_digest(windows)
    windows.write_bytes(b"a\r\n\r\nb\r\n")
    assert digest != digests.lines_digest(windows)


def test_a_digest_is_shown_in_part():
    assert digests.shown("0123456789abcdef" * 4) == "0123456789abcdef…"
    for value in ("0123456789abcdef", 3, None, "x" * 64):
        assert digests.shown(value) == value


def test_a_folder_s_digest_is_of_names_and_contents(tmp_path):
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


def test_links_back_to_a_folder_lead_to_an_end(tmp_path):
    """Two of them double the folders with each step, until the system refuses the name."""
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
