"""The recipes' own checks, before anything is run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT


@pytest.mark.parametrize("recipe", ["e2e_gpt2_md.sh", "dart_gpt2_lg.sh"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--work_dir", "x"], "--work_dir is not for recipes: RUN_DIR says where to write"),
        (["--bf16", "--work_dir=x"], "--work_dir is not for recipes: RUN_DIR says"),
        (["--save_lora_only"], "--save_lora_only is not for recipes: the decoding takes"),
    ],
)
def test_flags_that_would_leave_the_decoding_without_a_model(recipe, flags, says):
    ended = subprocess.run(
        ["bash", recipe, *flags], cwd=ROOT / "NLG", capture_output=True, text=True
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"{recipe}: error: {says}")


@pytest.mark.parametrize("flags", [["--help"], ["-h"], ["--bf16", "--help"], ["--seed", "1", "-h"]])
def test_help_wherever_it_is_asked_for_ends_the_recipe(flags):
    ended = subprocess.run(
        ["bash", "e2e_gpt2_md.sh", *flags], cwd=ROOT / "NLG", capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("Trains, decodes and scores; flags go to the training: ")
    assert len(ended.stdout.splitlines()) == 3


@pytest.mark.slow
def test_a_wrong_flag_is_said_before_anything_is_launched():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "e2e_gpt2_md.sh", "--bf16", "--lora_dimm", "4"],
        cwd=ROOT / "NLG",
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert line.startswith("e2e_gpt2_md.sh: error: unrecognized arguments: --lora_dimm 4; did you")


def test_what_makes_a_missing_file_can_be_pasted(tmp_path):
    clone = tmp_path / "a folder"
    clone.mkdir()
    for name in ("recipes", "e2e_gpt2_md.sh"):
        os.symlink(ROOT / "NLG" / name, clone / name)
    command = ["bash", str(clone / "e2e_gpt2_md.sh")]
    environment = {**os.environ, "TRIAL_DIR": str(tmp_path / "none")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    (command,) = re.findall(r"make it by: (cd .*) && ", ended.stderr)
    assert shlex.split(command) == ["cd", str(clone)]


@pytest.mark.parametrize("name", ["plain", "a & b", "r|s", r"C:\1\runs", "it's $HOME*.pt", "-n"])
@pytest.mark.parametrize("steps", [[], [5], [900, 1000, 95]])
def test_the_last_checkpoint_of_any_folder(tmp_path, name, steps):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    for step in steps:
        (folder / f"model.{step}.pt").touch()
        (folder / f"model.{step}.pt.half").touch()
    code = 'source recipes/common.sh md; cd "$1"; last_checkpoint "$2"'
    for where, given in ((str(ROOT), str(folder)), (str(tmp_path), name)):
        ended = subprocess.run(
            ["bash", "-c", code, "bash", where, given],
            cwd=ROOT / "NLG",
            capture_output=True,
            text=True,
        )
        assert ended.stderr == ""
        assert ended.stdout == (f"{given}/model.{max(steps)}.pt\n" if steps else "")
