"""Fixtures with the recipes of NLU/ and NLG/, and an output folder for each test."""

import sys
from pathlib import Path

import pytest
from launches import preloaded_python

from reproduction.glue import Glue
from reproduction.nlg import Nlg
from reproduction.plan import read_rows
from reproduction.runs import run_of


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch, tmp_path):
    """Hides the caller's variables, and changes to the test's folder."""
    for name in ("NPROC", "MNLI_CHECKPOINT", "MASTER_PORT", "SEED", "RUN_DIR", "TRIAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick_start(monkeypatch) -> None:
    """Programs are started by a Python that has already imported the libraries."""
    monkeypatch.setattr(sys, "executable", str(preloaded_python()))


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
