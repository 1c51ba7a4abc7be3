"""Tests of standard output and standard error of scripts."""

import io
import os
import subprocess
import sys
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import IO

import pytest

from loralib.training.standard_streams import flushing_output, set_up_streams

ROOT = Path(__file__).resolve().parents[3]


def start(code: str, unbuffered: str = "", output: IO[str] | int = subprocess.PIPE) -> Popen[str]:
    """Starts a script whose other streams are pipes."""
    return Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )


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
@pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does")
@pytest.mark.parametrize("closes", ["<&- >&- 2>&-", ">&-", "<&- 2>&-"])
def test_what_c_code_prints_into_closed_streams_is_in_no_file(closes, tmp_path):
    """The system gives the lowest descriptors that are free to the files opened next."""
    code = "import os\nfrom loralib.training.process import begin\nbegin()\n"
    code += "with open('first', 'wb'), open('second', 'wb'), open('third', 'wb'):\n"
    code += " os.write(1, b'printed'); os.write(2, b'warned')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = ["sh", "-c", f'"$0" -c "$1" {closes}', sys.executable, code]
    done = subprocess.run(shell, cwd=tmp_path, env=environment)
    assert done.returncode == 0
    assert [(tmp_path / name).read_bytes() for name in ("first", "second", "third")] == [b""] * 3


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
    with start(code, unbuffered) as script:
        if last:
            assert script.stdout.readline().strip() == last
        script.stdout.close()
        script.stdin.close()
        assert script.stderr.read() == ""
        assert script.wait() == 141


BREAK_ANOTHER_PIPE = "reader, writer = os.pipe(); os.close(reader); os.write(writer, b'x')"


def run_with_closed_output(ends: str) -> tuple[str, int]:
    """Returns the errors and the status of a script whose output cannot be written.

    Args:
        ends: its last line.
    """
    code = "import os, sys\nfrom loralib.training.process import run\n"
    code += f"def main():\n print(1)\n sys.stdin.read()\n {ends}\nrun(main)"
    with start(code) as script:
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
    before, after = start(code, unbuffered).communicate()[0].splitlines()
    assert after == before
    assert "<stdout>" in before


def written_to(output: IO[str], code: str, unbuffered: str) -> tuple[str, int]:
    """Returns the errors and the status of a script whose output is this file."""
    script = start(code, unbuffered, output)
    return script.communicate()[1], script.returncode


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("count", [1, 100_000])
def test_a_full_device_is_an_error_of_standard_output(count, unbuffered):
    code = "from loralib.training.process import run\n"
    code += f"run(lambda: [print(number) for number in range({count})])"
    with open("/dev/full", "w") as full:
        errors, status = written_to(full, code, unbuffered)
    assert (errors, status) == ("-c: error: standard output: No space left on device\n", 1)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs limits of processes")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_cut_off_is_an_error(tmp_path, unbuffered):
    """As by a full disk: the system first takes what fits."""
    code = "import resource, sys; from loralib.training.process import run\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    code += "run(lambda: sys.stdout.buffer.write(bytes(2000)))"
    with open(tmp_path / "output", "w") as output:
        errors, status = written_to(output, code, unbuffered)
    assert (errors, status) == ("-c: error: standard output: File too large\n", 1)


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
        assert written_to(output, code, unbuffered="") == ("", 0)
    assert (tmp_path / "output").read_text() == "x" * 2000 + "\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX's pipes")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_does_not_wait_for_its_reader_is_an_error(unbuffered):
    """Another program may have set a shared pipe or terminal so."""
    code = "import os, sys; from loralib.training.process import run; os.set_blocking(1, False)\n"
    code += "run(lambda: sys.stdout.buffer.write(bytes(10**7)))"
    script = start(code, unbuffered)
    assert script.wait() == 1  # nothing is read before
    assert "error: standard output: Resource temporarily unavailable" in script.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_keeps_its_order(unbuffered, monkeypatch):
    """Output from before `run`, from within it, and from outside of Python's streams."""
    code = "import os, sys; from loralib.training.process import run\nprint('a √')\n"
    code += "def main():\n print('b √')\n sys.stdout.flush()\n os.write(1, b'c')\n print('d')\n"
    code += "run(main)\nprint('e')"
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:backslashreplace")
    shown = start(code, unbuffered).communicate()
    assert shown == ("a \\u221a\nb \\u221a\ncd\ne\n", "")


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
    with flushing_output():
        pass


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ("strict", "backslashreplace"),
        ("surrogateescape", "backslashreplace"),
        ("replace", "replace"),
    ],
)
def test_the_users_handling_of_unknown_characters_stays(monkeypatch, errors, expected):
    """Set by PYTHONIOENCODING; the defaults, with which they are an error, are replaced."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", errors)
    monkeypatch.setattr(sys, "stdout", stream)
    set_up_streams()
    assert (sys.stdout, stream.errors) == (stream, expected)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace())  # such as a notebook's
    set_up_streams()
