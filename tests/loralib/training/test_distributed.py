"""Tests of how the processes of an attempt find each other, and what they exchange."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from launches import preloaded_python
from torch.distributed import TCPStore

from loralib.errors import TrainingError
from loralib.training import distributed
from loralib.training.distributed import join

CPU = torch.device("cpu")


@pytest.fixture
def store():
    """``store()`` returns a new connection to one server, as each process has its own."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect():
        return TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    return connect


# ---- agreeing on an attempt ----


def agree(store, count, numbers=None, timeout=10):
    """Runs these processes (all by default), each in a thread; returns what they agree on."""
    numbers = range(count) if numbers is None else numbers
    with ThreadPoolExecutor(count) as pool:
        calls = [
            pool.submit(distributed._agree_on_attempt, store(), number, count, timeout)
            for number in numbers
        ]
        return [call.result(timeout + 10) for call in calls]


def test_every_attempt_has_its_own_name(store):
    names = [agree(store, 3) for _ in range(3)]
    assert [len(set(attempt)) for attempt in names] == [1, 1, 1]
    assert len({attempt[0] for attempt in names}) == 3


def test_keys_of_dead_processes_are_ignored(store):
    """Processes of an attempt that failed to start have left their greetings and answers."""
    with pytest.raises(TrainingError, match=r"of 4 processes, 2, 3 did not join within 0\.3 s"):
        agree(store, 4, numbers=[0, 1], timeout=0.3)
    store().set("hello/2", "of one that is dead")
    assert len(set(agree(store, 4))) == 1


def test_a_later_attempt_may_have_another_number_of_processes(store):
    assert len(set(agree(store, 4))) == 1
    assert len(set(agree(store, 2))) == 1


def test_processes_of_one_attempt_need_the_same_world_size(store):
    """The first process raises as soon as both are there."""

    def join_as(number, world_size):
        return distributed._agree_on_attempt(store(), number, world_size, 30)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(join_as, 0, 2), pool.submit(join_as, 1, 3)
        with pytest.raises(TrainingError, match=r"process 1 was .* WORLD_SIZE 3, process 0 with 2"):
            first.result(20)
        second.result(20)


def test_without_a_first_process_waiting_times_out(store):
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        distributed._agree_on_attempt(store(), 1, 2, 0.2)


def test_an_error_of_an_earlier_attempt_is_removed_from_the_store(store, monkeypatch):
    """NCCL's watchdog writes it without a prefix, and every group that finds it there ends."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents = store()
    agents.set("exception_dump", "a process's number")
    agents.set("launcher's", "kept")
    address = (agents.host, agents.port)

    def has_error(number):
        _, own = distributed._attempt_store(address, number, 3, 10)
        return own.check(["exception_dump"])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(has_error, range(3))) == [False] * 3
    assert agents.get("launcher's") == b"kept"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_the_error_names_a_missing_variable_of_the_environment(monkeypatch, name):
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"^{name} is not set in the environment: "):
        join(CPU, timeout=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "2", "^RANK is 2 in the environment, but has to be a number from 0 to 1$"),
        ("RANK", "-1", "^RANK is '-1' in the environment: "),
        ("RANK", "²", "^RANK is '²' in the environment: "),
        ("WORLD_SIZE", "0", "^WORLD_SIZE is 0 in the environment, but has to be at least 1$"),
        ("WORLD_SIZE", "two", "^WORLD_SIZE is 'two' in the environment: "),
        ("MASTER_ADDR", " ", "^MASTER_ADDR is ' ' in the environment: "),
        ("MASTER_PORT", "70000", "^MASTER_PORT is 70000 .* has to be a number from 1 to 65535$"),
        ("MASTER_PORT", "http", "^MASTER_PORT is 'http' in the environment: "),
    ],
)
def test_the_error_names_an_invalid_variable_of_the_environment(monkeypatch, name, value, message):
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for key, each in {**given, name: value}.items():
        monkeypatch.setenv(key, each)
    with pytest.raises(ValueError, match=message):
        join(CPU, timeout=1)


@pytest.mark.slow
def test_a_first_process_that_cannot_be_reached_is_an_error(monkeypatch):
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(TrainingError, match=r"at 127\.0\.0\.1:9, could not be reached within 1 s"):
        join(CPU, timeout=1)


@pytest.mark.slow
def test_a_port_that_does_not_answer_is_an_error(monkeypatch):
    """Such as the port of another program, or one that a firewall holds open."""
    monkeypatch.setattr(distributed, "_LATE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", **address}.items():
            monkeypatch.setenv(name, value)
        expected = r"could not be reached within 1 s \(it accepts connections but does not answer"
        begun = time.monotonic()
        with pytest.raises(TrainingError, match=expected):
            join(CPU, timeout=1)
        assert time.monotonic() - begun >= 1.5


@pytest.mark.parametrize("timeout", [0, -3, float("nan"), float("inf")])
def test_invalid_timeouts_are_refused(timeout):
    with pytest.raises(ValueError, match="timeout has to be a positive number of seconds"):
        join(CPU, timeout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's interfaces")
@pytest.mark.parametrize(("chosen", "expected"), [(None, "second"), ("mine", "mine")])
def test_gloo_uses_the_interface_that_reaches_the_first_host(monkeypatch, chosen, expected):
    """Its default is the interface of this host's own name, which others may not reach."""
    name = "GLOO_SOCKET_IFNAME"
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        monkeypatch.delenv(name)
    addresses = {"first": "10.0.0.1", "second": "127.0.0.1", "third": None}
    monkeypatch.setattr(distributed, "_address_of", lambda _, interface: addresses[interface])
    monkeypatch.setattr(distributed.socket, "if_nameindex", lambda: [*enumerate(addresses, 1)])
    distributed._choose_interface("127.0.0.1")
    assert os.environ[name] == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's interfaces")
