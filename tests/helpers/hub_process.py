"""Runs code in a process whose only hub is the tests' own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_on_hub(hub: Any, home: Path, code: str, **environment: str) -> list:
    """What `code` prints, JSON line by line.

    Args:
        hub: the fixture `hub_server`.
        home: where the process keeps what it downloads.
        code: Python.
        environment: variables for the process.
    """
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=hub.environment(home, **environment),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
