"""The memory of a training step, measured at PyTorch's allocator."""

import gc
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from loralib.training.step_cost import Training


def measured_peak(training: Training, batch: Any, folder: Path) -> int:
    """The most bytes that a step holds on the CPU, weights and optimizer's state with it.

    Args:
        training: with weights in memory, not on the meta device.
        batch: a batch with values.
        folder: for the profiler's trace.
    """
    training.add_gradients(batch)  # the first update makes the optimizer's state
    training.update()
    gc.collect()  # garbage that is freed during the step would lower its peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        training.add_gradients(batch)
        training.update()
    measured.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if _is_memory(event)]
    held = peak = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        held += change
        peak = max(peak, held)
    state = tree_leaves(list(training.optimizer.state.values()))
    return peak + _bytes(training.model.parameters()) + _bytes(state)


def _is_memory(event: dict) -> bool:
    return event.get("name") == "[memory]"


def _bytes(values: Iterable) -> int:
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))