def test_an_interface_has_an_address_or_none():
    """Checked with the loopback interface, if there is one."""
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        assert distributed._address_of(probe, "none-such") is None
        assert "lo" not in names or distributed._address_of(probe, "lo") in ("127.0.0.1", None)


def test_shared_tensors_are_sent_in_one_piece(monkeypatch):
    """Whatever their strides; they get the first process's values in place."""

    def broadcast(tensor, source):
        assert tensor.is_contiguous()
        assert source == 0
        tensor.copy_(torch.arange(6.0).view_as(tensor))

    monkeypatch.setattr(distributed.dist, "broadcast", broadcast)
    whole, transposed = torch.zeros(2, 3, requires_grad=True), torch.zeros(3, 2).t()
    places = [whole.data_ptr(), transposed.data_ptr()]
    distributed.share_tensors([whole, transposed], 1)
    assert not whole.any()
    distributed.share_tensors(iter([whole, transposed]), 2)
    assert whole.tolist() == transposed.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [whole.data_ptr(), transposed.data_ptr()] == places


JOIN = """
import os, sys
import torch
from loralib.training import distributed, watch
from loralib.training.process import end_at_once
distributed.join(torch.device("cpu"), timeout=60)
store = watch._watch.store
other = 1 - int(os.environ["RANK"])
watch._watch.look()
store.wait([f"alive/{other}"])
print(store.get(f"alive/{other}").decode())
watch.stop_watching()
distributed.barrier(2)
end_at_once(0)
"""


@pytest.mark.distributed
def test_processes_join_and_watch_each_other():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [preloaded_python(), "-c", JOIN],
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


# ---- warnings ----


def test_only_new_warnings_of_other_processes_are_shown(monkeypatch, caplog):
    shares = [["of all"], ["of all", "of the second"], ["of the second", "of the third"]]
    monkeypatch.setattr(distributed, "warnings_so_far", lambda: shares[0])
    monkeypatch.setattr(
        distributed, "gather_on_first", lambda value, rank, _: [] if rank else shares
    )
    distributed.share_warnings(1, 3)
    assert not caplog.messages
    distributed.share_warnings(0, 3)
    assert caplog.messages == ["process 1: of the second", "process 2: of the third"]
    caplog.clear()
    shares[0] = ["of all", "process 1: of the second", "process 2: of the third"]
    distributed.share_warnings(0, 3)
    assert not caplog.messages


def test_a_single_process_shares_no_warnings(monkeypatch):
    monkeypatch.setattr(distributed.dist, "gather_object", None)
    distributed.share_warnings(0, 1)
