"""Tests of a script's process: one-line errors, its end, and how it begins."""

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from launches import ForkServer, preloaded_python

import loralib.training.process as process_module
from loralib.errors import CheckpointError, TrainingError, UnsupportedLayerError
from loralib.training import watch
from loralib.training.launcher_env import rank
from loralib.training.process import HEAD_START, run, without_collector

ROOT = Path(__file__).resolve().parents[3]
# ---- errors ----


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py", "--flag"])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LORA_DEBUG", raising=False)
    return []


def test_a_script_that_succeeds_reports_nothing(lines):
    done = []
    run(lambda: done.append(1), lines.append)
    assert (done, lines) == ([1], [])


@pytest.mark.parametrize(
    "kind",
    [
        *(CheckpointError, TrainingError, UnsupportedLayerError, ValueError, FileNotFoundError),
        torch.OutOfMemoryError,
    ],
)
def test_an_error_is_one_line(kind, lines, monkeypatch):
    def main():
        raise kind("first\n  second")

    with pytest.raises(SystemExit) as ended:
        run(main, lines.append)
    assert ended.value.code == 1
    assert lines == ["script.py: error: first second"]
    monkeypatch.setenv("LORA_DEBUG", "1")
    with pytest.raises(kind):
        run(main, lines.append)


@pytest.mark.parametrize(
    ("fail", "line"),
    [
        (lambda: torch.empty(2**50), "DefaultCPUAllocator: .*memory"),
        (lambda: bytes(2**50), "MemoryError$"),
    ],
)
def test_too_little_memory_is_one_line(lines, fail, line):
    with pytest.raises(SystemExit) as ended:
        run(fail, lines.append)
    assert ended.value.code == 1
    assert re.match(f"script.py: error: .*{line}", lines[0])


def test_an_error_names_its_process_if_it_is_not_the_main_one(lines, monkeypatch):
    def main():
        raise ValueError("bad")

    waits = []
    monkeypatch.setattr(time, "sleep", lambda seconds: waits.append((seconds, len(lines))))
    assert rank() == 0
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        run(main, lines.append)
    assert waits == []
    monkeypatch.setenv("RANK", "3")
    assert rank() == 3
    with pytest.raises(SystemExit):
        run(main, lines.append)
    assert lines == ["script.py: error: bad", "script.py: error (process 3): bad"]
    # It waited, so that if the main process had ended, the launcher would have ended this one.
    assert waits == [(HEAD_START, 1)]


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("timed out")])
def test_an_unexpected_error_keeps_its_traceback(lines, error):
    """Such as one that a collective could raise, in a process without others."""

    def fail():
        raise error

    with pytest.raises(type(error)):
        run(fail, lines.append)
    assert lines == []


GONE = "another process of the run is gone; if it ended with an error"
LATE = "other processes of the run did not answer in time; see the timeout"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        ("[pair.cc:537] Read error [10.0.0.1]:49818: Connection reset by peer. GLHF!", GONE),
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:56552.", GONE),
        ("[pair.cc:451] writev [127.0.0.1]:56552: Broken pipe", GONE),
        (NCCL + "remote process exited or there was a network error, NCCL version 2.27.5", GONE),
        (NCCL + "socketProgress: Connection closed by remote peer host<49818>", GONE),
        ("NCCL communicator was aborted on rank 1. ", GONE),
        ("[gloo] Timed out waiting 1800000ms for recv operation to complete", LATE),
        ("WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 2053 milliseconds before timing out.", LATE),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_an_error_of_a_collective_says_what_happened_to_the_others(
    lines, monkeypatch, message, reported
):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", sys.exit)  # so that this process survives

    def fail():
        raise RuntimeError(message)

    if reported is None:
        with pytest.raises(RuntimeError, match="shapes cannot"):
            run(fail, lines.append)
        return
    with pytest.raises(SystemExit) as ended:
        run(fail, lines.append)
    assert ended.value.code == 1
    assert f"error: {reported}" in lines[0]


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), RuntimeError("connection reset by peer"), KeyboardInterrupt()],
)
def test_a_process_with_an_error_stops_watching_first(lines, monkeypatch, error):
    """Otherwise the watch could end it, with the others, before it has reported its error."""

    def fail():
        raise error

    ended = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(time, "sleep", lambda seconds: ended.append("waited"))
    monkeypatch.setattr(watch, "stop_watching", lambda: ended.append("watch"))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        run(fail, lines.append)
    assert ended[0] == "watch"
    assert len(lines) == 1


