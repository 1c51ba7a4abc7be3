"""Tests how a script finds its place among a launcher's processes, and two processes on gloo."""

import argparse
import json
import os
import socket
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

import gpu
from gpu import DistEnv, add_gpu_params, check_same_flags, start
from loralib.training import distributed, watch
from loralib.training.distributed import barrier, gather_objects, sum_over_processes

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MASTER = {"MASTER_ADDR": "first.example", "MASTER_PORT": "1234"}
OPENMPI = {f"OMPI_COMM_WORLD_{name}": "" for name in ("RANK", "SIZE", "LOCAL_RANK")}


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_gpu_params(parser)
    return parser.parse_args([str(flag) for flag in flags])


def openmpi(rank: int, size: int, local_rank: int) -> dict[str, str]:
    return dict(zip(OPENMPI, map(str, (rank, size, local_rank)), strict=True))


def torchrun(rank: int, size: int, local_rank: int) -> dict[str, str]:
    return dict(zip(NAMES[:3], map(str, (rank, size, local_rank)), strict=True))


@pytest.fixture
def joined(monkeypatch):
    """A list of the arguments with which process groups are initialized; no launcher, no GPU."""
    for name in (*NAMES, *OPENMPI):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def join(backend, **more):
        given = {name: more[name] for name in ("rank", "world_size", "device_id")}
        calls.append((backend, {name: v for name, v in given.items() if v is not None}))

    monkeypatch.setattr(distributed, "_attempt_store", lambda *_: ("attempt", HashStore()))
    monkeypatch.setattr(distributed, "_connect", lambda *_: HashStore())
    monkeypatch.setattr(watch.Watch, "start", lambda self: None)
    monkeypatch.setattr(watch, "_watch", None)  # joining sets it
    monkeypatch.setattr(distributed.dist, "init_process_group", join)
    return calls


