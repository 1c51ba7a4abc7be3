"""Runs the project's other programs: recipes, and the scripts that make small data."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from loralib.errors import TrainingError
from reproduction.runs import ROOT, Run, Tree

# One thread, because models this small are not faster on several.
SMALL_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

# How the error line of a failed script begins, or that of Python with or without torch's prefix.
_ERROR = re.compile(r"\S+\.(?:py|sh): error|(?:\[rank\d+\]: ?)?[\w.]+(?:Error|Exception): ")


def last_error(text: str) -> str | None:
    """Returns the last line of a log that is an error; if there is none, the last line."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if re.search(r"\w", line)]
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    return next(reversed(errors or lines), None)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for other programs: the same Python, and rarely updated bars."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "TQDM_MININTERVAL": "30", **variables}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Locks a folder for this program and those that it starts; yields the lock's descriptor.

    Programs that inherit the descriptor hold the lock as well, because they may outlive this one.
    If nothing was written, the lock and the folders that were made for it are removed.

    Raises:
        ValueError: another program is using the folder; or this is Windows, which has no shell for
            the recipes, and no lock that programs inherit.
    """
    try:
        import fcntl  # here, because --help and --estimate do not need it
    except ImportError as error:
        raise ValueError("on Windows, run this in WSL: see docs/installing.md") from error
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{folder}: another program is using it") from error
        try:
            yield file.fileno()
        finally:
            _remove_unused(folder, made)


def _remove_unused(folder: Path, made: Sequence[Path]) -> None:
    """Removes a folder's lock if nothing else is in it, then those made folders that are empty."""
    if [path.name for path in folder.iterdir()] == ["lock"]:
        (folder / "lock").unlink()
        with suppress(OSError):  # stops at the first folder that is not empty
            for path in made:
                path.rmdir()


def execute(tree: Tree, run: Run, flags: Sequence[str]) -> None:
    """Begins or resumes a run; writes ``error.txt`` if it fails.

    Raises:
        ValueError: another program is using the run's folder.
    """
    with lock_folder(run.folder) as lock:
        run.error.unlink(missing_ok=True)
        command, variables = tree.command(run)
        variables.setdefault("MASTER_PORT", os.environ.get("MASTER_PORT", str(_free_port())))
        if tree.small:
            variables |= SMALL_ENVIRONMENT
        with open(run.log, "a", encoding="utf-8") as log:
            begin = log.tell()
            status = _run_program([*command, *flags], environment(variables), log, lock)
        if status or tree.figures(run) is None:
            said = run.log.read_bytes()[begin:].decode("utf-8", "replace")
            error = last_error(said) or "it printed nothing"
            if status < 0:
                error = f"killed by {signal.Signals(-status).name}"
            run.error.write_text(f"{error}\n", encoding="utf-8")


def show_estimate(tree: Tree, run: Run, flags: Sequence[str]) -> int:
    """Runs a recipe with --estimate, which prints what a run takes; returns its exit status."""
    command, variables = tree.command(run)
    return subprocess.run([*command, *flags, "--estimate"], env=environment(variables)).returncode


def _run_program(command: list[str], variables: dict[str, str], log: TextIO, lock: int) -> int:
    """Runs a program and returns its exit status; ends it if this program is stopped."""
    program = None
    try:
        # An exception while Popen starts the program would leave it running.
        with _signals_delayed():
            program = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
                start_new_session=True,
            )
        return program.wait()
    except BaseException:
        if program is not None:
            os.killpg(program.pid, signal.SIGTERM)
            program.wait()
        raise


@contextmanager
def _signals_delayed() -> Iterator[None]:
    """Lets SIGINT and SIGTERM act at the end of the block; for the main thread."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda arrived, _: received.append(arrived))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in received:
        signal.raise_signal(number)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to fill, which is renamed to `folder` if the block ends without an error."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(folder)


def make(script: str, *arguments: object) -> None:
    """Runs a script of the project.

    Raises:
        TrainingError: the script failed; the message is its error.
    """
    done = subprocess.run(
        [sys.executable, ROOT / script, *map(str, arguments)],
        env=environment(SMALL_ENVIRONMENT),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        raise TrainingError(last_error(done.stderr) or f"{script} failed")
