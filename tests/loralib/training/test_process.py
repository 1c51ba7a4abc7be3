"""Tests of a script's process: random generators, one-line errors, output, and its end."""

import gc
import io
import operator
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import loralib.training.process as process_module
from loralib.errors import CheckpointError, TrainingError
from loralib.training import watch
from loralib.training.determinism import rng_state, set_rng_state, set_seed, set_up_device
from loralib.training.launcher_env import rank
from loralib.training.process import HEAD_START, run, without_collector

ROOT = Path(__file__).resolve().parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def draw():
    """Draws from each generator; `gauss` and `standard_normal` store a second number for later."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(()).item(),
    )


# ---- random generators ----


def test_a_seed_gives_the_same_numbers():
    drawn = []
    for seed in (3, 3, 4):
        set_seed(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_seeds_may_exceed_32_bits():
    set_seed(2**32 + 3)
    first = draw()
    set_seed(2**32 + 3)
    assert draw() == first


@pytest.mark.parametrize("draws_before", [0, 1, 700])
def test_rng_state_can_be_loaded_from_a_file_weights_only(draws_before):
    set_seed(5)
    for _ in range(draws_before):
        draw()
    file = io.BytesIO()
    torch.save(rng_state(CPU), file)
    expected = [draw() for _ in range(3)]
    set_seed(99)
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def test_reading_rng_state_draws_nothing():
    set_seed(5)
    expected = draw()
    set_seed(5)
    rng_state(CPU)
    assert draw() == expected


@pytest.mark.parametrize(("before", "now"), [(CPU, CPU), (GPU, GPU), (CPU, GPU), (GPU, CPU)])
def test_rng_state_of_another_device_is_a_warning(before, now, fake_gpu_rng, monkeypatch, caplog):
    monkeypatch.delenv("RANK", raising=False)
    file = io.BytesIO()
    torch.save(rng_state(before), file)
    expected = draw()
    fake_gpu_rng.append(torch.tensor([7, 7], dtype=torch.uint8))
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True), now)
    assert draw() == expected  # generators that both devices have are restored
    restored = before == now == GPU
    assert fake_gpu_rng[-1].tolist() == ([1, 2] if restored else [7, 7])
    names = {CPU: "a CPU", GPU: "a GPU"}
    assert caplog.messages == (
        []
        if before == now
        else [
            f"resumes, but not bit-exactly: the checkpoint was written on {names[before]}, and "
            f"this run computes on {names[now]}, which has other random numbers"
        ]
    )


def test_only_the_main_process_warns(fake_gpu_rng, monkeypatch, caplog):
    state = rng_state(CPU)
    for process, messages in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", process)
        set_rng_state(state, GPU)
        assert len(caplog.messages) == messages


# ---- the device ----


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_the_device_is_set_up_as_asked(device_settings, tf32, deterministic):
    device_settings.write(not tf32, not tf32, True, False)
    set_up_device(tf32=tf32, deterministic=deterministic)
    device_settings.expect(tf32, deterministic)
    workspace = ":4096:8" if deterministic else None
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
    # PyTorch's other settings for it agree.
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == tf32
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") == tf32


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("", "tf32"),
        ("", "bf16"),
        ("cudnn", "tf32"),
        ("cudnn.conv", "tf32"),
        ("cuda.matmul", "tf32"),
        ("mkldnn.matmul", "bf16"),
        ("mkldnn.conv", "bf16"),
        ("mkldnn.rnn", "bf16"),
    ],
)
def test_float32_is_float32_whatever_was_set(device_settings, place, value, tf32):
    backends = torch.backends
    operator.attrgetter(f"{place}.fp32_precision".lstrip("."))(
        backends
    )  # fails if PyTorch has no such setting
    target = operator.attrgetter(place)(backends) if place else backends
    target.fp32_precision = value
    set_up_device(tf32=tf32)
    device_settings.expect(tf32)  # PyTorch raises if its two settings contradict each other
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    on_gpu = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    assert {kind.fp32_precision == "tf32" for kind in on_gpu} == {tf32}
    on_cpu = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    assert {kind.fp32_precision for kind in on_cpu} <= {"ieee", "none"}


def test_a_workspace_that_the_user_has_set_stays(device_settings, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_up_device(deterministic=True)
    set_up_device()
    device_settings.expect(tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("was_on", [True, False])
def test_new_memory_is_filled_only_in_a_users_deterministic_mode(device_settings, was_on):
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(was_on)
    set_up_device(deterministic=True)
    assert torch.utils.deterministic.fill_uninitialized_memory == was_on
    device_settings.expect(tf32=False, deterministic=True)


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


@pytest.mark.parametrize("kind", [CheckpointError, TrainingError, ValueError, FileNotFoundError])
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


def test_an_unexpected_error_keeps_its_traceback(lines):
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0, lines.append)
    assert lines == []


GONE = "another process of the run is gone; if it ended with an error"
LATE = "other processes of the run did not answer in time; see the timeout"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        ("[pair.cc:537] Read error [10.0.0.1]:49818: Connection reset by peer. GLHF!", GONE),
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:56552.", GONE),
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


@pytest.mark.parametrize("error", [ValueError("bad"), RuntimeError("connection reset by peer")])
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


def test_an_interrupt_is_one_line_and_status_130(lines):
    def main():
        raise KeyboardInterrupt

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
    monkeypatch.setenv("RANK", "3")
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
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        run(main, lines.append)
    assert ended.value.code == 130
    assert lines == [f"script.py: interrupted{which}" for which in reported]
    assert signal.getsignal(signal.SIGINT) is before


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
    command = [sys.executable, "-c", SCRIPT, f"file://{tmp_path}/store"]
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


# ---- standard streams ----


CLOSED = """
import logging, sys
from loralib.training.process import begin, run, set_up_logging
sys.stderr = None  # as in Python if it was closed at the start
begin()
from tqdm.auto import tqdm
def main():
    set_up_logging()
    logging.getLogger("loralib").warning("a warning")
    print(len(list(tqdm("abc"))))
