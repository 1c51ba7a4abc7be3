"""A script's process: seeds and their state, errors as one line, the end of several processes."""

import io
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from loralib.files import CheckpointError
from loralib.process import TrainingError, rank, rng_state, run, set_rng_state, set_seed

ROOT = Path(__file__).resolve().parents[2]


def draw():
    """One number of each generator; `gauss` and `standard_normal` keep a second one for later."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(()).item(),
    )


# ---- chance ----


def test_a_seed_gives_the_same_numbers():
    drawn = []
    for seed in (3, 3, 4):
        set_seed(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_large_seeds():
    set_seed(2**32 + 3)
    first = draw()
    set_seed(2**32 + 3)
    assert draw() == first


@pytest.mark.parametrize("draws_before", [0, 1, 700])
def test_the_state_goes_through_a_file_that_loads_weights_only(draws_before):
    set_seed(5)
    for _ in range(draws_before):
        draw()
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = [draw() for _ in range(3)]
    set_seed(99)
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_taking_the_state_draws_nothing():
    set_seed(5)
    expected = draw()
    set_seed(5)
    rng_state()
    assert draw() == expected


# ---- errors ----


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py", "--flag"])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LORA_DEBUG", raising=False)
    return []


def test_a_script_that_ends_well_says_nothing(lines):
    done = []
    run(lambda: done.append(1), lines.append)
    assert (done, lines) == ([1], [])


@pytest.mark.parametrize("kind", [CheckpointError, TrainingError, ValueError, FileNotFoundError])
def test_an_error_is_one_line(kind, lines, monkeypatch):
    def main():
        raise kind("first\n  second")

    with pytest.raises(SystemExit) as ended:
        run(main, lines.append)
    assert ended.value.code == 1
    assert lines == ["script.py: error: first second"]
    monkeypatch.setenv("LORA_DEBUG", "1")
    with pytest.raises(kind):
        run(main, lines.append)


def test_an_error_says_which_of_several_processes_had_it(lines, monkeypatch):
    def main():
        raise ValueError("bad")

    assert rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert rank() == 3
    with pytest.raises(SystemExit):
        run(main, lines.append)
    assert lines == ["script.py: error (process 3): bad"]


def test_a_bug_shows_where_it_is(lines):
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0, lines.append)
    assert lines == []


def test_an_interrupted_script(lines):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run(main, lines.append)
    assert ended.value.code == 130
    assert lines == []


# ---- the end of a process that belongs to a group ----

SCRIPT = """
import atexit, sys
import torch.distributed as dist
from loralib.process import run

def main():
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
    atexit.register(lambda: print("at exit"))
    print("worked")
    if "fails" in sys.argv:
        raise ValueError("bad")

run(main, print)
print("not reached")
"""


@pytest.mark.parametrize(("fails", "code", "last"), [((), 0, "at exit"), (("fails",), 1, "bad")])
def test_processes_of_a_group_end_together(tmp_path, fails, code, last):
    command = [sys.executable, "-c", SCRIPT, f"file://{tmp_path}/store"]
    processes = [
        subprocess.Popen(
            [*command, str(number), *fails],
            cwd=ROOT,
            env={**os.environ, "RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        text, _ = process.communicate(timeout=60)
        assert process.returncode == code
        assert text.startswith("worked\n")
        assert last in text
        assert "not reached" not in text