def test_an_interrupt_is_one_line_and_status_130(lines, monkeypatch):
    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(SystemExit) as ended:
        run(main, lines.append)
    assert ended.value.code == 130
    (line,) = lines
    assert line.endswith(": interrupted")


def test_another_process_than_the_main_one_waits_before_it_reports_an_interrupt(lines, monkeypatch):
    """If the main process is interrupted too, the launcher ends this one meanwhile."""

    def main():
        raise KeyboardInterrupt

    waits = []
    monkeypatch.setattr(time, "sleep", lambda seconds: waits.append((seconds, len(lines))))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    with pytest.raises(SystemExit):
        run(main, lines.append)
    assert lines == ["script.py: interrupted (process 3)"]
    assert waits == [(HEAD_START, 0)]


@pytest.mark.parametrize(
    ("number", "local", "reported"),
    [("0", "0", [""]), ("1", "1", []), ("4", "0", [" (process 4)"]), ("5", "1", [])],
)
def test_an_interrupt_under_a_launcher_is_one_line_per_machine(
    lines, monkeypatch, number, local, reported
):
    """All processes get Ctrl-C from the launcher, and once more from the terminal."""

    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
    of_launcher = {"TORCHELASTIC_RUN_ID": "none", "RANK": number, "LOCAL_RANK": local}
    for name, value in of_launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run(main, lines.append)
    assert ended.value.code == 130
    assert lines == [f"script.py: interrupted{which}" for which in reported]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_broken_pipe_is_an_error(lines):
    def main():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as ended:
        run(main, lines.append)
    assert (ended.value.code, lines) == (1, ["script.py: error: [Errno 32] Broken pipe"])


def test_the_message_says_if_a_file_is_where_a_folder_is_needed(tmp_path):
    """The system's text is only "File exists". An error with nothing but a text keeps it."""
    (tmp_path / "file").touch()
    for name, number, reason in (
        ("file", errno.EEXIST, "is a file, where a folder is needed"),
        ("file", errno.EACCES, os.strerror(errno.EACCES)),
        ("", errno.EEXIST, os.strerror(errno.EEXIST)),
    ):
        error = OSError(number, os.strerror(number), str(tmp_path / name))
        assert process_module.error_in_words(error) == f"{tmp_path / name}: {reason}"
    page = URLError("refused", "https://page")
    assert process_module.error_in_words(page) == "<urlopen error refused>"
    assert process_module.error_in_words(OSError("cut off")) == "cut off"
    full = OSError(errno.ENOSPC, "No space left on device")
    assert process_module.error_in_words(full).startswith(f"{full.strerror}: df shows which disk")


# ---- the end of a process that belongs to a group ----

