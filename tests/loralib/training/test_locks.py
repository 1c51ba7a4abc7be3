"""The lock on a run's folder: whose it is, and when it is free again."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from filelock import FileLock

from loralib.errors import TrainingError
from loralib.training import locks
from loralib.training.locks import LOCK_NAME, OWNER_NAME, Owner, parent_of, sole_use, started

HOLD = """
import os, sys, time
from loralib.training.locks import sole_use
with sole_use(sys.argv[1]):
    {then}
"""


def holder(folder, then: str = "print(flush=True); time.sleep(600)") -> subprocess.Popen:
    """A process that holds the folder's lock, once it has printed a line."""
    command = [sys.executable, "-c", HOLD.format(then=then), str(folder), "--learning rate"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def take(folder) -> None:
    with sole_use(folder):
        assert json.loads((folder / OWNER_NAME).read_text())["pid"] == os.getpid()


def refused(folder) -> str:
    with pytest.raises(TrainingError) as caught, sole_use(folder):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_the_lock_says_whose_it_is_and_a_killed_process_holds_none(tmp_path):
    process = holder(tmp_path)
    try:
        message = refused(tmp_path)
        whose = f"process {process.pid} on {socket.gethostname()}, since "
        assert message.startswith(f"{tmp_path}: another run is writing there ({whose}")
        assert f"-c {tmp_path} '--learning rate'): wait until it ends, or" in message
        assert (tmp_path / OWNER_NAME).exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    start = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - start < locks._ORPHANS
    assert os.name != "posix" or list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("then", ["os._exit(0)", "sys.exit(3)", "raise ValueError", "pass"])
def test_however_a_process_ends_the_folder_is_free(tmp_path, then):
    holder(tmp_path, then).wait()
    take(tmp_path)
    take(tmp_path)


def test_an_error_within_frees_the_folder(tmp_path):
    with pytest.raises(KeyError), sole_use(tmp_path):
        raise KeyError
    assert not (tmp_path / OWNER_NAME).exists()
    take(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """A clock that waiting alone moves; `.after` is called after each wait, with the time."""
    clock = SimpleNamespace(now=0.0, after=lambda now: None)

    def sleep(seconds):
        clock.now += seconds
        assert clock.now < 60, "it waits without end"
        clock.after(clock.now)

    fake = SimpleNamespace(sleep=sleep, monotonic=lambda: clock.now, strftime=time.strftime)
    monkeypatch.setattr(locks, "time", fake)
    return clock


@pytest.fixture
def held(tmp_path):
    """A lock on the folder that is another's."""
    lock = FileLock(tmp_path / LOCK_NAME)
    with lock:
        yield lock


def test_a_run_that_is_alive_is_not_waited_for(tmp_path, held, clock):
    write_owner(tmp_path)
    assert refused(tmp_path).startswith(f"{tmp_path}: another run is writing there (process ")
    assert clock.now == 0
    assert (tmp_path / OWNER_NAME).exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows does not say whether a process is there")
@pytest.mark.parametrize("named", [True, False])
def test_what_is_left_of_a_run_that_has_ended_is_waited_for(tmp_path, held, clock, named):
    """Its children; or it has not written its name yet."""
    if named:
        write_owner(tmp_path, started="of another")
    clock.after = lambda now: held.release() if now > 10 else None
    take(tmp_path)
    assert 10 < clock.now < 10.2
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(os.name == "nt", reason="Windows does not say whether a process is there")
def test_it_is_not_waited_for_without_end(tmp_path, held, clock):
    write_owner(tmp_path, started="of another")
    refused(tmp_path)
    assert 15 < clock.now < 15.2


@pytest.mark.parametrize("pid", [0, -1, "1", None])
def test_a_number_that_no_process_has_is_nobody_s(tmp_path, pid):
    """The system takes 0 and -1 for many processes."""
    write_owner(tmp_path)
    assert Owner.read(tmp_path / OWNER_NAME).pid == os.getpid()
    write_owner(tmp_path, pid=pid)
    assert Owner.read(tmp_path / OWNER_NAME) is None


def test_what_somebody_has_removed_is_not_missed(tmp_path):
    with sole_use(tmp_path):
        for name in (LOCK_NAME, OWNER_NAME):
            (tmp_path / name).unlink()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_children_of_a_killed_process_are_waited_for(tmp_path):
    """As a DataLoader's are, which look only now and then whether their parent is alive."""
    then = "os.fork() or (time.sleep(2), os._exit(0)); print(flush=True); time.sleep(600)"
    process = holder(tmp_path, then)
    process.send_signal(signal.SIGKILL)
    process.wait()
    take(tmp_path)


@pytest.mark.slow
def test_a_lock_of_which_nobody_says_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_ORPHANS", 0.3)
    process = holder(tmp_path)
    try:
        for content in ("", "[]", '{"pid": 1}', None):
            if content is None:
                (tmp_path / OWNER_NAME).unlink()
            else:
                (tmp_path / OWNER_NAME).write_text(content)
            message = refused(tmp_path)
            assert "another run is writing there (unknown)" in message
            assert f"if it is gone, remove {tmp_path / LOCK_NAME} and {OWNER_NAME}" in message
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=[OSError(errno.ENOLCK, "No locks available"), NotImplementedError("flock")])
def no_locks(request, monkeypatch):
    """A file system that has no locks."""

    def acquire(self, **_):
        raise request.param

    monkeypatch.setattr(locks.FileLock, "acquire", acquire)


def write_owner(folder, **changes) -> None:
    owner = {**vars(Owner.this_process()), **changes}
    (folder / OWNER_NAME).write_text(json.dumps(owner))


@pytest.mark.slow
def test_without_locks_the_owner_s_file_counts(tmp_path, no_locks):
    take(tmp_path)
    write_owner(tmp_path)
    assert f"process {os.getpid()} on" in refused(tmp_path)
    write_owner(tmp_path, host="elsewhere")
    assert f"if it is gone, remove {tmp_path / LOCK_NAME}" in refused(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_owner(tmp_path, pid=ended.pid)
    take(tmp_path)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")
def test_another_process_of_the_same_number_is_not_the_owner(tmp_path, no_locks):
    write_owner(tmp_path, started="1")
    take(tmp_path)


def test_on_windows_no_process_is_asked_whether_it_is_there(tmp_path, monkeypatch):
    """Signal 0 is Ctrl-C there."""
    owner = Owner.this_process()
    monkeypatch.setattr(locks, "os", SimpleNamespace(name="nt"))  # without kill
    assert not owner.is_gone
    message = str(locks._held(tmp_path, owner))
    assert message.endswith(f"if it is gone, remove {tmp_path / LOCK_NAME} and {OWNER_NAME}")


def test_other_errors_are_not_taken_for_a_file_system_without_locks(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"), sole_use(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_a_long_command_is_cut():
    owner = Owner(1, "host", "", "now", "run_glue.py --a\n" + "b" * 500)
    assert str(owner).startswith("process 1 on host, since now: run_glue.py --a bbb")
    assert len(str(owner)) < 220


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "name",
    ["plain", "train) R 1 (", "trainé-ünïcode", "ein-langer-naé", b"latin1-\xe9", "中文訓練程序"],
)
def test_a_process_of_any_name_is_told_from_others(tmp_path, name):
    """Linux cuts a command's name to 15 bytes, within a letter maybe."""
    script = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    with open(script, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\nread line\n")
    os.chmod(script, 0o755)
    with subprocess.Popen([script], stdin=subprocess.PIPE) as process:
        assert started(process.pid).isdecimal()
        assert parent_of(process.pid) == os.getpid()
        process.communicate(b"\n")
    assert started(process.pid) == ""
