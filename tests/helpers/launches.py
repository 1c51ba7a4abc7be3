"""Running scripts under a launcher that starts them again, for the tests of both trees."""

import json
import os
import subprocess
import sys
from pathlib import Path

KILLED = Path(__file__).with_name("killed_run.py")


def launch(processes: int, *command: object, restarts: int = 2, **environment: str):
    """Runs a script under `python -m torch.distributed.launch`, with a free port of its own."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.launch", "--standalone"),
            *(f"--nproc_per_node={processes}", f"--max_restarts={restarts}"),
            *map(str, command),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def killed(mark: Path, rank: int, at: str, count: int, **more: object) -> list[str]:
    """What stands before a script and its arguments so that one process is killed, once.

    See killed_run.py; `mark` is the file by which the test sees that it happened.
    """
    moment = {"rank": rank, "at": at, "count": count, "mark": str(mark), **more}
    return [str(KILLED), "--moment", json.dumps(moment)]
