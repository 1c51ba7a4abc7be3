"""Profiles the parts of a training step of this project on a CPU.

The plan is that of timing.py, with `step`: the benchmark that the steps are from. The result has
the seconds of each timed step, those of the same steps under the profiler, and by part the sum over
the latter. A part within another, such as the product with a frozen weight in an adapted layer,
counts only as the inner one. The kernels that a part cannot do without are parts of their own.
"""

import functools
import importlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from timing import read_plan, write_result
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import loralib as lora
from loralib.nn import dropout, products

PRODUCTS, LORA, ATTENTION = "products with weights", "LoRA's own products", "attention"
DROPOUT, REST = "dropout outside of attention", "the rest"
RANDOM = "random numbers"
# The profiler's names of this project's functions, autograd's nodes, PyTorch's operators -> part.
PART_OF = {
    PRODUCTS: PRODUCTS,
    DROPOUT: DROPOUT,
    "_ApplyMaskBackward": DROPOUT,
    "_RowAttention": ATTENTION,
    "_RowAttentionBackward": ATTENTION,
    "_LowRankLinear": LORA,
    "_LowRankLinearBackward": LORA,
    "_HeadLoss": "the head's cross-entropy",
    "aten::gelu": "GELU",
    "aten::gelu_backward": "GELU",
    "aten::native_layer_norm": "norms",
    "aten::native_layer_norm_backward": "norms",
    "Optimizer.step#AdamW.step": "optimizer",
}
# For each part, the operators that do its arithmetic, and what their time counts as. The part's
# other operators, and Python, count as its rest.
_PRODUCT = r"aten::(mm|addmm_?|bmm|baddbmm_?)|mkldnn::_linear_pointwise"
KERNELS_OF = {
    PRODUCTS: {_PRODUCT: PRODUCTS},
    LORA: {_PRODUCT: LORA},
    ATTENTION: {
        _PRODUCT: "attention's products",
        "aten::_softmax(_backward_data)?": "attention's softmax",
        "aten::random_": RANDOM,
    },
    DROPOUT: {"aten::random_": RANDOM},
    REST: {_PRODUCT: PRODUCTS},  # products with weights that are trained directly
}
REST_OF = {
    PRODUCTS: REST,
    LORA: REST,
    ATTENTION: "attention, the rest",
    DROPOUT: "dropout outside of it, the rest",
}


def mark(module: Any, name: str, part: str) -> None:
    """Makes the profiler record a module's function; call it before others import the function."""
    function = getattr(module, name)

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(part):
            return function(*args, **kwargs)

    setattr(module, name, marked)


def seconds_by_part(events: Iterable[FunctionEvent]) -> Counter[str]:
    """Sums up the time of operations by the innermost part that each belongs to.

    Args:
        events: the events of one thread, including those within others.
    """
    found: Counter[str] = Counter()

    def count(event: FunctionEvent, outer: str) -> None:
        part = PART_OF.get(event.name, outer)
        # The marks' own time is between operations.
        if event.name not in (PRODUCTS, DROPOUT):
            found[counted_as(event.name, part)] += event.self_cpu_time_total / 1e6
        for child in event.cpu_children:
            count(child, part)

    for event in events:
        if event.cpu_parent is None:
            count(event, REST)
    return found


def counted_as(operator: str, part: str) -> str:
    """Returns what an operator's time counts as within a part: a kernel, or the part's rest."""
    for pattern, kernel in KERNELS_OF.get(part, {}).items():
        if re.fullmatch(pattern, operator):
            return kernel
    return REST_OF.get(part, part)


def measure(plan: dict, step: Callable, make_batch: Callable) -> dict:
    """Computes each of the plan's batches, and those after the warm-up again under the profiler."""
    seconds, profiled, parts = [], [], Counter()
    for index, entry in enumerate(plan["batches"]):
        batch = make_batch(plan, index, entry)
        taken, outcome = _timed(step, batch)
        seconds.append(taken)
        _check(outcome)
        if index >= plan["warmup"]:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                taken, outcome = _timed(step, batch)
            profiled.append(taken)
            _check(outcome)
            parts += seconds_by_part(profiler.events())
    return {"seconds": seconds[plan["warmup"] :], "profiled": profiled, "parts": dict(parts)}


def _timed(step: Callable, batch: Any) -> tuple[float, torch.Tensor]:
    """Runs a step; returns its seconds and its loss."""
    start = time.perf_counter()
    outcome = step(batch)
    return time.perf_counter() - start, outcome


def _check(outcome: torch.Tensor) -> None:
    """Raises ValueError if a loss is not finite, because the times are then not of real work."""
    if not torch.isfinite(outcome).all():
        raise ValueError(f"a step gave {outcome.tolist()}")


def main() -> None:
    """Reads the plan, writes the result."""
    plan = read_plan()
    mark(products, "product", PRODUCTS)
    mark(dropout, "dropout", DROPOUT)
    worker = importlib.import_module(f"{plan['step']}_ours")
    result = measure(plan, worker.make_step(plan), worker.make_batch)
    result |= {"threads": torch.get_num_threads(), "gpu": None}
    result |= {"versions": {"torch": torch.__version__, "this project": lora.__version__}}
    write_result(result)


if __name__ == "__main__":
    main()
