"""Defines the contestants and columns of the benchmarks of training steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import contest

WARMUP, WARMUP_PADDED = 2, 1
# In half precision, oneDNN compiles a kernel for each size of product that it meets, most of them
# in a run's first ten steps, where it takes up to an eighth of the time (GPT-2, with AMX).
WARMUP_IN_HALF = 10
LONGEST = 512


@dataclass(frozen=True)
class Contestant(contest.Contestant):
    """One row of the table.

    Args:
        full: whether every weight is trained, without LoRA.
        pad_to: the length that rows are padded to; by default that of the batch's longest row.
        graphs: whether the step is run as a CUDA graph.
    """

    full: bool = False
    pad_to: int | None = None
    graphs: bool = False

    @property
    def passes(self) -> int:
        """The products per weight: forward, gradients of inputs and, if full, of weights."""
        return 3 if self.full else 2

    def padded(self, lengths: list[int]) -> list[int]:
        """Returns the rows' lengths after padding."""
        return [self.pad_to or max(lengths)] * len(lengths)


def baselines(device: str) -> dict[str, Contestant]:
    """Returns this project's LoRA by dtype of its products, which all others are compared with."""
    name, halves = "this project, LoRA", contest.half_dtypes(device)
    in_half = {half: Contestant(name, "ours", weights=half, autocast=half) for half in halves}
    return {"float32": Contestant(name, "ours"), **in_half}


def contestants(device: str) -> list[Contestant]:
    """Returns the contestants that run on `device`."""
    ours = baselines(device).values()
    graphs = [replace(one, name=f"{one.name}, CUDA graphs", graphs=True) for one in ours]
    return [
        *ours,
        *(graphs if device == "cuda" else ()),
        Contestant("this project, full fine-tuning", "ours", full=True),
        Contestant("PEFT", "peers"),
        Contestant("PEFT", "peers", weights="bfloat16"),
        Contestant("PEFT", "peers", weights="bfloat16", autocast="bfloat16"),
        *(Contestant("PEFT", "peers", autocast=half) for half in contest.half_dtypes(device)),
        Contestant(f"PEFT, padded to {LONGEST}", "peers", pad_to=LONGEST),
    ]


def take_batches(contestant: Contestant, batches: list, steps: int) -> dict:
    """Returns a plan's warm-up and batches; all contestants have the same timed batches.

    Contestants with `pad_to` take ten times as long per step and more. They get only the first
    third of the timed batches, and less warm-up. CUDA graphs are recorded for the sizes of all
    batches before any is timed.

    Args:
        contestant: the contestant.
        batches: WARMUP_IN_HALF more batches than there are timed steps.
        steps: the number of timed steps.
    """
    warmup = WARMUP if contestant.dtype == "float32" else WARMUP_IN_HALF
    if contestant.pad_to:
        warmup, steps = WARMUP_PADDED, -(-steps // 3)
    batches = batches[WARMUP_IN_HALF - warmup : WARMUP_IN_HALF + steps]
    if contestant.graphs:
        batches, warmup = [*batches, *batches[warmup:]], len(batches)
    return {"warmup": warmup, "batches": batches}


def layer_products(rows: int, hidden: int, inner: int, fused: bool = False) -> contest.Products:
    """Returns the products of a transformer layer with its weights.

    Args:
        rows: the number of tokens in a batch.
        hidden, inner: the widths of the layer and of its feed-forward part.
        fused: whether query, key and value are one product.
    """
    attention = [(rows, hidden, 3 * hidden, 1), (rows, hidden, hidden, 1)]
    return [
        *(attention if fused else [(rows, hidden, hidden, 4)]),
        (rows, hidden, inner, 1),
        (rows, inner, hidden, 1),
    ]


def columns(
    time: str,
    per: Callable[[Any], float],
    real: Callable[[Any], int],
    computed: Callable[[Contestant, Any], list[int]],
    gflop: Callable[[Contestant, Any], float],
) -> contest.Columns:
    """Returns the columns of a table of times in ms, with the tokens of all timed batches.

    Args:
        time: the title of the column of times.
        per: batch -> what its time is divided by.
        real: batch -> its number of tokens without padding.
        computed: contestant, batch -> the number of tokens computed for each row.
        gflop: contestant, batch -> billions of multiplications and additions.
    """
    counts = {
        "real tokens": lambda _, batch: real(batch),
        "computed": lambda contestant, batch: sum(computed(contestant, batch)),
    }
    return contest.Columns(time, unit=1e3, per=per, gflop=gflop, counts=counts)
