"""Tests of the lock on a run's folder: who holds it, and when it is released."""

import errno
import json
import mmap
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
from loralib.training.locks import (
    LOCK_NAME,
    OWNER_NAME,
    Owner,
    in_turn,
    parent_of,
    sole_use,
    started,
)

HOLD = """
import os, sys, time
from loralib.training.locks import sole_use
with sole_use(sys.argv[1]):
    {then}
"""


def holder(folder, then: str = "print(flush=True); time.sleep(600)") -> subprocess.Popen:
    """Starts a process, and returns it once it holds the folder's lock."""
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
def test_the_error_names_the_holder_and_a_killed_process_holds_no_lock(tmp_path):
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
def test_the_lock_is_released_however_its_process_ends(tmp_path, then):
    holder(tmp_path, then).wait()
    take(tmp_path)
    take(tmp_path)


def test_an_error_in_the_block_releases_the_lock(tmp_path):
    with pytest.raises(KeyError), sole_use(tmp_path):
        raise KeyError
    assert not (tmp_path / OWNER_NAME).exists()
    take(tmp_path)


def test_a_disk_that_becomes_read_only_does_not_hide_the_block_s_error(tmp_path, monkeypatch):
    def unlink(path, **settings):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def main():
        with monkeypatch.context() as patch, sole_use(tmp_path):
            patch.setattr(locks.Path, "unlink", unlink)
            raise KeyError

    with pytest.raises(KeyError):
        main()
    take(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `sleep` advances; `.after` is called after each sleep, with the time."""
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
    """The folder's lock, held by another owner."""
    lock = FileLock(tmp_path / LOCK_NAME)
    with lock:
        yield lock


def test_the_lock_of_a_live_process_is_not_waited_for(tmp_path, held, clock):
    write_owner(tmp_path)
    assert refused(tmp_path).startswith(f"{tmp_path}: another run is writing there (process ")
    assert clock.now == 0
    assert (tmp_path / OWNER_NAME).exists()


@pytest.mark.parametrize("command", [{}, {"command": "run_glue.py --seed 1"}])
def test_processes_that_a_launcher_did_not_make_one_run_are_told_so(
    tmp_path, held, monkeypatch, command
):
    """Such as those of srun, which gives each the same command; torchrun makes them one run."""
    write_owner(tmp_path, **command)
    assert ("start them with torchrun, not with srun" in refused(tmp_path)) == (not command)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "start them with torchrun" not in refused(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot be asked whether a process exists")
@pytest.mark.parametrize("named", [True, False])
def test_a_lock_without_a_live_owner_is_waited_for(tmp_path, held, clock, named):
    """The owner's children may still hold it, or it has not written its name yet."""
    if named:
        write_owner(tmp_path, started="of another")
    clock.after = lambda now: held.release() if now > 10 else None
    take(tmp_path)
    assert 10 < clock.now < 10.2
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot be asked whether a process exists")
def test_waiting_for_a_lock_has_an_end(tmp_path, held, clock):
    write_owner(tmp_path, started="of another")
    refused(tmp_path)
    assert 15 < clock.now < 15.2


@pytest.mark.parametrize("pid", [0, -1, "1", 1.5, None])
def test_an_owner_file_with_an_invalid_pid_is_ignored(tmp_path, pid):
    """Signals to 0 and -1 would go to many processes."""
    for valid in (os.getpid(), 1):  # 1 is a container's first process
        write_owner(tmp_path, pid=valid)
        assert Owner.read(tmp_path / OWNER_NAME).pid == valid
    write_owner(tmp_path, pid=pid)
    assert Owner.read(tmp_path / OWNER_NAME) is None


def test_lock_files_may_be_removed_while_they_are_held(tmp_path):
    with sole_use(tmp_path):
        for name in (LOCK_NAME, OWNER_NAME):
            (tmp_path / name).unlink()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_children_of_a_killed_process_are_waited_for(tmp_path):
    """Such as a DataLoader's, which check only now and then whether their parent is alive."""
    then = "os.fork() or (time.sleep(2), os._exit(0)); print(flush=True); time.sleep(600)"
    process = holder(tmp_path, then)
    process.send_signal(signal.SIGKILL)
    process.wait()
    take(tmp_path)


@pytest.mark.slow
def test_the_error_says_so_if_the_holder_of_a_lock_is_unknown(tmp_path, monkeypatch):
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
    """Makes the file system one without locks."""

    def acquire(self, **_):
        raise request.param

    monkeypatch.setattr(locks.FileLock, "acquire", acquire)


def write_owner(folder, **changes) -> None:
    owner = {**vars(Owner.this_process()), **changes}
    (folder / OWNER_NAME).write_text(json.dumps(owner))


@pytest.mark.slow
def test_without_locks_the_owner_file_is_the_lock(tmp_path, no_locks):
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
def test_a_later_process_with_the_owners_pid_is_not_the_owner(tmp_path, no_locks):
    write_owner(tmp_path, started="1")
    take(tmp_path)


def test_on_windows_the_owner_is_not_sent_a_signal(tmp_path, monkeypatch):
    """Signal 0 is Ctrl-C there."""
    owner = Owner.this_process()
    monkeypatch.setattr(locks, "os", SimpleNamespace(name="nt", environ={}))  # without kill
    assert not owner.is_gone
    message = str(locks._held(tmp_path, owner))
    assert message.endswith(f"if it is gone, remove {tmp_path / LOCK_NAME} and {OWNER_NAME}")


def test_a_process_of_another_user_has_not_ended(monkeypatch):
    def refuse(pid, number):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    owner = Owner.this_process()
    assert not owner.is_gone
    monkeypatch.setattr(locks, "started", lambda pid: "")  # as /proc with hidepid=2 makes it
    assert not owner.is_gone


def test_without_locks_all_processes_may_go_into_a_block_at_once(tmp_path, no_locks):
    with in_turn(tmp_path / "lock", patience=0), in_turn(tmp_path / "lock", patience=0):
        pass


@pytest.mark.parametrize("block", [sole_use, lambda folder: in_turn(folder / "lock", patience=0)])
def test_an_error_of_the_disk_does_not_mean_that_there_are_no_locks(tmp_path, monkeypatch, block):
    def acquire(self, **_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(locks.FileLock, "acquire", acquire)
    with pytest.raises(OSError, match="Input/output error"), block(tmp_path):
        pass


def test_other_errors_of_locking_are_raised(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"), sole_use(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_a_long_command_is_shortened():
    owner = Owner(1, "host", "", "now", "run_glue.py --a\n" + "b" * 500)
    assert str(owner).startswith("process 1 on host, since now: run_glue.py --a bbb")
    assert len(str(owner)) < 220


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "name",
    ["plain", "train) R 1 (", "trainé-ünïcode", "ein-langer-naé", b"latin1-\xe9", "中文訓練程序"],
)
def test_a_process_with_any_name_has_a_start_time_and_a_parent(tmp_path, name):
    """Linux cuts a command's name to 15 bytes, maybe within a character."""
    script = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    with open(script, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\nread line\n")
    os.chmod(script, 0o755)
    with subprocess.Popen([script], stdin=subprocess.PIPE) as process:
        assert started(process.pid).isdecimal()
        assert parent_of(process.pid) == os.getpid()
        process.communicate(b"\n")
    assert started(process.pid) == ""


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")
def test_a_start_time_does_not_change():
    """Other numbers next to it do, such as the size of the process."""
    before = started(os.getpid())
    with mmap.mmap(-1, 1 << 24):
        assert started(os.getpid()) == before
    assert int(before) > 0


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_where_there_is_no_proc_ps_is_asked_for_the_parent(tmp_path, monkeypatch):
    def absent(pid):
        raise FileNotFoundError

    monkeypatch.setattr(locks, "_stat", absent)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (started(7), parent_of(7)) == ("", None)  # there is no ps either
    ps = tmp_path / "ps"
    ps.write_text('#!/bin/sh\n[ "$*" = "-o ppid= -p 7" ] && echo "  42"\n')
    ps.chmod(0o755)
    assert (parent_of(7), parent_of(8)) == (42, None)
    ps.write_text("#!/bin/sh\n")
    assert parent_of(7) is None
