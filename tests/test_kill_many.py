"""Runs of NLU and NLG that are killed at random moments; a short run of helpers/kill_many.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "helpers" / "kill_many.py"


@pytest.mark.fuzz
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks its processes")
@pytest.mark.parametrize("tree", ["glue", "gpt2"])
def test_killed_runs_end_with_the_same_bits(tree):
    command = [sys.executable, str(SCRIPT), "--kills", "3", "--trees", tree]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert f"{tree}: " in result.stdout.splitlines()[-1]
