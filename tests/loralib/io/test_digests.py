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
