"""Tests downloads from a local server that can misbehave."""

import errno
import re
import socket
import subprocess
import sys

import pytest

from loralib.errors import DiskFullError
from loralib.io import downloads
from loralib.io.downloads import ATTEMPTS, download

PATH = "/some/file.zip"
CONTENT = bytes(range(256)) * 16
WAY_OUT = "ask a friend"


@pytest.fixture
def server(file_server):
    file_server.files[PATH] = CONTENT
    file_server.etags[PATH] = '"one"'
    return file_server


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_cut_connection_is_continued(server, tmp_path):
    server.cuts[PATH] = [1000, 500]
    download(server.url + PATH, tmp_path / "file.zip", WAY_OUT, len(CONTENT))
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.log == [
        (PATH, None, None),
        (PATH, "bytes=1000-", '"one"'),
        (PATH, "bytes=1500-", '"one"'),
    ]
    assert names(tmp_path) == ["file.zip"]


@pytest.mark.parametrize("etag", [None, 'W/"one"'])
def test_without_a_strong_etag_the_date_identifies_the_file(server, tmp_path, etag):
    date = "Thu, 17 Jun 2021 17:37:18 GMT"
    server.etags, server.dates = {PATH: etag} if etag else {}, {PATH: date}
    server.cuts[PATH] = [1000]
    download(server.url + PATH, tmp_path / "file.zip", WAY_OUT)
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.log == [(PATH, None, None), (PATH, "bytes=1000-", date)]


def test_other_bytes_than_those_asked_for_are_not_used(server, tmp_path):
    server.cuts[PATH], server.shifts[PATH] = [1000], 7
    download(server.url + PATH, tmp_path / "file.zip", WAY_OUT)
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert [sent for _, sent, _ in server.log] == [None, "bytes=1000-", None]


@pytest.mark.parametrize("change", ["nothing", "content", "mixed", "no_ranges", "no_etag"])
def test_next_call_continues_or_starts_over(server, tmp_path, change):
    target = tmp_path / "file.zip"
    if change == "no_etag":
        del server.etags[PATH]
    server.cuts[PATH] = [100] * ATTEMPTS
    if change == "no_ranges":
        server.ranges = False
    with pytest.raises(ConnectionError, match=f"{PATH}: the connection closed.*; {WAY_OUT}$"):
        download(server.url + PATH, target, WAY_OUT)
    assert names(tmp_path) == ["file.zip.part", "file.zip.part.etag"]
    server.conditions = change != "mixed"
    if change in ("content", "mixed"):
        server.files[PATH], server.etags[PATH] = CONTENT[::-1], '"two"'
    download(server.url + PATH, target, WAY_OUT)
    assert target.read_bytes() == server.files[PATH]
    assert names(tmp_path) == ["file.zip"]


def test_part_longer_than_the_file_starts_over(server, tmp_path):
    (tmp_path / "file.zip.part").write_bytes(b"x" * len(CONTENT))
    (tmp_path / "file.zip.part.etag").write_text('"one"')
    download(server.url + PATH, tmp_path / "file.zip", WAY_OUT)
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_a_file_whose_length_the_server_does_not_say(server, tmp_path):
    server.unannounced.add(PATH)
    download(server.url + PATH, tmp_path / "file.zip", WAY_OUT)
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_a_file_has_its_name_once_it_is_on_the_disk(server, tmp_path, monkeypatch):
    """Otherwise a power failure could leave a file of zeros under that name."""
    target, synced = tmp_path / "file.zip", []

    def sync(path):
        synced.append((path, target.exists()))

    monkeypatch.setattr(downloads, "sync_file", sync)
    monkeypatch.setattr(downloads, "sync_folder", sync)
    download(server.url + PATH, target, WAY_OUT)
    assert synced == [(tmp_path / "file.zip.part", False), (tmp_path, True)]


def test_a_server_that_does_not_answer(tmp_path, monkeypatch, caplog):
    """It is waited for longer before each attempt."""
    waited = []

    def silent(request, timeout):
        assert timeout == downloads.TIMEOUT
        raise TimeoutError

    monkeypatch.setattr(downloads, "urlopen", silent)
    monkeypatch.setattr(downloads.time, "sleep", waited.append)
    with pytest.raises(ConnectionError, match=f"^http://a/b: TimeoutError; {WAY_OUT}$"):
        download("http://a/b", tmp_path / "b", WAY_OUT)
    assert waited == [1, 2, 4, 8]
    assert caplog.messages[-1] == "http://a/b: TimeoutError; trying again in 8 s"


@pytest.mark.parametrize("url", ["a/b", "http://[a/b"])
def test_what_is_no_address_is_asked_for_once(tmp_path, caplog, url):
    """Also if a server redirects to it: urllib raises a ValueError."""
    with pytest.raises(ConnectionError, match=f"^{re.escape(url)}: .*; {WAY_OUT}$"):
        download(url, tmp_path / "b", WAY_OUT)
    assert not caplog.messages


def test_what_has_arrived_is_kept_if_the_server_fails_later(server, tmp_path):
    server.cuts[PATH] = [1000] + [0] * (ATTEMPTS - 1)
    with pytest.raises(ConnectionError):
        download(server.url + PATH, tmp_path / "file.zip", WAY_OUT)
    server.errors[PATH] = 503
    with pytest.raises(OSError, match="HTTP 503"):
        download(server.url + PATH, tmp_path / "file.zip", WAY_OUT)
    assert (tmp_path / "file.zip.part").read_bytes() == CONTENT[:1000]


@pytest.mark.parametrize(
    ("status", "requests"), [(404, 1), *((code, ATTEMPTS) for code in (408, 429, 500, 503))]
)
def test_an_answer_that_is_an_error(server, tmp_path, status, requests):
    server.errors[PATH] = status
    with pytest.raises(OSError, match=f"{PATH}: HTTP {status} .+; {WAY_OUT}$") as caught:
        download(server.url + PATH, tmp_path / "file.zip", WAY_OUT)
    assert not isinstance(caught.value, ConnectionError)
    assert len(server.log) == requests
    assert names(tmp_path) == []


def test_no_server(file_server, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf"/a.txt: \[.*refused.*; {WAY_OUT}$"):
        download(f"http://127.0.0.1:{port}/a.txt", tmp_path / "a.txt", WAY_OUT)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "content", "size", "message"),
    [
        ("file.zip", CONTENT, len(CONTENT) + 1, "got 4,096 bytes, not 4,097"),
        ("file.json", CONTENT, None, "can't decode|Expecting value"),
        ("file.json", b"[" * 100_000, None, "while decoding"),
    ],
)
def test_wrong_content_is_not_kept(server, tmp_path, name, content, size, message):
    server.files[PATH] = content
    with pytest.raises(OSError, match=f"{PATH}: .*({message}).*; {WAY_OUT}$"):
        download(server.url + PATH, tmp_path / name, WAY_OUT, size)
    assert len(server.log) == 1
    assert names(tmp_path) == []


def test_a_full_disk(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(downloads, "_append", full)
    with pytest.raises(DiskFullError, match=f"^{tmp_path}/file.zip: the disk is full"):
        download(server.url + PATH, tmp_path / "file.zip", WAY_OUT)
    assert names(tmp_path) == []


def test_a_missing_folder_is_an_error_before_anything_is_requested(server, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        download(server.url + PATH, tmp_path / "missing" / "file.zip", WAY_OUT)
    assert server.log == []


def test_the_library_does_not_import_it():
    code = "import sys, loralib; sys.exit('loralib.io.downloads' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
