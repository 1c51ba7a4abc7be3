"""Tests gpt2_ft.py on two hosts: network namespaces of this machine with a virtual cable.

They need root and iproute2, on Linux. The launcher is torchrun, as in the README.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from compare import assert_same_bits
from launches import Fork, ForkServer, with_forks
from paths import HELPERS

from loralib.io.tensors import read_tensors

TINY = HELPERS / "tiny_gpt2_ft.py"
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
SETTINGS = (
    "--max_epoch 80 --save_interval 20 --eval_interval 100 --lora_dropout 0.3 --lr 0.03 "
    "--train_batch_size 1 --ddp_timeout 60"
)


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Hosts:
    """Two hosts and the processes that were started on them.

    Args:
        tag: a part of the hosts' names that makes them unique.
    """

    def __init__(self, tag):
        self.names = {host: f"lora-{tag}-{host}" for host in ADDRESSES}
        self.makers = {}  # host -> the process that starts others there
        self.started = []

    def connect(self):
        for name in self.names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.names.values()
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "cable", "netns", second)
        for host, address in ADDRESSES.items():
            ip("-n", self.names[host], "addr", "add", f"{address}/24", "dev", "cable")
            self.set_link(host, "up")
            self.makers[host] = ForkServer("NLG", "ip", "netns", "exec", self.names[host])

    def set_link(self, host, state):
        ip("-n", self.names[host], "link", "set", "cable", state)

    def launch(self, host, calls) -> Fork:
        """Starts torchrun on a host, with two processes; its log is next to the file of calls."""
        rendezvous = f"join_timeout=40,last_call_timeout=2,is_host={int(host == 'a')}"
        flags = [
            *("--nnodes=2", "--nproc_per_node=2", "--max_restarts=3"),
            *("--rdzv_backend=c10d", "--rdzv_id=run", f"--rdzv_conf={rendezvous}"),
            *(f"--rdzv_endpoint={ADDRESSES['a']}:29400", f"--local_addr={ADDRESSES[host]}"),
        ]
        words = with_forks("torch.distributed.run", *flags, TINY, calls)
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        log = calls.with_name(f"{host}{len(self.started)}.log")
        process = self.makers[host].start(words, environment, [log, log])
        process.log = log
        self.started.append(process)
        return process

    def lose(self, host):
        """Kills all processes on a host at once, except the one that starts others."""
        for pid in map(int, ip("netns", "pids", self.names[host]).stdout.split()):
            if pid != self.makers[host].process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def restore(self):
        """Kills what is running, and restores the link."""
        for host in self.makers:
            self.lose(host)
            self.set_link(host, "up")
        for process in self.started:
            process.wait(30)

    def close(self):
        for maker in self.makers.values():
            maker.close()
        for name in self.names.values():
            ip("netns", "del", name, check=False)


@pytest.fixture(scope="module")
def both_hosts():
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    found = Hosts(os.getpid())
    try:
        try:
            found.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield found
    finally:
        found.close()


@pytest.fixture
def hosts(both_hosts):
    yield both_hosts
    both_hosts.restore()


@pytest.fixture
def calls(_tiny_trial, tmp_path):
    """``calls(name)``: a file with which tiny_gpt2_ft.py trains into a folder of that name."""

    def write(name):
        argv = _tiny_trial.flags(tmp_path / name, *SETTINGS.split())
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([{"argv": argv, "kill_in_step": None}]))
        return path

    return write


def finish(*processes, timeout=200):
    for process in processes:
        code = process.wait(timeout)
        assert code == 0, process.log.read_text(errors="replace")[-3000:]


def wait_for(path, process, timeout=100):
    """Waits until the run has written a file."""
    end = time.monotonic() + timeout
    while not path.exists():
        assert process.poll() is None, process.log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < end, f"{path.name} was not written within {timeout} s"
        time.sleep(0.1)


def last_model(folder):
    path = max(folder.glob("model.*.pt"), key=lambda path: int(path.suffixes[0][1:]))
    return path.name, read_tensors(path)[0]


@pytest.mark.distributed
def test_a_run_is_bit_exact_after_a_lost_host_and_a_cut_link(hosts, calls, tmp_path):
    finish(*(hosts.launch(host, calls("whole")) for host in ADDRESSES))

    a, b = (hosts.launch(host, calls("out")) for host in ADDRESSES)
    wait_for(tmp_path / "out" / "model.40.pt", a)
    hosts.lose("b")
    assert b.wait(30) != 0
    b = hosts.launch("b", calls("out"))
    wait_for(tmp_path / "out" / "model.120.pt", a)
    assert "resuming from" in a.log.read_text(errors="replace")
    hosts.set_link("a", "down")
    time.sleep(20)
    hosts.set_link("a", "up")
    finish(a, b)
    (name, ours), (other, theirs) = (last_model(tmp_path / run) for run in ("out", "whole"))
    assert name == other
    assert_same_bits(ours, theirs)


@pytest.mark.distributed
def test_a_link_that_stays_down(hosts, calls, tmp_path):
    """The processes of both hosts end after --ddp_timeout, with one line each."""
    path = calls("down")
    call = json.loads(path.read_text())
    call[0]["argv"] += ["--ddp_timeout", "10"]
    path.write_text(json.dumps(call))
    a, b = (hosts.launch(host, path) for host in ADDRESSES)
    wait_for(tmp_path / "down" / "model.60.pt", a)
    hosts.set_link("a", "down")
    assert a.wait(150) != 0
    log = a.log.read_text(errors="replace")
    assert re.search(r"process(es)? [23](, 3)? of 4 hangs?: nothing for 10 s", log), log[-3000:]
    end, log = time.monotonic() + 60, ""
    # The host's two processes may end one after the other, and the second finds the first gone.
    ended = r"error \(process [23]\): (other .* did not answer in time|another .* is gone)"
    while len(re.findall(ended, log)) < 2:
        assert time.monotonic() < end, log[-3000:]
        time.sleep(0.5)
        log = b.log.read_text(errors="replace")
    assert "did not answer in time" in log
    assert "Traceback" not in log


@pytest.mark.distributed
def test_a_host_that_does_not_come_back(hosts, calls, tmp_path):
    """The other host waits for it until the rendezvous times out, and ends."""
    a, _ = (hosts.launch(host, calls("lost")) for host in ADDRESSES)
    wait_for(tmp_path / "lost" / "model.60.pt", a)
    hosts.lose("b")
    assert a.wait(150) != 0
    assert "RendezvousTimeoutError" in a.log.read_text(errors="replace")
