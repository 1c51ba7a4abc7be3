"""Tests of what all workers share: which memory counts, and how a model is moved to a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
from simulated_gpu import SimulatedGpu
from torch import nn


def test_the_peak_of_a_gpu_is_that_of_the_timed_steps(load_worker, monkeypatch, tmp_path):
    """A made-up GPU: making the model takes the most, and warming up more than a timed step."""
    held = {"now": 0, "most": 0}

    def take(size):
        held["most"] = max(held["most"], held["now"] + size)

    def make_step(plan):
        take(1000)
        held["now"] = 10  # what stays is part of every peak
        return lambda batch: take(batch["size"]) or torch.zeros(())

    for name, value in {
        "synchronize": lambda: None,
        "get_device_name": lambda: "made up",
        "max_memory_allocated": lambda: held["most"],
        "reset_peak_memory_stats": lambda: held.update(most=held["now"]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    plan = {"device": "cuda", "threads": None, "seed": 0, "warmup": 2}
    plan["batches"] = [500, 400, 30, 20]
    (tmp_path / "plan").write_text(json.dumps(plan))
    files = [str(tmp_path / name) for name in ("plan", "result")]
    monkeypatch.setattr(sys, "argv", ["worker", *files])
    load_worker("timing").run(make_step, lambda plan, index, size: {"size": size}, {})
    result = json.loads((tmp_path / "result").read_text())
    assert len(result["seconds"]) == 2
    assert result["peak_bytes"] == 10 + 30


# A worker that also writes how much memory the process held before and after.
TAKES_LESS_AND_LESS = """
import json, resource, sys
from pathlib import Path

import timing
import torch


def take(mebibytes):
    torch.ones(mebibytes << 18)


def make_step(plan):
    take(400)
    return lambda batch: take(batch["size"]) or torch.zeros(())


def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


before = held()
timing.run(make_step, lambda plan, index, size: {"size": size}, {})
result = json.loads(Path(sys.argv[2]).read_text()) | {"before": before, "after": held()}
Path(sys.argv[2]).write_text(json.dumps(result))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="this system cannot forget a process's peak",
)
def test_the_peak_of_a_process_is_that_of_the_timed_steps(contest, tmp_path):
    """Making the model takes 400 MiB, warming up 300, and a timed step 100.

    It runs in a process of its own: one that has run other tests may have 100 MiB left over from
    them, which a step would use without holding more than before. The process that starts it holds
    more memory first, which must not count.
    """
    torch.ones(1000 << 18)
    plan = {"device": "cpu", "threads": None, "seed": 0, "warmup": 1, "batches": [300, 100]}
    files = [tmp_path / name for name in ("plan", "result")]
    files[0].write_text(json.dumps(plan))
    subprocess.run(
        [sys.executable, "-c", TAKES_LESS_AND_LESS, *map(str, files)],
        env=os.environ | {"PYTHONPATH": str(contest.ROOT / "workers")},
        check=True,
    )
    result = json.loads(files[1].read_text())
    # Parts of the libraries that are loaded meanwhile count as well, more or fewer of them.
    assert result["peak_bytes"] - result["before"] > 90 * 2**20
    assert result["peak_bytes"] - result["after"] < 200 * 2**20


def test_frozen_weights_are_moved_to_a_gpu_in_half_precision(load_worker):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    plan = {"device": "cuda", "weights": "bfloat16", "autocast": "bfloat16", "graphs": False}
    make_optimizer, worker = torch.optim.SGD, load_worker("our_training")
    with SimulatedGpu() as gpu:
        worker.training_step(plan, model, make_optimizer, lambda batch: None, 0)
        assert {parameter.is_cuda for parameter in model.parameters()} == {True}
        assert gpu.launches.total() == 0
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
