"""Tests that PyTorch's launcher shows a process's error at the end of its output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launches import preloaded_python

from loralib.io.command_line import ArgumentParser
from loralib.io.elastic_error import tell_launcher
from loralib.training.process import run

SCRIPT = """
import os, sys
import torch.distributed as dist
from loralib.io.command_line import ArgumentParser
from loralib.training.process import run

def main():
    parser = ArgumentParser(prog="script.py")
    for flag in ("--fails", "--local-rank"):
        parser.add_argument(flag)
    fails = parser.parse_args().fails
    dist.init_process_group("gloo")
    if os.environ["RANK"] == fails:
        raise ValueError("this is\\nwrong")
    dist.barrier()

run(main)
"""


@pytest.fixture
def error_file(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


def reported(path: Path) -> str:
    return json.loads(path.read_text(encoding="utf-8"))["message"]["message"]


def test_the_first_error_is_reported(error_file):
    tell_launcher("é first")
    tell_launcher("second")
    assert reported(error_file) == "é first"


def test_without_a_launcher_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    tell_launcher("first")
    assert list(tmp_path.iterdir()) == []


def test_an_error_file_that_cannot_be_written_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    tell_launcher("first")


def test_a_script_that_succeeds_reports_nothing(error_file):
    run(lambda: None)
    assert not error_file.exists()


def test_a_scripts_error_is_reported(error_file, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.delenv("RANK", raising=False)

    def main():
        raise ValueError("wrong")

    with pytest.raises(SystemExit):
        run(main, lambda line: None)
    assert reported(error_file) == "script.py: error: wrong"


def test_a_wrong_flag_is_reported(error_file, capsys):
    with pytest.raises(SystemExit):
        ArgumentParser(prog="script.py").parse_args(["--wrong"])
    assert f"{reported(error_file)}\n" == capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fails", "line"),
    [
        (0, "error: this is wrong"),
        # The first process only reports that this one is gone, which is a consequence.
        (1, "error (process 1): this is wrong"),
    ],
)
def test_the_error_is_the_last_line_of_the_launchers_table(tmp_path, fails, line):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # PyTorch's own launcher: the one that forks reports the process of the lowest rank.
    launcher = [preloaded_python(), "-m", "torch.distributed.launch", "--standalone"]
    command = [*launcher, "--nproc_per_node=2", "--max_restarts=0", script, f"--fails={fails}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    *_, last, border = result.stderr.splitlines()
    assert set(border) == {"="}
    label, _, text = last.partition(" : ")
    assert label.strip() == "traceback"
    assert text == f"script.py: {line}"
