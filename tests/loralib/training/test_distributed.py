"""How processes of an attempt agree, see each other hang, and know an earlier attempt."""

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, TCPStore

from loralib.errors import TrainingError
from loralib.training import distributed
from loralib.training.distributed import Watch, find_launch, join, warm_up_ddp


@pytest.fixture
def store():
    """``store()``: another connection to one server, as every process has its own."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect():
        return TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    return connect


# ---- agreeing on an attempt ----


def agree(store, count, numbers=None, timeout=10):
    """What processes of these numbers, all by default, agree on, each in a thread."""
    numbers = range(count) if numbers is None else numbers
    with ThreadPoolExecutor(count) as pool:
        calls = [
            pool.submit(distributed._agree_on_attempt, store(), number, count, timeout)
            for number in numbers
        ]
        return [call.result(timeout + 10) for call in calls]


def test_every_attempt_has_a_name_of_its_own(store):
    names = [agree(store, 3) for _ in range(3)]
    assert [len(set(attempt)) for attempt in names] == [1, 1, 1]
    assert len({attempt[0] for attempt in names}) == 3


def test_what_dead_processes_have_said_is_passed_over(store):
    """Processes of an attempt that never came to be have said hello, and have been answered."""
    with pytest.raises(TrainingError, match=r"of 4 processes, 2, 3 did not join within 0\.3 s"):
        agree(store, 4, numbers=[0, 1], timeout=0.3)
    store().set("hello/2", "of one that is dead")
    assert len(set(agree(store, 4))) == 1


def test_a_process_of_another_number_of_processes(store):
    assert len(set(agree(store, 4))) == 1
    assert len(set(agree(store, 2))) == 1


def test_nobody_is_there(store):
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        distributed._agree_on_attempt(store(), 1, 2, 0.2)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment(monkeypatch, name):
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"^{name} is '' in the environment: "):
        join(timeout=1)


def test_a_first_process_that_is_not_there(monkeypatch):
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(TrainingError, match=r"at 127\.0\.0\.1:9, could not be reached within 1 s"):
        join(timeout=1)


@pytest.mark.parametrize("timeout", [0, -3, float("nan"), float("inf")])
def test_a_timeout_that_is_none(timeout):
    with pytest.raises(ValueError, match="--ddp_timeout has to be a positive number"):
        join(timeout=timeout)


JOIN = """
import os, sys
from loralib.training import distributed
from loralib.training.distributed import join, stop_watching
from loralib.training.process import end_at_once
from torch.distributed import Store

if hasattr(Store, "clone"):
    def missing(*_):
        raise AttributeError("clone")
    for kind in (Store, distributed.TCPStore, distributed.PrefixStore):
        kind.clone = missing  # as before PyTorch 2.8
join(timeout=60)
store = distributed._watch.store
other = 1 - int(os.environ["RANK"])
distributed._watch.look()
store.wait([f"alive/{other}"])
print(store.get(f"alive/{other}").decode())
stop_watching()
distributed.dist.barrier()
end_at_once(0)
"""


@pytest.mark.distributed
def test_processes_join_and_watch_in_any_supported_version(tmp_path):
    """Which have no way to clone a store, before 2.8."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env={**os.environ, **given, "RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert "1 0" in out, err


# ---- watching ----


class Watched:
    """Watches of several processes, on a clock that the test moves; the lines that they end with.

    Args:
        count: how many processes there are.
        timeout: of their watches, in seconds of that clock.
    """

    def __init__(self, count, timeout=10.0):
        self.now, self.lines, store = 0.0, {}, HashStore()
        self.watches = [
            Watch(store, n, count, timeout, partial(self.lines.setdefault, n), lambda: self.now)
            for n in range(count)
        ]
        for watch in self.watches:
            watch.interval = 0.01  # in real seconds, after which one ends that is not to speak

    def pass_time(self, seconds, working=(), alive=None):
        """Lets time pass, a second at a time, in which some come further and the living look."""
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


def test_a_pause_of_all_that_is_shorter_than_the_limit():
    watched = Watched(2)
    for _ in range(5):
        watched.pass_time(9)
        watched.pass_time(1, working=[0, 1])
    assert watched.lines == {}


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped(stopped):
    """Its watch is stopped as well, as by SIGSTOP, or with its host."""
    watched = Watched(3)
    watched.pass_time(20, working=[0, 1, 2])
    left = [number for number in range(3) if number != stopped]
    watched.pass_time(10, alive=left)
    assert watched.lines == {}
    watched.pass_time(3, alive=left)
    first, *others = left
    assert watched.lines[first] == f"process {stopped} of 3 hangs: nothing for 10 s"
    assert all(watched.lines[number] == "" for number in others)


