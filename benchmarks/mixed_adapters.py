"""Measures prediction with many LoRA adapters on one base: this project's bank and PEFT.

    python benchmarks/mixed_adapters.py --peers_python .venv-peers/bin/python

The model has RoBERTa-base's shape and random weights. Adapters have rank 8, on query and value, and
a head of their own. A batch has 32 rows as long as RTE's, without an adapter, or with 1, 4 or 16
adapters that its rows have in turn. Measured is also the switch from one adapter to another,
without computing anything. `contestants` lists who takes part, and workers/ has what they run.
Prints Markdown; README.md says how to read it.
"""

import argparse
import sys
from dataclasses import dataclass

import contest
import roberta_step
import steps
from rte_lengths import QUANTILES, count_tokens, draw_batches

BATCH = 32
# What is measured for each side -> the fields of its contestants.
MEASURED = {
    "plain batch": {},
    "1 adapter": {"adapters": 1},
    "4 adapters": {"adapters": 4},
    "16 adapters": {"adapters": 16},
    "a switch": {"adapters": 16, "way": "switch"},
}
HALF = "bfloat16"  # the only half precision of prediction, also on a GPU


@dataclass(frozen=True)
class Contestant(contest.Contestant):
    """One row of the table.

    Args:
        adapters: the number of adapters that a batch's rows have in turn, or that are switched
            among; 0 for none.
        way: "batch", or "switch" from adapter to adapter, without computing anything.
    """

    adapters: int = 0
    way: str = "batch"


def ours(measured: str) -> list[Contestant]:
    """Returns this project's contestants, in all precisions."""
    in_each = ({}, {"weights": HALF, "autocast": HALF})
    name, fields = f"this project, {measured}", MEASURED[measured]
    return [Contestant(name, "ours", **fields, **precision) for precision in in_each]


def peers(measured: str) -> list[Contestant]:
    """Returns PEFT's contestants, in all precisions; without adapters, upstream's model only."""
    fields = MEASURED[measured]
    name = f"{'PEFT' if fields else 'upstream'}, {measured}"
    return [Contestant(name, "peers", **fields, weights=dtype) for dtype in ("float32", HALF)]


def in_upstream(measured: str) -> list[Contestant]:
    """Returns contestants with this project's bank on upstream's model, in all precisions."""
    name, fields = f"loralib in upstream's model, {measured}", MEASURED[measured]
    return [Contestant(name, "loralib", **fields, weights=dtype) for dtype in ("float32", HALF)]


def baselines() -> dict[str, Contestant]:
    """Returns this project's plain batch by dtype, which all others are compared with."""
    return {one.dtype: one for one in ours("plain batch")}


def contestants() -> list[Contestant]:
    """Returns all contestants."""
    adapted = [measured for measured, fields in MEASURED.items() if fields]
    return [
        *(one for side in (ours, peers) for measured in MEASURED for one in side(measured)),
        *(one for measured in adapted for one in in_upstream(measured)),
    ]


def make_entry(contestant: Contestant, lengths: list[int], switches: int) -> dict:
    """Returns what is timed as a whole: a batch with these lengths, or `switches` switches."""
    if contestant.way == "switch":
        return {"lengths": [], "repeats": switches}
    return {"lengths": lengths, "repeats": 1}


def computed(contestant: Contestant, entry: dict) -> list[int]:
    """Returns the tokens computed for each row: only real ones here, padded ones elsewhere."""
    lengths = entry["lengths"]
    return lengths if contestant.worker == "ours" else [max(lengths, default=0)] * len(lengths)


def gflop(contestant: Contestant, entry: dict, shape: dict) -> float:
    """Returns billions of multiplications and additions per batch, by the formula of README.md."""
    if contestant.way == "switch":
        return 0.0
    tokens, is_ours = computed(contestant, entry), contestant.worker == "ours"
    return roberta_step.arithmetic(tokens, shape, 1, 1, is_ours)


def measure(args: argparse.Namespace) -> contest.Measurement:
    """Returns the measurement that the flags ask for."""
    lengths = count_tokens(args.data_dir, args.vocab) if args.data_dir else QUANTILES
    shape = roberta_step.QUICK if args.quick else roberta_step.ROBERTA_BASE

    def plan_of(contestant: Contestant, number: int) -> dict:
        batches = draw_batches(lengths, steps.WARMUP + args.steps, seed=number, rows=BATCH)
        entries = [make_entry(contestant, batch, args.switches) for batch in batches]
        settings = {"shape": shape, "rank": 8, "alpha": 16, "pad_to": None}
        return {**settings, "warmup": steps.WARMUP, "batches": entries}

    columns = steps.columns(
        "ms per batch or switch",
        lambda entry: entry["repeats"],
        lambda entry: sum(entry["lengths"]),
        computed,
        lambda contestant, entry: gflop(contestant, entry, shape),
    )
    return contest.Measurement(contestants(), contest.by_dtype(baselines()), plan_of, columns)


BENCHMARK = contest.Benchmark(
    name="mixed_adapters",
    description=__doc__,
    data_help="a folder of GLUE, for RTE's lengths (default: quantiles)",
    rounds=3,
    flags=[
        contest.CountFlag(("--steps",), 6, "timed batches per turn"),
        contest.CountFlag(
            ("--switches",), 1000, "switches that are timed at once, instead of a batch"
        ),
    ],
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(contest.main(BENCHMARK))
