"""Tests of watching for processes that hang."""

import threading
from functools import partial

import pytest
from torch.distributed import HashStore

from loralib.training import watch as watch_module
from loralib.training.watch import Watch


class Watched:
    """The watches of several processes, on a clock that the test advances.

    `lines` holds, by process, the line with which it has ended.

    Args:
        count: how many processes there are.
        timeout: after how many seconds of that clock a process hangs.
    """

    def __init__(self, count, timeout=10.0):
        self.now, self.lines, store = 0.0, {}, HashStore()
        self.watches = [
            Watch(store, n, count, timeout, partial(self.lines.setdefault, n), lambda: self.now)
            for n in range(count)
        ]
        for watch in self.watches:
            assert watch.daemon
            assert watch.interval == timeout / 10
            watch.interval = 0.01  # real seconds that a process waits before it ends silently

    def pass_time(self, seconds, working=(), alive=None):
        """Lets time pass, second by second; working processes make progress, live ones look."""
        alive = range(len(self.watches)) if alive is None else alive
        for _ in range(seconds):
            self.now += 1
            for number in working:
                self.watches[number].progress += 1
            for number in alive:
                if number not in self.lines:
                    self.watches[number].look()


def test_processes_that_work_are_left_alone():
    watched = Watched(3)
    watched.pass_time(100, working=[0, 1, 2])
    assert watched.lines == {}


def test_pauses_shorter_than_the_timeout_are_no_hang():
    watched = Watched(2)
    for _ in range(5):
        watched.pass_time(9)
        watched.pass_time(1, working=[0, 1])
    assert watched.lines == {}


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_no_longer_reports_hangs(stopped):
    """Its watch has stopped too, as after SIGSTOP or with a lost host."""
    watched = Watched(3)
    watched.pass_time(20, working=[0, 1, 2])
    left = [number for number in range(3) if number != stopped]
    watched.pass_time(10, alive=left)
    assert watched.lines == {}
    watched.pass_time(3, alive=left)
    first, *others = left
    assert watched.lines[first] == f"process {stopped} of 3 hangs: nothing for 10 s"
    assert all(watched.lines[number] == "" for number in others)


def test_the_process_with_the_least_progress_hangs():
    """The others wait for it, and make no progress either."""
    watched = Watched(3)
    watched.pass_time(20, working=[0, 1, 2])
    watched.pass_time(1, working=[0, 1])
    watched.pass_time(9)
    assert watched.lines == {}
    watched.pass_time(3)
    assert watched.lines == {0: "process 2 of 3 hangs: nothing for 10 s", 1: "", 2: ""}


def test_processes_that_stop_at_nearly_the_same_time_are_named_together():
    """As those of a lost host may, because each reports once per interval."""
    watched = Watched(3)
    watched.watches[0].interval = 1.0
    watched.pass_time(20, working=[0, 1, 2])
    watched.pass_time(1, working=[0, 2], alive=[0, 2])
    watched.pass_time(11, alive=[0])
    assert watched.lines == {0: "processes 1, 2 of 3 hang: nothing for 10 s"}


def test_all_processes_can_hang():
    watched = Watched(2)
    watched.pass_time(13)
    assert watched.lines == {0: "processes 0, 1 of 2 hang: nothing for 10 s", 1: ""}


@pytest.mark.parametrize("line", ["process 1 of 2 hangs", ""])
def test_the_end_is_logged_by_the_process_that_has_a_line(monkeypatch, caplog, line):
    """Every process ends with status 1."""
    ends = []
    monkeypatch.setattr(watch_module, "end_at_once", ends.append)
    watch_module._end_process(line)
    assert ends == [1]
    message = f"{line}; the run ends, and resumes from its last checkpoint"
    assert caplog.messages == [message] * bool(line)


def test_a_process_ends_if_the_store_is_gone():
    class Gone(HashStore):
        def set(self, *_):
            raise RuntimeError("Connection reset by peer")

    ended, lines = threading.Event(), []
    Watch(Gone(), 0, 2, 0.5, lambda line: (lines.append(line), ended.set())).start()
    assert ended.wait(10)
    (line,) = lines
    assert line.startswith(
        "the run's first host can no longer be reached (Connection reset by peer)"
    )
    assert line.endswith("; if its process ended with an error, see its message")
