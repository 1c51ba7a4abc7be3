"""The recipes of both trees, with an output folder of the test's own."""

import sys
from pathlib import Path

import pytest
from launches import quick_python

from reproduction.glue import Glue
from reproduction.nlg import Nlg
from reproduction.plan import read_rows
from reproduction.runs import run_of


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch, tmp_path):
    """None of the caller's variables, and a working folder of the test's own."""
    for name in ("NPROC", "MNLI_CHECKPOINT", "MASTER_PORT", "SEED", "RUN_DIR", "TRIAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick_start(monkeypatch) -> None:
    """What is started has imported what is not the project's."""
    monkeypatch.setattr(sys, "executable", str(quick_python()))


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def glue(out):
    return Glue(out, small=False)


@pytest.fixture
def nlg(out):
    return Nlg(out, small=False)


@pytest.fixture
def rows(glue, nlg):
    return read_rows([glue, nlg])


@pytest.fixture
def run(out):
    return run_of(out, "e2e_gpt2_md", 110)
