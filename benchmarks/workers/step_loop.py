"""What every contestant of roberta_step.py runs: the same batches, timed in the same way.

A worker is ``python WORKER.py PLAN RESULT``, two JSON files. The plan:

    shape      RoBERTa's settings             rank, alpha   LoRA's
    batches    lengths of the rows of each    warmup        how many of them are not timed
    pad_to     tokens a row, null for the     seed          of weights and token ids
               longest of its batch           threads       CPU threads, null for torch's choice
    device     "cpu" or "cuda"                weights       dtype that frozen weights are held in
    full       train every weight, no LoRA    autocast      dtype of the products, null for none

Knows torch only: it runs in this project's environment and in the peers'.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0
PADDING_ID = 1

Step = Callable[[dict[str, Tensor]], Tensor]


def run(make_step: Callable[[dict], Step], versions: dict[str, str]) -> None:
    """Measures a step and writes the result: seconds a batch, peak memory, versions, the GPU.

    Args:
        make_step: plan -> a function that makes one training step on a batch, returning its loss.
        versions: of the packages measured, by name; torch's is added.

    Raises:
        ValueError: a loss is not finite, so that what was timed is no training.
    """
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    device = torch.device(plan["device"])
    if plan["threads"]:
        torch.set_num_threads(plan["threads"])
    torch.manual_seed(plan["seed"])
    step = make_step(plan)
    seconds = []
    for index, lengths in enumerate(plan["batches"]):
        batch = {name: part.to(device) for name, part in _batch(plan, index, lengths).items()}
        _wait_for(device)
        start = time.perf_counter()
        loss = step(batch)
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(loss.item()):
            raise ValueError(f"the loss is {loss.item()} at step {index}")
    result = {
        "seconds": seconds[plan["warmup"] :],
        "peak_bytes": _peak_bytes(device),
        "versions": {"torch": torch.__version__, **versions},
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def _batch(plan: dict, index: int, lengths: list[int]) -> dict[str, Tensor]:
    """A batch of random tokens, padded on the right: (rows, width) ids and mask, (rows,) labels."""
    generator = torch.Generator().manual_seed(plan["seed"] + index)
    width = plan["pad_to"] or max(lengths)
    shape = (len(lengths), width)
    ids = torch.randint(5, plan["shape"]["vocab_size"], shape, generator=generator)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, PADDING_ID),
        "attention_mask": mask.long(),
        "labels": torch.randint(0, 2, (len(lengths),), generator=generator),
    }


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak_bytes(device: torch.device) -> int:
    """The most memory held so far: the GPU's tensors or, on a CPU, the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
