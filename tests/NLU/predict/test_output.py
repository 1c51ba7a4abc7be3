"""Where predict.py writes to: files, links, pipes, devices."""

import json
import os
import stat
import threading

import pytest

ANSWERS = [{"text": "a", "label": "yes"}, {"text": "é", "label": "no"}]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX's links and pipes")


def written(predict, path) -> None:
    predict.check_output(str(path), predict.STANDARD_STREAM)
    predict.write_lines(str(path), ANSWERS)


def parsed(content: bytes) -> list[dict]:
    return [json.loads(line) for line in content.splitlines()]


def test_links_devices_and_pipes_stay_what_they_are(predict, tmp_path):
    (tmp_path / "link").symlink_to("file")
    written(predict, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert parsed((tmp_path / "file").read_bytes()) == ANSWERS

    written(predict, "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    written(predict, tmp_path / "pipe")
    reader.join(60)
    assert parsed(read[0]) == ANSWERS
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_unwritable_outputs_are_refused_before_anything_is_computed(predict, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "file")
    with pytest.raises(OSError, match=r"is a link to .*, there is no folder .*missing"):
        predict.check_output(str(tmp_path / "link"), predict.STANDARD_STREAM)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        predict.check_output(str(tmp_path), predict.STANDARD_STREAM)


def test_closed_streams_are_refused_before_anything_is_computed(predict, monkeypatch):
    monkeypatch.setattr(predict.sys, "stdout", None)
    with pytest.raises(OSError, match="stdout is closed: give --output_file"):
        predict.check_output(predict.STANDARD_STREAM, predict.STANDARD_STREAM)
    monkeypatch.setattr(predict.sys, "stdin", None)
    with pytest.raises(OSError, match="stdin is closed: give --input_file"):
        predict.read_lines(predict.STANDARD_STREAM, ["rte"])
