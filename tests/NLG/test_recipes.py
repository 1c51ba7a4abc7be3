"""Tests the recipes of NLG/: their checks, how they launch programs, and how they resume."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launches import preloaded_python
from paths import ROOT
from torch.distributed.run import determine_local_world_size


@pytest.mark.parametrize("recipe", ["e2e_gpt2_md.sh", "dart_gpt2_lg.sh"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--work_dir", "x"], "--work_dir is not for recipes: RUN_DIR says where to write"),
        (["--bf16", "--work_dir=x"], "--work_dir is not for recipes: RUN_DIR says"),
        (["--save_lora_only"], "--save_lora_only is not for recipes: the decoding takes"),
    ],
)
def test_flags_that_would_leave_the_decoding_without_a_model_are_refused(recipe, flags, message):
    ended = subprocess.run(
        ["bash", recipe, *flags], cwd=ROOT / "NLG", capture_output=True, text=True
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"{recipe}: error: {message}")


@pytest.mark.parametrize("flags", [["--help"], ["-h"], ["--bf16", "--help"], ["--seed", "1", "-h"]])
def test_help_among_any_flags_ends_the_recipe(flags):
    ended = subprocess.run(
        ["bash", "e2e_gpt2_md.sh", *flags], cwd=ROOT / "NLG", capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("Trains, decodes and scores; flags go to the training: ")
    assert len(ended.stdout.splitlines()) == 3
    for variable in ("NPROC", "SEED", "RUN_DIR", "MASTER_PORT", "TRIAL_DIR"):
        assert variable in ended.stdout


@pytest.mark.parametrize("flags", [[], ["--bf16"], ["--estimate"]])
def test_a_python_without_torch_is_reported(tmp_path, flags):
    (tmp_path / "vocab").mkdir()
    (tmp_path / "data" / "e2e").mkdir(parents=True)
    splits = [f"data/e2e/{name}.jsonl" for name in ("train", "valid", "test", "test_formatted")]
    for name in ("base.pt", "vocab/encoder.json", *splits):
        (tmp_path / name).touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TRIAL_DIR": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    ended = subprocess.run(
        ["bash", "e2e_gpt2_md.sh", *flags],
        cwd=ROOT / "NLG",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"e2e_gpt2_md.sh: error: {python} has no torch: activate")


def run_recipe(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    path = f"{preloaded_python().parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "e2e_gpt2_md.sh", *flags],
        cwd=ROOT / "NLG",
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--lora_dimm", "4"], 2, "unrecognized arguments: --lora_dimm 4; did you"),
        (["--lr", "-1"], 1, "--lr must be at least 0, not -1.0"),
        (["--fp16"], 1, "fp16 needs a GPU: use bf16, which works on a CPU as well"),
        (["--init_checkpoint", "no.bin"], 1, "no.bin: no such checkpoint file (relative to "),
        (["--train_data", "no.jsonl"], 1, "--train_data no.jsonl: no such file (relative to "),
        (["--valid_data", "/no.jsonl"], 1, "--valid_data /no.jsonl: no such file\n"),
    ],
)
def test_flags_are_checked_before_anything_else(flags, status, message):
    """Neither the missing base nor the invalid NPROC is reported."""
    ended = run_recipe(*flags, CUDA_VISIBLE_DEVICES="", TRIAL_DIR="/none", NPROC="two")
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (status, "")
    assert f"{line}\n".startswith(f"e2e_gpt2_md.sh: error: {message}")


@pytest.mark.slow
def test_the_check_of_valid_flags_prints_nothing(tmp_path):
    ended = run_recipe("--bf16", "--lr", "1e-3", TRIAL_DIR=str(tmp_path))
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        f"e2e_gpt2_md.sh: error: {tmp_path}/base.pt does not exist; make it with: "
    )


@pytest.mark.parametrize("nproc", ["0", "-1", "two", "1.5", "00", "1 2", " "])
def test_an_invalid_number_of_processes_is_refused(nproc):
    ended = run_recipe(NPROC=nproc)
    expected = f"e2e_gpt2_md.sh: error: NPROC={nproc}: must be a number of processes, at least 1\n"
    assert (ended.returncode, ended.stderr) == (1, expected)


@pytest.mark.slow
def test_nproc_may_be_a_word_that_the_launcher_knows():
    ended = run_recipe(NPROC="gpu", CUDA_VISIBLE_DEVICES="")
    expected = "e2e_gpt2_md.sh: error: NPROC=gpu: this machine has none\n"
    assert (ended.returncode, ended.stderr) == (1, expected)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    counted = subprocess.run(
        ["bash", "-c", "source recipes/common.sh md; echo $NPROC"],
        cwd=ROOT / "NLG",
        env={**os.environ, "PATH": path, "NPROC": "cpu"},
        capture_output=True,
        text=True,
    )
    assert counted.stdout == f"{determine_local_world_size('cpu')}\n"


@pytest.mark.parametrize(
    ("nproc", "pet", "launched"),
    [
        ("", None, False),
        ("1", None, False),
        ("01", None, False),
        (" 1", None, False),
        ("+1", None, False),
        ("1", "PET_NNODES", True),
        ("2", None, True),
        ("02", None, True),
    ],
)
def test_a_single_process_needs_no_launcher(tmp_path, nproc, pet, launched):
    """Its rank and world size are set all the same, whatever they are in the caller's environment.

    With variables of the launcher (PET_…), which may ask for more processes, it is used.
    """
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$RANK $WORLD_SIZE $LOCAL_RANK $@"\n')
    python.chmod(0o755)
    code = 'source recipes/common.sh md; launch src/gpt2_ft.py --lr "1 2"'
    ended = subprocess.run(
        ["bash", "-c", code, "e2e.sh"],
        cwd=ROOT / "NLG",
        env={
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "NPROC": nproc,
            **({pet: "2"} if pet else {}),
            "WORLD_SIZE": "8",
            "RANK": "3",
        },
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    if launched:
        count = 1 if pet else 2
        assert f"-m torch.distributed.launch --nproc_per_node={count} " in ended.stdout
    else:
        assert ended.stdout == "0 1 0 src/gpt2_ft.py --lr 1 2\n"


@pytest.mark.parametrize("card", [[], ["xl"]])
def test_a_card_without_a_recipe(card):
    command = ["bash", "recipes/e2e.sh", *card]
    ended = subprocess.run(command, cwd=ROOT / "NLG", capture_output=True, text=True)
    expected = f"recipes: error: no recipe for a gpt2.{''.join(card)} (known: md, lg)\n"
    assert (ended.returncode, ended.stderr) == (2, expected)


def test_the_command_that_makes_a_missing_file_can_be_pasted(tmp_path):
    clone = tmp_path / "a folder"
    clone.mkdir()
    for name in ("recipes", "e2e_gpt2_md.sh"):
        os.symlink(ROOT / "NLG" / name, clone / name)
    command = ["bash", str(clone / "e2e_gpt2_md.sh")]
    environment = {**os.environ, "TRIAL_DIR": str(tmp_path / "none")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    (command,) = re.findall(r"make it with: (cd .*) && ", ended.stderr)
    assert shlex.split(command) == ["cd", str(clone)]


def with_common(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs shell code after recipes/common.sh, with arguments."""
    return subprocess.run(
        ["bash", "-c", f"source recipes/common.sh md; {code}", "e2e.sh", *arguments],
        cwd=ROOT / "NLG",
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("files", [[], ["model.3.pt"], ["model.3.pt", "resume.pt"]])
def test_a_recipe_resumes_if_there_is_a_state(tmp_path, files):
    """Without a state, --resume would cause a warning. Training has to leave a model."""
    for name in files:
        (tmp_path / name).touch()
    ended = with_common("out=$1; launch() { echo $@; }; train --lr 1; echo decodes", str(tmp_path))
    command, *after = ended.stdout.splitlines()
    assert ("--resume" in command.split()) == ("resume.pt" in files)
    assert command.endswith(" --lr 1")
    if files:
        assert (ended.returncode, after, ended.stderr) == (0, ["decodes"], "")
        return
    message = (
        f"error: {tmp_path} holds a finished run, but its model.<step>.pt is gone: put it back"
    )
    assert (ended.returncode, after) == (1, [])
    assert message in ended.stderr


@pytest.mark.parametrize("name", ["plain", "a & b", "r|s", r"C:\1\runs", "it's $HOME*.pt", "-n"])
@pytest.mark.parametrize("steps", [[], [5], [900, 1000, 95]])
def test_the_last_checkpoint_of_a_folder_of_any_name(tmp_path, name, steps):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    for step in steps:
        (folder / f"model.{step}.pt").touch()
        (folder / f"model.{step}.pt.half").touch()
    for where, given in ((str(ROOT), str(folder)), (str(tmp_path), name)):
        ended = with_common('cd "$1"; last_checkpoint "$2"', where, given)
        assert ended.stderr == ""
        assert ended.stdout == (f"{given}/model.{max(steps)}.pt\n" if steps else "")