def test_a_process_that_does_not_come_further():
    """The others wait for it: the one that is furthest behind is named."""
    watched = Watched(3)
    watched.pass_time(20, working=[0, 1, 2])
    watched.pass_time(1, working=[0, 1])
    watched.pass_time(9)
    assert watched.lines == {}
    watched.pass_time(3)
    assert watched.lines[0] == "process 2 of 3 hangs: nothing for 10 s"
    assert watched.lines.keys() == {0, 1, 2}


def test_all_of_them_hang():
    watched = Watched(2)
    watched.pass_time(13)
    assert "processes 0, 1 of 2 hang: nothing for 10 s" in watched.lines.values()


def test_the_store_is_gone():
    class Gone(HashStore):
        def set(self, *_):
            raise RuntimeError("Connection reset by peer")

    ended, lines = threading.Event(), []
    watch = Watch(Gone(), 0, 2, 0.5, lambda line: (lines.append(line), ended.set()))
    watch.start()
    assert ended.wait(10)
    assert lines == ["the run's first host can no longer be reached (Connection reset by peer)"]


# ---- attempts ----


@pytest.fixture
def agent(monkeypatch):
    """``agent(name)``: this process was started by the agent of that name; None for nobody."""

    def start(name):
        monkeypatch.setattr(distributed, "_agent", lambda: name)

    return start


def test_the_first_attempt_and_later_ones(agent, tmp_path):
    agent("a 1 100")
    first = find_launch(tmp_path, 1)
    assert (first.is_restart, first.note) == (False, None)
    assert not find_launch(tmp_path, 1).is_restart  # nothing has begun
    first.begin({"step": 3})
    later = find_launch(tmp_path, 1)
    assert (later.is_restart, later.note) == (True, {"step": 3})
    later.begin({"step": 4})
    assert find_launch(tmp_path, 1).note == {"step": 3}
    agent("a 1 200")  # another process of the same number
    assert not find_launch(tmp_path, 1).is_restart


def test_a_host_that_is_left_knows_the_run(agent, tmp_path):
    path = tmp_path / ".launch.json"
    path.write_text(json.dumps({"agents": ["lost 1 1", "left 2 2"], "note": None}))
    agent("left 2 2")
    assert find_launch(tmp_path, 1).is_restart
    agent("new 3 3")
    assert not find_launch(tmp_path, 1).is_restart


def test_hosts_that_replace_each_other_one_by_one(agent, tmp_path, monkeypatch):
    """In the end none of the first attempt's is left, and the run is still known."""
    for hosts in (["a 1 1", "b 2 2"], ["b 2 2", "c 3 3"], ["c 3 3", "d 4 4"]):
        monkeypatch.setattr(
            distributed,
            "gather_objects",
            lambda value, _, hosts=hosts: hosts if isinstance(value, str) else [value],
        )
        agent(hosts[0])
        launch = find_launch(tmp_path, 2)
        assert launch.is_restart == ("a 1 1" not in hosts)
        launch.begin("the first one's" if not launch.is_restart else "another")
    assert launch.note == "the first one's"


def test_without_a_launcher_nothing_is_left(agent, tmp_path):
    agent(None)
    find_launch(tmp_path, 1).begin()
    assert list(tmp_path.iterdir()) == []
    assert not find_launch(tmp_path / "nowhere", 1).is_restart


def test_the_agent_is_the_parent(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert distributed._agent() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert distributed._agent().split()[1] == str(os.getppid())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"agents": 3}', "null"])
def test_a_damaged_file_counts_as_none(agent, tmp_path, caplog, content):
    agent("a 1 1")
    (tmp_path / ".launch.json").write_text(content)
    launch = find_launch(tmp_path, 1)
    assert not launch.is_restart
    assert ".launch.json is damaged" in caplog.text
    launch.begin()
    assert find_launch(tmp_path, 1).is_restart


# ---- warming up ----


def test_warming_up_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    x = torch.randn(5, 3)
    model(x).sum().backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    expected = torch.get_rng_state()
    seen = []

    def backward():
        model(2 * x).square().sum().backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])

    warm_up_ddp(model, backward)
    assert not torch.equal(seen[0][0], gradients[0])
    assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