run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, False])
def test_a_script_without_standard_error_runs_and_prints_its_output(begins):
    code = CLOSED if begins else CLOSED.replace("begin()\n", "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("printed", "last"),
    [
        ("for number in range(100_000): print(number)", "0"),
        # So little that it is written only at the end, when the pipe is closed.
        ("sys.stdin.read(); print(1)", ""),
        ("sys.stdin.read(); print(1); sys.exit(0)", ""),
    ],
)
def test_a_pipe_that_is_closed_early_ends_a_script_without_a_message(printed, last, unbuffered):
    code = "import sys\nfrom loralib.training.process import run\n"
    code += f"def main():\n {printed}\nrun(main)"
    script = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with script:
        if last:
            assert script.stdout.readline().strip() == last
        script.stdout.close()
        script.stdin.close()
        assert script.stderr.read() == ""
        assert script.wait() == 141


def test_another_broken_pipe_is_an_error(lines):
    def main():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as ended:
        run(main, lines.append)
    assert (ended.value.code, lines) == (1, ["script.py: error: [Errno 32] Broken pipe"])


BREAK_ANOTHER_PIPE = "reader, writer = os.pipe(); os.close(reader); os.write(writer, b'x')"


def run_with_closed_output(ends: str) -> tuple[str, int]:
    """Returns the errors and the status of a script whose output cannot be written.

    Args:
        ends: its last line.
    """
    code = "import os, sys\nfrom loralib.training.process import run\n"
    code += f"def main():\n print(1)\n sys.stdin.read()\n {ends}\nrun(main)"
    script = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with script:
        script.stdout.close()
        script.stdin.close()
        return script.stderr.read(), script.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "errors", "status"),
    [
        ("raise ValueError('my own')", "-c: error: my own\n", 1),
        ("sys.exit('my own')", "my own\n", 1),
        ("sys.exit(3)", "", 3),
        ("raise KeyboardInterrupt", "-c: interrupted\n", 130),
        (BREAK_ANOTHER_PIPE, "-c: error: [Errno 32] Broken pipe\n", 1),
        ("pass", "", 141),
    ],
)
def test_a_scripts_own_end_is_reported_although_its_output_cannot_be_written(ends, errors, status):
    """Its printed line is still in the buffer when it ends."""
    assert run_with_closed_output(ends) == (errors, status)


