"""Measures evaluation and prediction per text: this project, and PEFT on upstream's Transformers.

    python benchmarks/evaluation.py --peers_python .venv-peers/bin/python

The model has RoBERTa-base's shape and random weights, with LoRA of rank 8 on query and value. Sets
have pairs of texts as long as RTE's. Measured are the Trainer's evaluation of a tokenized set, and
all that predict.py does from texts to answers, with four adapters. The peers compute rows from the
longest to the shortest, as this project does by itself. `contestants` lists who takes part, and
workers/ has what they run. Prints Markdown; README.md says how to read it.
"""

import argparse
import random
import string
import sys
from dataclasses import dataclass

import contest
import roberta_step
import steps
from rte_lengths import QUANTILES, count_tokens, read_pairs
from vocab import vocab_files

ROWS, ADAPTERS = 32, 4
WARMUP = 1
HALF = "bfloat16"  # the only half precision of prediction, also on a GPU
WORKS = ("evaluation", "predict.py")

# A pair of texts, and the number of tokens in its row.
Row = tuple[list[str], int]


@dataclass(frozen=True)
class Contestant(contest.Contestant):
    """One row of the table.

    Args:
        work: one of `WORKS`.
        order: the order of a peer's rows, "by length" or "as it comes".
    """

    work: str = WORKS[0]
    order: str = "by length"


def ours(work: str) -> list[Contestant]:
    """Returns this project's contestants, in all precisions."""
    in_each = ({}, {"weights": HALF, "autocast": HALF})
    return [
        Contestant(f"this project, {work}", "ours", **precision, work=work) for precision in in_each
    ]


def peers(work: str, order: str = "by length") -> list[Contestant]:
    """Returns PEFT's contestants, in each precision that it is usually run in."""
    in_each = ({}, {"weights": HALF}, {"weights": HALF, "autocast": HALF}, {"autocast": HALF})
    name = f"PEFT, {work}, {order}"
    return [Contestant(name, "peers", **precision, work=work, order=order) for precision in in_each]


def contestants() -> list[Contestant]:
    """Returns all contestants; PEFT without sorted rows only in its fastest precisions."""
    sorted_ones = [one for work in WORKS for side in (ours, peers) for one in side(work)]
    return sorted_ones + peers(WORKS[0], "as it comes")[:2]


def baseline_of(contestant: Contestant) -> Contestant:
    """Returns this project's contestant with the same work and dtype."""
    return next(one for one in ours(contestant.work) if one.dtype == contestant.dtype)


# ------------------------------------------------------------------------------------------------
# Sets
# ------------------------------------------------------------------------------------------------


def read_rows(args: argparse.Namespace) -> list[Row]:
    """Reads RTE's pairs; without its file, makes up texts with RTE's numbers of tokens."""
    if args.data_dir:
        pairs = read_pairs(args.data_dir)
        return list(zip(pairs, count_tokens(args.data_dir, args.vocab), strict=True))
    return [(made_up(length), length) for length in QUANTILES]


def made_up(length: int) -> list[str]:
    """Makes up two texts of one-token letters, for a row of `length` with 4 special tokens."""
    rng = random.Random(length)
    letters = "".join(rng.choices(string.ascii_letters, k=length - 4))
    middle = max(1, len(letters) * 3 // 4)
    return [letters[:middle], letters[middle:]]


def make_entry(rows: list[Row]) -> dict:
    """Returns a set, which is timed as a whole; its texts have the adapters in turn."""
    pairs, lengths = zip(*rows, strict=True)
    adapters = [f"task{number % ADAPTERS}" for number in range(len(rows))]
    return {"pairs": list(pairs), "lengths": list(lengths), "adapters": adapters}


def computed(contestant: Contestant, entry: dict) -> list[int]:
    """Returns the tokens computed for each row: only real ones here, padded ones elsewhere."""
    lengths = entry["lengths"]
    if contestant.worker == "ours":
        return lengths
    groups = {"": lengths}
    if contestant.work == "predict.py":
        named = list(zip(entry["adapters"], lengths, strict=True))
        groups = {key: [n for name, n in named if name == key] for key, _ in named}
    padded = []
    for group in groups.values():
        order = sorted(group, reverse=True) if contestant.order == "by length" else group
        for start in range(0, len(order), ROWS):
            batch = order[start : start + ROWS]
            padded += [max(batch)] * len(batch)
    return padded


def gflop(contestant: Contestant, entry: dict, shape: dict) -> float:
    """Returns billions of multiplications and additions per set, by the formula of README.md."""
    tokens, is_ours = computed(contestant, entry), contestant.worker == "ours"
    return roberta_step.arithmetic(tokens, shape, 1, 1, is_ours)


def measure(args: argparse.Namespace) -> contest.Measurement:
    """Returns the measurement that the flags ask for."""
    rows = read_rows(args)
    shape = roberta_step.QUICK if args.quick else roberta_step.ROBERTA_BASE
    vocab = list(map(str, vocab_files(args.vocab))) if args.vocab else None

    def plan_of(contestant: Contestant, number: int) -> dict:
        rng = random.Random(number)
        sets = [make_entry(rng.choices(rows, k=args.texts)) for _ in range(WARMUP + args.steps)]
        settings = {"shape": shape, "rank": 8, "alpha": 16, "rows": ROWS, "vocab": vocab}
        return {**settings, "warmup": WARMUP, "batches": sets}

    columns = steps.columns(
        "ms per text",
        lambda entry: len(entry["pairs"]),
        lambda entry: sum(entry["lengths"]),
        computed,
        lambda contestant, entry: gflop(contestant, entry, shape),
    )
    return contest.Measurement(contestants(), baseline_of, plan_of, columns)


BENCHMARK = contest.Benchmark(
    name="evaluation",
    description=__doc__,
    data_help="a folder of GLUE, for RTE's texts (default: letters, by quantiles)",
    rounds=3,
    flags=[
        contest.CountFlag(("--steps",), 2, "timed sets per turn"),
        contest.CountFlag(("--texts",), 256, "texts in a set"),
    ],
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(contest.main(BENCHMARK))