SCRIPT = """
import atexit, sys
import torch.distributed as dist
from loralib.training.process import run

def main():
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
    atexit.register(lambda: print("at exit"))
    print("worked", flush=True)
    sys.stdin.readline()  # until the other one has joined, which needs this process
    if "fails" in sys.argv:
        raise ValueError("bad")

run(main, print)
print("not reached")
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("fails", "code", "last"), [((), 0, "at exit"), (("fails",), 1, "bad")])
def test_processes_of_a_group_end_together(tmp_path, fails, code, last):
    command = [preloaded_python(), "-c", SCRIPT, f"file://{tmp_path}/store"]
    processes = [
        subprocess.Popen(
            [*command, str(number), *fails],
            cwd=ROOT,
            env={**os.environ, "RANK": str(number)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        assert "worked\n" in iter(process.stdout.readline, "")  # PyTorch 2.9 prints lines before
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        text, _ = process.communicate(timeout=60)
        assert process.returncode == code
        assert last in text
        assert "not reached" not in text


@pytest.mark.slow
def test_end_at_once_works_from_a_thread_if_the_output_cannot_be_written():
    """If it failed, the other processes would keep waiting for this one."""
    script = "import sys, threading; from loralib.training.process import end_at_once; "
    script += "sys.stdin.read(); "
    script += (
        "sys.stdout = open(1, 'w'); print('held back'); "  # buffered, despite PYTHONUNBUFFERED
    )
    script += "threading.Thread(target=end_at_once, args=(3,)).start(); threading.Event().wait(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.close()
    process.stdin.close()
    assert process.wait(50) == 3


@pytest.mark.slow
def test_a_process_without_standard_output_ends_at_once():
    code = "import sys; from loralib.training.process import end_at_once; "
    code += "sys.stdout = None; end_at_once(3)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3


# ---- imports without the garbage collector ----


SCRIPTS = (
    "examples/text-classification/run_glue.py",
    "examples/text-classification/predict.py",
    "examples/language-modeling/run_mlm.py",
    "examples/token-classification/run_ner.py",
    "examples/question-answering/run_qa.py",
    "examples/multiple-choice/run_swag.py",
    "NLG/src/gpt2_ft.py",
    "NLG/src/gpt2_beam.py",
    "utils/convert.py",
    "utils/split_lora.py",
)


# Installed libraries that are slow to import.
HEAVY = {"datasets", "pandas", "pyarrow", "scipy", "sklearn", "sympy", "torch._dynamo"}

HELP = """
import builtins, contextlib, gc, io, runpy, sys

real, collected, frozen = builtins.__import__, [], gc.get_freeze_count()

def noting(name, *more, **others):
    if name == "torch":
        collected.append(gc.isenabled())
    return real(name, *more, **others)

builtins.__import__ = noting
sys.path.insert(0, {folder!r})
sys.argv = ["", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    runpy.run_path({path!r}, run_name="__main__")
print(collected[0], gc.get_freeze_count() > frozen, gc.isenabled(), out.getvalue()[:7])
print(*sorted({heavy} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def without_docstrings():
    """A process whose forks have PyTorch and, as under Python -OO, no docstrings."""
    server = ForkServer("torch", environment={**os.environ, "PYTHONOPTIMIZE": "2"})
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_pytorch_without_the_collector_and_neither_docstrings_nor_heavy_imports(
    without_docstrings, script
):
    """The collector is off when they import PyTorch, and on again when they begin to work."""
    path = ROOT / script
    code = HELP.format(folder=str(path.parent), path=str(path), heavy=HEAVY)
    done = without_docstrings.run(["-c", code], os.environ, 60)
    assert done.stdout.split() == ["False", "True", "True", "usage:"], done.stderr


INTERRUPTED = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *more):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["", "--help"]
sys.path.insert(0, {folder!r})
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_interrupt_while_a_script_imports_pytorch_is_one_line(script):
    path = ROOT / script
    code = INTERRUPTED.format(folder=str(path.parent), path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, f"{path.name}: interrupted\n")


INTERRUPTED_LATER = """
import os, signal, sys
from loralib.training.process import begin, run
sys.argv = ["script.py"]
signal.signal(signal.SIGINT, signal.{before})
begin()
def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("put in order")
run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "status", "errors"),
    [("default_int_handler", 130, "script.py: interrupted\n"), ("SIG_IGN", 0, "")],
)
def test_an_interrupt_in_main_is_an_exception(before, status, errors):
    """Unless interrupts are ignored, as under nohup."""
    code = INTERRUPTED_LATER.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "put in order\n", errors)


def test_a_script_imports_without_the_collector_later_too(monkeypatch):
    monkeypatch.setattr(process_module, "_is_script", False)
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        run(lambda: None)
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        with without_collector():
            assert not gc.isenabled()
        assert gc.isenabled()
        with pytest.raises(ImportError), without_collector():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.enable()


def test_outside_of_scripts_the_collector_stays_on():
    """Objects that are frozen would never be collected."""
    frozen = gc.get_freeze_count()
    run(lambda: None)
    with without_collector():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen  # the count falls when what was frozen is freed
