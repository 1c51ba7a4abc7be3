"""What many LoRA adapters on one base cost in prediction: this project's bank, PEFT.

    python benchmarks/mixed_adapters.py --peers_python .venv-peers/bin/python

RoBERTa-base's shape with random weights, batches of 32 rows as long as RTE's, adapters of rank 8 on
query and value, each with a head of its own. A batch has no adapter, or the rows have 1, 4 or 16 of
them in turn; or nothing is computed, and it is switched from adapter to adapter. `contestants`
lists who takes part, workers/ has what they do. Prints Markdown; README.md says how to read it.
"""

import argparse
import sys
from dataclasses import dataclass

import contest
import roberta_step
import steps
from rte_lengths import QUANTILES, count_tokens, draw_batches

BATCH = 32
# What is measured of both, and the contestants' fields that bring it about.
MEASURED = {
    "plain batch": {},
    "1 adapter": {"adapters": 1},
    "4 adapters": {"adapters": 4},
    "16 adapters": {"adapters": 16},
    "a switch": {"adapters": 16, "way": "switch"},
}
HALF = "bfloat16"  # prediction has no other, on a GPU either


@dataclass(frozen=True)
class Contestant(contest.Contestant):
    """One row of the table.

    Args:
        adapters: how many the rows of a batch have in turn, or are switched among; 0 for none.
        way: "batch", or "switch": from adapter to adapter, without computing.
    """

    adapters: int = 0
    way: str = "batch"


def ours(measured: str) -> list[Contestant]:
    """This project in all its precisions."""
    in_each = ({}, {"weights": HALF, "autocast": HALF})
    name, fields = f"this project, {measured}", MEASURED[measured]
    return [Contestant(name, "ours", **fields, **precision) for precision in in_each]


def peers(measured: str) -> list[Contestant]:
    """PEFT in all its precisions; without adapters upstream's model alone."""
    fields = MEASURED[measured]
    name = f"{'PEFT' if fields else 'upstream'}, {measured}"
    return [Contestant(name, "peers", **fields, weights=dtype) for dtype in ("float32", HALF)]


def in_upstream(measured: str) -> list[Contestant]:
    """This project's bank on upstream's model, in all precisions."""
    name, fields = f"loralib in upstream's model, {measured}", MEASURED[measured]
    return [Contestant(name, "loralib", **fields, weights=dtype) for dtype in ("float32", HALF)]


def baselines() -> dict[str, Contestant]:
    """This project's plain batch, by dtype, which all others are compared with."""
    return {one.dtype: one for one in ours("plain batch")}


def contestants() -> list[Contestant]:
    """All that take part."""
    adapted = [measured for measured, fields in MEASURED.items() if fields]
    return [
        *(one for side in (ours, peers) for measured in MEASURED for one in side(measured)),
        *(one for measured in adapted for one in in_upstream(measured)),
    ]


def make_entry(contestant: Contestant, lengths: list[int], switches: int) -> dict:
    """What is timed at once: a batch of rows of these lengths, or so many switches."""
    if contestant.way == "switch":
        return {"lengths": [], "repeats": switches}
    return {"lengths": lengths, "repeats": 1}


def computed(contestant: Contestant, entry: dict) -> list[int]:
    """Tokens computed for each row: the real ones here, the padded ones elsewhere."""
    lengths = entry["lengths"]
    return lengths if contestant.worker == "ours" else [max(lengths, default=0)] * len(lengths)


def gflop(contestant: Contestant, entry: dict, shape: dict) -> float:
    """Billions of multiplications and additions in a batch, by the formula of README.md."""
    if contestant.way == "switch":
        return 0.0
    tokens, is_ours = computed(contestant, entry), contestant.worker == "ours"
    return roberta_step.arithmetic(tokens, shape, 1, 1, is_ours)


def measure(args: argparse.Namespace) -> contest.Measurement:
    """Who runs what, with these flags."""
    lengths = count_tokens(args.data_dir, args.vocab) if args.data_dir else QUANTILES
    shape = roberta_step.QUICK if args.quick else roberta_step.ROBERTA_BASE

    def plan_of(contestant: Contestant, number: int) -> dict:
        batches = draw_batches(lengths, steps.WARMUP + args.steps, seed=number, rows=BATCH)
        entries = [make_entry(contestant, batch, args.switches) for batch in batches]
        settings = {"shape": shape, "rank": 8, "alpha": 16, "pad_to": None}
        return {**settings, "warmup": steps.WARMUP, "batches": entries}

    columns = contest.Columns(
        time="ms per batch or switch",
        unit=1e3,
        per=lambda entry: entry["repeats"],
        gflop=lambda contestant, entry: gflop(contestant, entry, shape),
        counts={
            "real tokens": lambda _, entry: sum(entry["lengths"]),
            "computed": lambda contestant, entry: sum(computed(contestant, entry)),
        },
    )
    return contest.Measurement(contestants(), contest.by_dtype(baselines()), plan_of, columns)


BENCHMARK = contest.Benchmark(
    name="mixed_adapters",
    description=__doc__,
    data_help="a folder of GLUE, for RTE's lengths; without: quantiles",
    rounds=3,
    flags=[
        contest.CountFlag(("--steps",), 6, "timed batches a turn"),
        contest.CountFlag(
            ("--switches",), 1000, "switches that are timed at once, instead of a batch"
        ),
    ],
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(contest.main(BENCHMARK))
