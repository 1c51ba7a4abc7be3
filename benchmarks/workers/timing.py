"""Times a contestant's steps; all contestants run the same batches, timed in the same way.

A worker is ``python WORKER.py PLAN RESULT``, two JSON files. Every plan has

    batches    what to run on, one after the other    weights     dtype that frozen weights are in
    warmup     how many of them are not timed         autocast    dtype of the products, or null
    seed       of weights and token ids               shape       the model's settings
    device     "cpu" or "cuda"                        threads     CPU threads, null for torch's

and the fields that its benchmark's modules name. This module imports only torch, because it runs in
this project's environment and in the peers'.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]
Step = Callable[[Batch], Tensor]

# Writing "5" to _CLEAR_REFS makes Linux reset a process's peak memory, VmHWM in _STATUS, to what it
# holds now. The peak of `resource` cannot be reset, and begins with that of the parent process.
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def run(
    make_step: Callable[[dict], Step],
    make_batch: Callable[[dict, int, Any], Batch],
    versions: dict[str, str],
) -> None:
    """Measures a step, and writes seconds per batch, peak memory, versions, threads and the GPU.

    Args:
        make_step: plan -> a function that does the work on one batch, and returns a tensor that has
            to be finite, such as the loss.
        make_batch: plan, number of the batch, its entry in the plan -> the batch. Its tensors, and
            other values that have `to`, are moved to the device.
        versions: the versions of the measured packages, by name; torch's is added.

    Raises:
        ValueError: a result is not finite, so the times are not of real work.
    """
    plan = read_plan()
    device = torch.device(plan["device"])
    step = make_step(plan)
    seconds = []
    for index, entry in enumerate(plan["batches"]):
        # A graph's memory is taken while it is recorded, which is in the warm-up.
        if index == plan["warmup"] and not plan.get("graphs"):
            _forget_peak(device)
        batch = make_batch(plan, index, entry)
        batch = {name: _brought_to(device, part) for name, part in batch.items()}
        _wait_for(device)
        start = time.perf_counter()
        outcome = step(batch)
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
        if not torch.isfinite(outcome).all():
            raise ValueError(f"step {index} gave {outcome.tolist()}")
    result = {
        "seconds": seconds[plan["warmup"] :],
        "peak_bytes": _peak_bytes(device),
        "versions": {"torch": torch.__version__, **versions},
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
    }
    write_result(result)


def read_plan() -> dict:
    """Reads the plan, and sets the number of threads and the seed as it says."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if plan["threads"]:
        torch.set_num_threads(plan["threads"])
    torch.manual_seed(plan["seed"])
    return plan


def write_result(result: dict) -> None:
    """Writes the worker's result."""
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def _brought_to(device: torch.device, part: Any) -> Any:
    return part.to(device) if hasattr(part, "to") else part


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _forget_peak(device: torch.device) -> None:
    """Resets the peak memory, so that building the model and warm-up do not count.

    On a CPU, this is possible only under Linux.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif os.access(_CLEAR_REFS, os.W_OK):
        _CLEAR_REFS.write_text("5", encoding="ascii")


def _peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of the timed steps: of tensors or, on a CPU, of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if _STATUS.is_file():
        lines = dict(
            line.split(":", 1)
            for line in _STATUS.read_text(encoding="utf-8", errors="replace").splitlines()
        )
        return int(lines["VmHWM"].removesuffix("kB")) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
