"""Runs code in a process whose only hub is the tests' own."""

import json
from pathlib import Path
from typing import Any

from launches import fork_server


def run_on_hub(hub: Any, home: Path, code: str, **environment: str) -> list:
    """What `code` prints, JSON line by line.

    Args:
        hub: the fixture `hub_server`.
        home: where the process keeps what it downloads.
        code: Python.
        environment: variables for the process.
    """
    result = fork_server("hub").run(["-c", code], hub.environment(home, **environment), timeout=300)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