@pytest.mark.slow
def test_a_traceback_is_shown_although_the_output_cannot_be_written():
    """The status is 1, although Python exits with 120 if it cannot flush the output."""
    errors, status = run_with_closed_output("1 / 0")
    assert (errors.splitlines()[-1], status) == ("ZeroDivisionError: division by zero", 1)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_keeps_its_name_mode_encoding_and_descriptor(unbuffered):
    shows = "print([getattr(sys.stdout, name) for name in ('name', 'mode', 'encoding')], "
    shows += "sys.stdout.fileno(), sys.stdout.buffer.name)"
    code = "import sys\nfrom loralib.training.process import run\n"
    code += f"{shows}\nrun(lambda: {shows})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
    )
    before, after = done.stdout.splitlines()
    assert after == before
    assert "<stdout>" in before


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("count", [1, 100_000])
def test_a_full_device_is_an_error_of_standard_output(count, unbuffered):
    code = "from loralib.training.process import run\n"
    code += f"run(lambda: [print(number) for number in range({count})])"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.stderr == "-c: error: standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs limits of processes")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_cut_off_is_an_error(tmp_path, unbuffered):
    """As by a full disk: the system first takes what fits."""
    code = "import resource, sys; from loralib.training.process import run\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    code += "run(lambda: sys.stdout.buffer.write(bytes(2000)))"
    with open(tmp_path / "output", "w") as output:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.stderr == "-c: error: standard output: File too large\n"
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs limits of processes")
def test_output_is_written_once_if_the_rest_of_it_fits_later(tmp_path):
    code = "import contextlib, resource, sys; from loralib.training.process import run\n"
    code += "def main():\n"
    code += "  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 5000))\n"
    code += "  with contextlib.suppress(OSError): print('x' * 2000, flush=True)\n"
    code += "  resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
    code += "run(main)"
    with open(tmp_path / "output", "w") as output:
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
            stdout=output,
            check=True,
        )
    assert (tmp_path / "output").read_text() == "x" * 2000 + "\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX's pipes")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_does_not_wait_for_its_reader_is_an_error(unbuffered):
    """Another program may have set a shared pipe or terminal so."""
    code = "import os, sys; from loralib.training.process import run; os.set_blocking(1, False)\n"
    code += "run(lambda: sys.stdout.buffer.write(bytes(10**7)))"
    done = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.wait() == 1  # nothing is read before
    assert "error: standard output: Resource temporarily unavailable" in done.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_keeps_its_order(unbuffered):
    """Output from before `run`, from within it, and from outside of Python's streams."""
    code = "import os, sys; from loralib.training.process import run\nprint('a √')\n"
    code += "def main():\n print('b √')\n sys.stdout.flush()\n os.write(1, b'c')\n print('d')\n"
    code += "run(main)\nprint('e')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
        | {"PYTHONIOENCODING": "ascii:backslashreplace"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("a \\u221a\nb \\u221a\ncd\ne\n", "")


@pytest.mark.slow
def test_a_process_without_standard_output_ends_at_once():
    code = "import sys; from loralib.training.process import end_at_once; "
    code += "sys.stdout = None; end_at_once(3)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize("call", ["begin(); print('√')", "run(lambda: print('√'))"])
def test_characters_that_an_encoding_lacks_are_escaped(encoding, call):
    code = f"from loralib.training.process import begin, run; {call}"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True)
    expected = "√" if encoding == "utf-8" else "\\u221a"
    assert (done.returncode, done.stdout.decode().strip(), done.stderr) == (0, expected, b"")


@pytest.mark.parametrize("stream", ["closed", None])
def test_closed_or_missing_output_is_not_flushed(monkeypatch, stream):
    if stream is not None:
        stream = io.TextIOWrapper(io.BytesIO())
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    with process_module._flushing_output():
        pass


def test_the_message_says_if_a_file_is_where_a_folder_is_needed(tmp_path):
    """The system's text is only "File exists". An error with nothing but a text keeps it."""
    (tmp_path / "file").touch()
    for name, reason in (("file", "is a file, where a folder is needed"), ("", "File exists")):
        error = FileExistsError(17, "File exists", str(tmp_path / name))
        assert process_module.error_in_words(error) == f"{tmp_path / name}: {reason}"
    assert process_module.error_in_words(OSError("cut off")) == "cut off"


@pytest.mark.parametrize(
    ("errors", "expected"), [("strict", "backslashreplace"), ("replace", "replace")]
)
def test_the_users_handling_of_unknown_characters_stays(monkeypatch, errors, expected):
    """Set by PYTHONIOENCODING; the default, an error, is replaced."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", errors)
    monkeypatch.setattr(sys, "stdout", stream)
    process_module._set_up_streams()
    assert (sys.stdout, stream.errors) == (stream, expected)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace())  # such as a notebook's
    process_module._set_up_streams()


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


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_import_pytorch_without_the_collector(script):
    """The collector is on again when they begin to work."""
    path = ROOT / script
    code = (
        "import contextlib, gc, io, runpy, sys\n"
        f"sys.path.insert(0, {str(path.parent)!r})\n"
        f"sys.argv = [{path.name!r}, '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    runpy.run_path({str(path)!r}, run_name='__main__')\n"
        "full = gc.get_stats()[2]['collections']\n"
        "print('torch' in sys.modules, full, gc.get_freeze_count() > 10**5, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "0", "True", "True"], done.stderr


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
        gc.unfreeze()


def test_outside_of_scripts_the_collector_stays_on():
    """Objects that are frozen would never be collected."""
    frozen = gc.get_freeze_count()
    run(lambda: None)
    with without_collector():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_need_no_docstrings(script):
    """Python -OO, and PYTHONOPTIMIZE=2, leave them out."""
    command = [sys.executable, "-OO", str(ROOT / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("usage: "), done.stderr
