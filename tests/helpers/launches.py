"""Runs scripts under PyTorch's launcher, and in forks of processes that have done the imports."""

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

KILLED = Path(__file__).with_name("killed_run.py")
FORKED = Path(__file__).with_name("forked_processes.py")
# Modules that runs need and that take long to import; DDP needs the compiler.
THIRD_PARTY = ("torch.distributed.run", "torch._dynamo")
IMPORTS = {
    "NLG": (*THIRD_PARTY, "loralib.training.ddp"),
    "NLU": (*THIRD_PARTY, "loralib.training.ddp", "datasets", "transformers.trainer"),
    # For any copy of the project, whose own modules are not imported.
    "others": (*THIRD_PARTY, "datasets", "safetensors.torch", "tokenizers", "matplotlib.pyplot"),
    # For imports of the project itself.
    "torch": ("torch",),
    # For runs that import the hub's library themselves, which then reads its address and switches.
    "hub": ("torch", "safetensors.torch", "tokenizers", "pyarrow.parquet", "pandas"),
}

# A command that makes `ForkServer` do what ``python ARGUMENTS…`` does.
_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
call = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(server, [b"c"], [0, 1, 2])
server.sendall(json.dumps({{**call, "executable": sys.argv[0]}}).encode() + b"\\n")
answers = server.makefile()
number = int(answers.readline())
for passed_on in (signal.SIGINT, signal.SIGTERM):
    signal.signal(passed_on, lambda this, _: os.kill(number, this))
status = int(answers.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class ForkServer:
    """A process that has imported modules; its forks need not import them again.

    They all have the same hash seed, so they cannot show that a result depends on a set's order.

    Args:
        name: a key of `IMPORTS`: what is imported.
        under: the words of a command that starts the process, such as ``ip netns exec NAME``.
        environment: its environment, which modules may read when they are imported; by default
            that of this process.
    """

    def __init__(self, name: str, *under: str, environment: Mapping[str, str] | None = None):
        self._folder = tempfile.mkdtemp(prefix="forks-")
        self._start_process(name, under, environment, subprocess.PIPE)
        atexit.register(self.close)

    def _start_process(
        self, name: str, under: Sequence[str], environment: Mapping[str, str] | None, stdin: Any
    ) -> None:
        self.process = subprocess.Popen(
            [*under, sys.executable, FORKED, ",".join(IMPORTS[name]), self._path],
            stdin=stdin,
            # Not pytest's own, which is a file: Python asks once, as it starts, whether its output
            # has a position. A fork whose output is a pipe would still ask for the position.
            stdout=subprocess.PIPE,
            env=environment,
        )

    @property
    def _path(self) -> str:
        return os.path.join(self._folder, "socket")

    def close(self) -> None:
        """Ends the process; its forks go on."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(
        self, words: Sequence[object], variables: Mapping[str, str], paths: Sequence[Path]
    ) -> "Fork":
        """Starts a fork that does what ``python WORDS…`` does, or a launcher by `with_forks`.

        Args:
            words: the arguments.
            variables: its whole environment.
            paths: the files for its standard output and standard error.
        """
        call = {"arguments": list(map(str, words)), "environment": dict(variables)}
        server = self._connect()
        streams = [os.open(os.devnull, os.O_RDONLY)]
        streams += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in paths]
        socket.send_fds(server, [b"c"], streams)
        for stream in streams:
            os.close(stream)
        server.sendall(json.dumps({**call, "folder": os.getcwd()}).encode() + b"\n")
        return Fork(server, call["arguments"])

    def _connect(self) -> socket.socket:
        """Connects to the process, once it has done its imports."""
        while True:
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._path)
                return server
            except (FileNotFoundError, ConnectionRefusedError):
                server.close()
                self._check_alive()
                time.sleep(0.05)

    def _check_alive(self) -> None:
        assert self.process.poll() is None, "the process ended before its first call"

    def run(
        self, words: Sequence[object], variables: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess:
        """Does the same as `start` to its end; kills the fork after `timeout` seconds."""
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

    def command(self) -> Path:
        """Makes an executable called python, in a folder of its own, that starts forks."""
        path = Path(self._folder, "python")
        own = path.with_name(f"python-{os.getpid()}")
        own.write_text(_COMMAND.format(python=sys.executable, path=self._path))
        own.chmod(0o755)
        own.replace(path)  # which another process may be starting at this moment
        self._connect().close()
        return path


class SharedForkServer(ForkServer):
    """One for all workers of a session: the first that needs it starts it.

    It ends with the session's first process, which holds the other end of its standard input.
    """

    def __init__(self, name: str):
        session = Path(os.environ["LORA_TESTS"])
        self._folder = str(session / name)
        self._deadline = time.monotonic() + 300
        try:
            os.mkdir(self._folder)
        except FileExistsError:
            return
        caches = dict.fromkeys(("HF_HOME", "XDG_CACHE_HOME"), str(session))
        with open(session / "alive") as alive:
            self._start_process(name, (), {**os.environ, **caches}, alive)

    def _check_alive(self) -> None:
        assert time.monotonic() < self._deadline, "the process did not start"


class Fork:
    """A running fork, with a part of the interface of `subprocess.Popen`.

    Args:
        server: the connection by which its process id and its status come.
        words: the words that it was started with.
    """

    def __init__(self, server: socket.socket, words: Sequence[str]):
        self._server, self._words = server, words
        self.pid = self._answer()
        self.returncode: int | None = None

    def _answer(self) -> int:
        said = b""
        while not said.endswith(b"\n"):  # byte by byte, so that `poll` sees what is still to come
            byte = self._server.recv(1)
            assert byte, "the process that forks has ended"
            said += byte
        return int(said)

    def poll(self, seconds: float = 0) -> int | None:
        """Its status; None if it has not ended within `seconds`."""
        if self.returncode is None and select.select([self._server], [], [], seconds)[0]:
            self.returncode = self._answer()
            self._server.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its status; raises `subprocess.TimeoutExpired`."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self._words, timeout)
        return self.returncode

    def kill(self) -> None:
        """Kills it, if it is still running."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(30)


@cache
def fork_server(name: str) -> ForkServer:
    """The process of this name that all tests of the session share."""
    return SharedForkServer(name)


@cache
def preloaded_python() -> Path:
    """A python, in a folder of its own, that starts quickly: it has imported other packages.

    It is not for tests of how Python starts, or of what is imported when.
    """
    return fork_server("others").command()


def with_forks(launcher: str, *arguments: object) -> list[str]:
    """The words by which `ForkServer` runs a launcher whose processes are forks of the launcher.

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
        tree: a key of `IMPORTS`: the launcher is a fork of ``fork_server(tree)``, and the processes
            are forks of the launcher. None: each of them starts Python.
        timeout: seconds after which it is killed.
        environment: variables to add.
    """
    variables = {**os.environ, **(environment or {})}
    if tree is not None:
        words = with_forks(launcher, *arguments)
        return fork_server(tree).run(words, variables, timeout)
    return subprocess.run(
        [sys.executable, "-m", launcher, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=variables,
    )


def launch(
    processes: int,
    *command: object,
    restarts: int = 2,
    launcher: str = "torch.distributed.launch",
    tree: str | None = None,
    **environment: str,
) -> subprocess.CompletedProcess:
    """Runs a script under PyTorch's launcher, on a free port.

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
    """The words before a script and its arguments by which one process is killed, once.

    See killed_run.py; `mark` is a file that exists once the process was killed.
    """
    moment = {"rank": rank, "at": at, "count": count, "mark": str(mark), **more}
    return [str(KILLED), "--moment", json.dumps(moment)]
