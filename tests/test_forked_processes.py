"""The process that forks the tests' processes survives failures of its forks and its callers."""

import fcntl
import os
import socket
import subprocess
import time

import pytest
from launches import ForkServer

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def forking():
    """One for this file alone, so that no process of another test disturbs it."""
    return ForkServer("NLG")


def run_one(forking: ForkServer, status: int) -> int:
    return forking.run(["-c", f"import os; os._exit({status})"], os.environ, timeout=60).returncode


def test_forks_that_end_at_once_are_all_answered_for(forking, tmp_path):
    """The signal of one fork's end may interrupt the handling of another's."""
    code = """
import fcntl, os, sys
print("here", flush=True)
with open(sys.argv[1]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
os._exit(int(sys.argv[2]))
"""
    gate, said, errors = (tmp_path / name for name in ("gate", "stdout", "stderr"))
    for turn in range(1, 4):
        with gate.open("w") as closed:
            fcntl.flock(closed, fcntl.LOCK_EX)
            calls = [["-c", code, gate, number] for number in range(40)]
            forks = [forking.start(call, os.environ, [said, errors]) for call in calls]
            while said.read_text().count("here") < 40 * turn:
                assert forking.process.poll() is None
                time.sleep(0.05)
        assert [fork.wait(60) for fork in forks] == list(range(40))


@pytest.mark.parametrize("sent", [b"", b"c", b'c{"arguments": ["-c"'])
def test_a_caller_killed_in_its_call_is_passed_over(forking, sent):
    run_one(forking, 0)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(forking._path)
        streams = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
        if sent:
            socket.send_fds(caller, [sent[:1]], streams)
            caller.sendall(sent[1:])
        for stream in streams:
            os.close(stream)
    assert run_one(forking, 7) == 7


def test_a_fork_s_output_may_be_a_pipe(forking):
    """Scripts change the error handler of their output, unless Python's locale has done so."""
    code = 'import sys; sys.stdout.reconfigure(errors="backslashreplace"); print("here")'
    done = subprocess.run([forking.command(), "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
