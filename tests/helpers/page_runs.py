"""Runs a page's blocks in order: each of bash in a shell, all of Python in one process."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from documents import NOT_OURS, Block
from paths import ROOT

# Pages whose commands are not run from the project's root.
FOLDERS = {Path("NLG/README.md"): Path("NLG")}

# Flags that shorten the steps of quickstart.sh to seconds: of a flag that is given twice, the last
# counts. The curves' step takes its epochs from the LoRA run.
_SHORTER = {
    "run_mlm.py": "--max_steps 4",
    "run_glue.py": "--num_train_epochs 1 --max_train_samples 48",
}
_DONE = "block done: "
# If a page's blocks name it, what they print depends on how long the quickstart trained.
_QUICKSTART = "quickstart_output"

# Runs the blocks that it reads as lines of JSON, in one namespace; writes what each printed.
_PYTHON = f"""
import contextlib, io, json, sys
namespace = {{"__name__": "__main__"}}
for line in sys.stdin:
    block = json.loads(line)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block["text"], block["name"], "exec"), namespace)
    except BaseException:
        print(printed.getvalue(), flush=True)
        raise
    print({_DONE!r} + json.dumps(printed.getvalue()), flush=True)
"""


def shortened(quickstart: str) -> str:
    """The quickstart's script, without the installation, and with few steps of training."""
    lines = []
    for line in quickstart.replace("\\\n", " ").splitlines():
        if "make_environment.sh" in line or "bin/activate" in line:
            continue
        extra = [flags for script, flags in _SHORTER.items() if script in line]
        lines.append(" ".join([line, *extra]))
    return "\n".join(lines)


def copy_project(folder: Path) -> None:
    """Copies the project as a new user gets it, with this Python's environment as its .venv."""
    named = shutil.ignore_patterns(*NOT_OURS, "tests")
    downloaded = {str(ROOT / "NLG"): {"vocab", "data"}}

    def ignored(where: str, names: list[str]) -> set[str]:
        return named(where, names) | (downloaded.get(where, set()) & set(names))

    shutil.copytree(ROOT, folder, ignore=ignored)
    (folder / ".venv").symlink_to(sys.prefix)


def clean_environment(home: Path) -> dict[str, str]:
    """The environment of a user who has just installed the project, and is offline."""
    dropped = ("HF_", "TRANSFORMERS_", "XDG_", "LORALIB_")
    others = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**others, "HOME": str(home), "PATH": path, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def run_bash(text: str, folder: Path, environment: dict[str, str], name: str) -> None:
    """Runs a script up to its first error; its launchers use a free port.

    Raises:
        AssertionError: it failed; with all that it printed.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**environment, "PET_MASTER_PORT": str(port)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, f"{name}: exit status {process.returncode}\n{process.stdout}"


class _Python:
    """One process for all blocks of a page, of the Python that is the environment's."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self._process = subprocess.Popen(
            [shutil.which("python", path=environment["PATH"]), "-u", "-c", _PYTHON],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, block: Block) -> str:
        """Runs a block after those before it, and returns what it prints."""
        request = {"name": str(block), "text": block.text}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        printed = []
        for line in self._process.stdout:
            if line.startswith(_DONE):
                return json.loads(line.removeprefix(_DONE))
            printed.append(line)
        raise AssertionError(f"{block}: failed\n{''.join(printed)}")

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def run_page(blocks: list[Block], folder: Path, environment: dict[str, str]) -> None:
    """Runs the blocks of a page, except those that have a reason not to be run.

    On pages without the quickstart's files, what Python prints is compared with the page.

    Raises:
        AssertionError: one failed, or printed something else; with its line and its output.
    """
    python = None
    compares = not any(_QUICKSTART in block.text for block in blocks)
    try:
        for block in blocks:
            if block.reason is not None:
                continue
            where = folder / FOLDERS.get(block.page, Path())
            if block.language == "bash":
                run_bash(block.text, where, environment, str(block))
                continue
            if python is None:
                python = _Python(where, environment)
            printed = python.run(block)
            if compares and block.output is not None:
                assert printed == block.output, f"{block}: prints\n{printed}"
    finally:
        if python is not None:
            python.close()
