"""Running scripts under PyTorch's launcher, for the tests of both trees."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

KILLED = Path(__file__).with_name("killed_run.py")
FORKED = Path(__file__).with_name("forked_processes.py")
# What a process of a run needs that takes long to import; DDP needs the compiler.
IMPORTS = {
    "NLG": ("torch.distributed.run", "torch._dynamo", "loralib.training.ddp"),
    "NLU": (
        *("torch.distributed.run", "torch._dynamo", "loralib.training.ddp"),
        *("datasets", "transformers.trainer"),
    ),
}


def with_forks(launcher: str, *arguments: object) -> list[str]:
    """What has a launcher's processes be forks of it, for `Prepared`.

    Args:
        launcher: its module.
        arguments: its own, then a script's absolute path, and the script's arguments.
    """
    words = list(map(str, arguments))
    at = next(at for at, word in enumerate(words) if not word.startswith("--"))
    return [launcher, *words[:at], str(FORKED), *words[at:]]


def run_launcher(
    launcher: str,
    *arguments: object,
    tree: str | None = None,
    timeout: float = 300,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Runs a launcher to its end.

    Args:
        launcher: its module.
        arguments: its own, then a script's absolute path, and the script's arguments.
        tree: the processes are forks of the launcher, which is one of a process that has done this
            tree's imports for all tests of this session; None where each starts Python.
        timeout: seconds after which it is killed.
        environment: variables to add.
    """
    variables = {**os.environ, **(environment or {})}
    if tree is not None:
        words = with_forks(launcher, *arguments)
        return prepared(tree).run(words, variables, timeout)
    return subprocess.run(
        [sys.executable, "-m", launcher, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=variables,
    )


class Prepared:
    """A process that has done a tree's imports; its forks go on from there, one after the other.

    They have one hash seed: that no result depends on the order of a set shows elsewhere.

    Args:
        tree: see `IMPORTS`.
        under: words of a command that starts it, such as ``ip netns exec NAME``.
    """

    def __init__(self, tree: str, *under: str):
        # Without buffers: what is read is a line, and `select` sees what comes next.
        self.process = subprocess.Popen(
            [*under, sys.executable, FORKED, "--serve", ",".join(IMPORTS[tree])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        atexit.register(self.close)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def start(
        self, words: list[str], variables: Mapping[str, str], paths: Sequence[Path]
    ) -> "Fork":
        """Starts a script, or a launcher by `with_forks`; not before the last fork has ended.

        Args:
            words: the script and its arguments.
            variables: its whole environment.
            paths: the files for its standard output and standard error.
        """
        call = {"arguments": words, "environment": dict(variables), "folder": os.getcwd()}
        call["paths"] = [str(path) for path in paths]
        self.process.stdin.write(json.dumps(call).encode() + b"\n")
        return Fork(self.process.stdout, words)

    def run(
        self, words: list[str], variables: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess:
        """The same to its end; after `timeout` seconds it is killed, as by `subprocess.run`."""
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, name) for name in ("stdout", "stderr")]
            fork = self.start(words, variables, paths)
            try:
                status = fork.wait(timeout)
            except BaseException:
                fork.kill()
                raise
            said = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        return subprocess.CompletedProcess(words, status, *said)


class Fork:
    """A fork that runs, with what `subprocess.Popen` has of this.

    Args:
        answers: where its status will be.
        words: what it was started by.
    """

    def __init__(self, answers: IO[bytes], words: list[str]):
        self._answers, self._words = answers, words
        self.pid = int(answers.readline())
        self.returncode: int | None = None

    def poll(self, seconds: float = 0) -> int | None:
        """Its status once it has ended, waited for so long."""
        if self.returncode is None and select.select([self._answers], [], [], seconds)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its status; raises `subprocess.TimeoutExpired`."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self._words, timeout)
        return self.returncode

    def kill(self) -> None:
        """Kills it, if it is still there."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(30)


@cache
def prepared(tree: str) -> Prepared:
    """The one of this session."""
    return Prepared(tree)


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
        launcher, tree: as for `run_launcher`.
        environment: variables to add.
    """
    flags = ["--standalone", f"--nproc_per_node={processes}", f"--max_restarts={restarts}"]
    return run_launcher(launcher, *flags, *command, tree=tree, environment=environment)


def killed(mark: Path, rank: int, at: str, count: int, **more: object) -> list[str]:
    """What stands before a script and its arguments so that one process is killed, once.

    See killed_run.py; `mark` is the file by which the test sees that it happened.
    """
    moment = {"rank": rank, "at": at, "count": count, "mark": str(mark), **more}
    return [str(KILLED), "--moment", json.dumps(moment)]