@pytest.fixture
def environment(monkeypatch, joined):
    """Sets environment variables as a launcher does."""

    def set_all(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.fixture
def two_gpus(monkeypatch, joined):
    """Pretends that there are two GPUs; a list of the devices that are made current."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # A PyTorch that is built for CUDA would otherwise ask the GPU for its capability.
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_defaults_of_the_flags():
    expected = dict(local_rank=None, rank=0, device=0, world_size=0)
    expected["ddp_timeout"] = 1800
    assert vars(parse()) == {"platform": "k8s", **expected}


@pytest.mark.parametrize("flag", ["--local_rank", "--local-rank"])
def test_both_spellings_of_the_local_rank(flag):
    assert parse(flag, 3).local_rank == parse(f"{flag}=3").local_rank == 3


def test_an_unknown_platform_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse("--platform", "slurm")
    assert "invalid choice: 'slurm'" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["k8s", "local", "philly"])
def test_plain_python_is_one_process(platform, joined):
    run = start(parse("--platform", platform))
    assert run == DistEnv(0, 1, 0, torch.device("cpu"))
    assert run.is_main
    assert joined == []
    assert {name: os.environ[name] for name in NAMES[:3]} == torchrun(0, 1, 0)
    assert start(parse("--platform", platform)) == run


@pytest.mark.parametrize("platform", ["k8s", "local", "philly"])
def test_torchrun(platform, environment, joined):
    environment({**torchrun(5, 6, 1), **MASTER})
    run = start(parse("--platform", platform))
    assert run == DistEnv(5, 6, 1, torch.device("cpu"))
    assert not run.is_main
    assert joined == [("gloo", {"rank": 5, "world_size": 6})]


def test_openmpi(environment, joined):
    # PyTorch's variables may be left over from what started mpirun. On k8s, OpenMPI's come first.
    environment({**openmpi(2, 4, 1), **torchrun(0, 1, 0), **MASTER})
    assert start(parse()) == DistEnv(2, 4, 1, torch.device("cpu"))
    assert joined == [("gloo", {"rank": 2, "world_size": 4})]
    assert {name: os.environ[name] for name in NAMES[:3]} == torchrun(2, 4, 1)


def test_openmpi_counts_only_on_k8s(environment, joined):
    environment(openmpi(2, 4, 1))
    assert start(parse("--platform", "local")).world_size == 1


def test_the_flag_gives_the_local_rank_where_the_environment_does_not(environment, joined):
    environment({**torchrun(3, 4, 0), **MASTER})
    assert start(parse("--local-rank", 1)).local_rank == 0
    os.environ.pop("LOCAL_RANK")
    assert start(parse("--local-rank", 1)).local_rank == 1


def test_a_launcher_of_one_process_needs_no_group(environment, joined):
    environment({**openmpi(0, 1, 0)})
    assert start(parse()).world_size == 1
    assert joined == []


@pytest.mark.parametrize(
    ("values", "flags", "message"),
    [
        ({**openmpi(0, 2, 0), "MASTER_PORT": "1"}, [], "MASTER_ADDR is not set in the environment"),
        (
            {**openmpi(0, 2, 0), "MASTER_ADDR": "here"},
            [],
            "MASTER_PORT is not set in the environment",
        ),
        (torchrun(0, 2, 0), ["--platform", "local"], "MASTER_ADDR is not set"),
        ({"RANK": "1"}, [], "WORLD_SIZE is not set in the environment"),
        ({"WORLD_SIZE": "2"}, [], "^RANK is not set in the environment"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, [], "OMPI_COMM_WORLD_RANK is not set"),
        ({**torchrun(0, 2, 0), "RANK": "first"}, [], "^RANK is 'first' in the environment"),
        (
            {**torchrun(2, 2, 0), **MASTER},
            [],
            "^RANK is 2 in the environment, but has to be a number from 0 to 1",
        ),
        ({"LOCAL_RANK": "1"}, ["--platform", "local"], "WORLD_SIZE is not set in the environment"),
        ({**torchrun(0, 2, 0), **MASTER}, ["--world_size", 4], "--world_size is 4.*started 2"),
        ({}, ["--world_size", 2], "--world_size is 2, but the launcher started 1"),
        ({**torchrun(1, 2, 1), **MASTER}, ["--rank", 2], "--rank is 2, but this is process 1 of 2"),
        ({}, ["--rank", 8], "--rank is 8, .* leave the flag out; LoRA's rank is --lora_dim"),
    ],
)
def test_an_environment_that_does_not_fit(environment, joined, values, flags, message):
    environment(values)
    with pytest.raises(ValueError, match=message):
        start(parse(*flags))
    assert joined == []


@pytest.mark.parametrize(
    "variables", [{"RANK": "0"}, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "-1"}]
)
def test_a_leftover_variable_does_no_harm_to_a_single_process(environment, joined, variables):
    environment(variables)
    assert start(parse()) == DistEnv(0, 1, 0, torch.device("cpu"))
    assert joined == []


def test_only_machines_with_several_gpus_need_a_local_rank(environment, joined, monkeypatch):
    """A machine or container with one GPU or none runs a single process, whose local rank is 0."""
    environment({"RANK": "1", "WORLD_SIZE": "2", **MASTER})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^LOCAL_RANK is not set in the environment: start"):
        start(parse())
    assert joined == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert start(parse()).local_rank == 0


def test_each_process_has_a_gpu(environment, joined, two_gpus):
    environment({**torchrun(3, 4, 1), **MASTER})
    device = torch.device("cuda", 1)
    assert start(parse("--world_size", 4)) == DistEnv(3, 4, 1, device)
    assert two_gpus == [device]
    assert joined == [("nccl", {"rank": 3, "world_size": 4, "device_id": device})]


def test_local_rank_chooses_the_gpu_of_a_single_process(joined, two_gpus):
    assert start(parse("--local_rank", 1)).device == torch.device("cuda", 1)


@pytest.mark.parametrize("local_rank", [2, -1])
def test_a_process_without_a_gpu(joined, two_gpus, local_rank):
    with pytest.raises(ValueError, match=f"process {local_rank} of this.* has no GPU, there are 2"):
        start(parse("--local_rank", local_rank))
    assert two_gpus == []


def test_processes_compare_their_flags_and_code(monkeypatch):
    compared, of_code = [], []
    monkeypatch.setattr(gpu, "check_alike", lambda flags, world_size: compared.append(flags))
    args = parse("--local_rank", 1)
    args.random_seed, args.eval_interval = 3, 5
    args.work_dir, args.resume = "here", True
    monkeypatch.setattr(gpu, "check_same_code", lambda *given: of_code.append(given))
    check_same_flags(args, DistEnv(0, 2, 0, torch.device("cpu")), but=["resume"])
    check_same_flags(args, DistEnv(0, 2, 0, torch.device("cpu")))
    alike = {"--random_seed": 3, "--eval_interval": 5}
    assert compared == [alike, {**alike, "--resume": True}]
    assert of_code == [(0, 2)] * 2


def install_horovod(monkeypatch, rank: int, received: tuple[str, str] | None) -> list:
    """Installs a stand-in for horovod with four processes; returns a list of what is broadcast."""
    sent = []
    hvd = types.ModuleType("horovod.torch")
    hvd.init = lambda: sent.append("init")
    hvd.rank, hvd.size, hvd.local_rank = lambda: rank, lambda: 4, lambda: rank % 2

    def broadcast_object(value, root_rank):
        assert root_rank == 0
        sent.append(value)
        return received or value

    hvd.broadcast_object = broadcast_object
    horovod = types.ModuleType("horovod")
    horovod.torch = hvd
    monkeypatch.setitem(sys.modules, "horovod", horovod)
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    return sent


def test_the_first_process_of_horovod_sends_its_address(monkeypatch, joined):
    sent = install_horovod(monkeypatch, 0, None)
    assert start(parse("--platform", "azure")) == DistEnv(0, 4, 0, torch.device("cpu"))
    (host, port) = sent[1]
    assert host == os.environ["MASTER_ADDR"] == socket.gethostname()
    assert port == os.environ["MASTER_PORT"]
    assert 0 < int(port) < 2**16
    assert joined == [("gloo", {"rank": 0, "world_size": 4})]


def test_the_other_processes_of_horovod_receive_the_address(monkeypatch, joined):
    sent = install_horovod(monkeypatch, 3, ("far.example", "77"))
    assert start(parse("--platform", "azure")) == DistEnv(3, 4, 1, torch.device("cpu"))
    assert sent == ["init", None]
    assert [os.environ[name] for name in NAMES] == ["3", "4", "1", "far.example", "77"]


def test_azure_without_horovod_is_an_error(monkeypatch, joined):
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ValueError, match=r"--platform azure needs horovod.*--platform local"):
        start(parse("--platform", "azure"))


def test_communication_of_a_single_process():
    barrier(1)
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    total = sum_over_processes(value, 1)
    assert not total.requires_grad
    total.zero_()
    assert value.tolist() == [1.0, 2.0]
    assert gather_objects({"a": 1}, 1) == [{"a": 1}]


WORKER = """
import argparse, json, sys
import torch
sys.path.insert(0, {source!r})
from gpu import add_gpu_params, start
from script import run
from loralib.training.distributed import (
    barrier, gather_objects, gather_on_first, share_tensors, sum_over_processes
)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    add_gpu_params(parser)
    args = parser.parse_args()
    env = start(args)
    value = torch.tensor([1.0, 10.0]) * (env.rank + 1)
    total = sum_over_processes(value, env.world_size).tolist()
    found = gather_objects([env.rank, env.local_rank, str(env.device), total], env.world_size)
    barrier(env.world_size)
    first = gather_on_first(env.rank, env.rank, env.world_size)
    shared = torch.arange(6.0).reshape(2, 3).t() * (1 - env.rank)  # its values do not lie in order
    share_tensors([shared], env.world_size)
    with open(f"{{args.out}}/{{env.rank}}.json", "w") as file:
        json.dump([found, value.tolist(), first, shared.tolist()], file)

run(main)
"""


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["launch", "run"])
def test_two_processes(launch, launcher, tmp_path):
    """They are started by the launcher in the release's README, and by its successor."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(source=str(Path(gpu.__file__).parent)))
    flags = ["--out", tmp_path, "--world_size", 2]
    result = launch(f"torch.distributed.{launcher}", worker, *flags, forks=True)
    assert result.returncode == 0, result.stderr
    everyone = [[rank, rank, "cpu", [3.0, 30.0]] for rank in (0, 1)]
    for rank in (0, 1):
        found, value, first, shared = json.loads((tmp_path / f"{rank}.json").read_text())
        assert first == ([] if rank else [0, 1])
        assert shared == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert found == everyone
        assert value == [rank + 1.0, 10.0 * (rank + 1)]
