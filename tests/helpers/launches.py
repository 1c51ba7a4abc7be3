"""Running scripts under PyTorch's launcher, for the tests of both trees."""

import json
import os
import subprocess
import sys
from pathlib import Path

KILLED = Path(__file__).with_name("killed_run.py")
FORKED = Path(__file__).with_name("forked_processes.py")
# What a process of a run needs that takes long to import; DDP needs the compiler.
IMPORTS = {
    "NLG": ("torch._dynamo", "loralib.training.ddp"),
    "NLU": ("torch._dynamo", "loralib.training.ddp", "datasets", "transformers.trainer"),
}


def under_launcher(launcher: str, *arguments: object, tree: str | None = None) -> list[str]:
    """The command line that starts a launcher.

    Args:
        launcher: its module.
        arguments: its own, then a script's absolute path, and the script's arguments.
        tree: the processes are forks of the launcher, in which this tree's imports are done; None
            for processes that each start Python.
    """
    words = list(map(str, arguments))
    if tree is None:
        return [sys.executable, "-m", launcher, *words]
    at = next(at for at, word in enumerate(words) if not word.startswith("--"))
    imports = ["--imports", ",".join(IMPORTS[tree])]
    return [sys.executable, str(FORKED), *imports, launcher, *words[:at], str(FORKED), *words[at:]]


def launch(
    processes: int,
    *command: object,
    restarts: int = 2,
    launcher: str = "torch.distributed.launch",
    tree: str | None = None,
    **environment: str,
) -> subprocess.CompletedProcess:
    """Runs a script under PyTorch's launcher, with a free port of its own.

    Args:
        processes: how many.
        command: the script and its arguments.
        restarts: how often the launcher starts the processes again.
        launcher, tree: as for `under_launcher`.
        environment: variables to add.
    """
    flags = ["--standalone", f"--nproc_per_node={processes}", f"--max_restarts={restarts}"]
    return subprocess.run(
        under_launcher(launcher, *flags, *command, tree=tree),
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
