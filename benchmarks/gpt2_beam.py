"""Measures beam search per line of E2E's test file: this project, upstream, and line by line.

    python benchmarks/gpt2_beam.py --peers_python .venv-peers/bin/python

The model has GPT-2 small's shape and random weights. The settings are the release's for E2E: beam
10, 64 tokens, length penalty 0.8, no repeated 4-grams. End tokens are suppressed, so that every
search makes all steps. `contestants` lists who takes part, and workers/ has their searches. Prints
Markdown; README.md says how to read it.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import NamedTuple

import contest
from gpt2_e2e import GPT2_SMALL, QUICK, Group, draw_run, make_groups, read_groups

SEARCH = {"beam": 10, "length_penalty": 0.8, "no_repeat_ngram_size": 4, "eos": 628}
EVAL_LEN, QUICK_EVAL_LEN = 64, 8


@dataclass(frozen=True)
class Contestant(contest.Contestant):
    """One row of the table.

    Args:
        way: "tree", this project's search, or upstream's "generate", or "line by line".
        lines: the lines of the sample that it gets: "all", if it searches repeated prompts only
            once by itself; "distinct", one line per prompt, which stands for all of the prompt's
            lines; "some", spread over the sample.
        cache: whether the keys and values of previous tokens are kept.
    """

    way: str = "tree"
    lines: str = "all"
    cache: bool = True


class Work(NamedTuple):
    """The amount of work in a search.

    Attributes:
        tokens: number of tokens that go through the layers.
        pairs: number of pairs of a token and one that it attends to.
        logits: number of rows of logits.
    """

    tokens: int
    pairs: int
    logits: int


def baselines(device: str) -> dict[str, Contestant]:
    """Returns this project's contestants by dtype, which all others are compared with."""
    dtypes = ["float32", *contest.half_dtypes(device)]
    return {dtype: Contestant("this project", "ours", weights=dtype) for dtype in dtypes}


def contestants(device: str) -> list[Contestant]:
    """Returns the contestants that run on `device`."""
    ours = baselines(device)
    upstream = {
        "generate, every line": {"way": "generate", "lines": "some"},
        "generate, distinct prompts": {"way": "generate", "lines": "distinct"},
    }
    one = {"way": "line by line", "lines": "some"}
    return [
        *ours.values(),
        *(
            Contestant(name, "peers", weights=dtype, **fields)
            for name, fields in upstream.items()
            for dtype in ours
        ),
        Contestant("line by line, full length", "peers", **one),
        Contestant("line by line, full length, no cache", "peers", **one, cache=False),
    ]


def make_entry(contestant: Contestant, groups: list[Group], eval_len: int, one: int) -> dict:
    """Returns a contestant's prompts, and the number of the file's lines that they stand for.

    Args:
        contestant: the contestant.
        groups: the sample's prompts, each with its number of lines.
        eval_len: the number of tokens to generate.
        one: the number of lines that are searched line by line.
    """
    lines = [prompt for prompt, count in groups for _ in range(count)]
    if contestant.lines == "some":
        count = len(groups) if contestant.way == "generate" else one
        prompts = [lines[(2 * i + 1) * len(lines) // (2 * count)] for i in range(count)]
        return {"prompts": prompts, "lines": count, "eval_len": eval_len}
    prompts = lines if contestant.lines == "all" else [prompt for prompt, _ in groups]
    return {"prompts": prompts, "lines": len(lines), "eval_len": eval_len}


def work(contestant: Contestant, entry: dict) -> Work:
    """Returns the amount of work in a contestant's search, from the prompts' lengths."""
    prompts = entry["prompts"]
    if contestant.way == "tree":
        prompts = {tuple(prompt) for prompt in prompts}
    lengths = [len(prompt) for prompt in prompts]
    copies = 1
    if contestant.way == "generate":  # computes the padded prompt once per beam
        lengths, copies = [max(lengths)] * len(lengths), SEARCH["beam"]
    tokens, pairs = sum(lengths) * copies, sum(n**2 for n in lengths) * copies
    logits = len(lengths) * copies
    for length in lengths:
        for step in range(1, entry["eval_len"]):
            seen = length + step
            new = 1 if contestant.cache else seen
            tokens += SEARCH["beam"] * new
            pairs += SEARCH["beam"] * new * seen
            logits += SEARCH["beam"]
    return Work(tokens, pairs, logits)


def gflop(contestant: Contestant, entry: dict, shape: dict) -> float:
    """Returns billions of multiplications and additions per search, by README.md's formula."""
    width, done = shape["n_embd"], work(contestant, entry)
    layers = shape["n_layer"] * (24 * width**2 * done.tokens + 4 * width * done.pairs)
    return (layers + 2 * width * shape["vocab_size"] * done.logits) / 1e9


def measure(args: argparse.Namespace) -> contest.Measurement:
    """Returns the measurement that the flags ask for."""
    groups = read_groups(args.data_dir, args.vocab) if args.data_dir else make_groups(seed=0)
    shape = QUICK if args.quick else GPT2_SMALL
    eval_len = QUICK_EVAL_LEN if args.quick else EVAL_LEN

    def plan_of(contestant: Contestant, number: int) -> dict:
        sample = draw_run(groups, args.prompts, seed=number)
        warmup = {"prompts": [sample[0][0]], "lines": 1, "eval_len": 2}
        timed = make_entry(contestant, sample, eval_len, args.one_by_one)
        return {"shape": shape, "search": SEARCH, "warmup": 1, "batches": [warmup, timed]}

    columns = contest.Columns(
        time="s per line",
        unit=1,
        per=lambda entry: entry["lines"],
        gflop=lambda contestant, entry: gflop(contestant, entry, shape),
        counts={
            "lines": lambda _, entry: entry["lines"],
            "searches": lambda _, entry: len({tuple(prompt) for prompt in entry["prompts"]}),
            "computed tokens": lambda contestant, entry: work(contestant, entry).tokens,
        },
    )
    return contest.Measurement(
        contestants(args.device), contest.by_dtype(baselines(args.device)), plan_of, columns
    )


BENCHMARK = contest.Benchmark(
    name="gpt2_beam",
    description=__doc__,
    data_help="a folder with E2E's test.txt (default: random prompts of such lengths)",
    rounds=2,
    flags=[
        contest.CountFlag(
            ("--prompts", "-p"),
            10,
            "distinct prompts per turn, with all their lines; searched in one batch",
        ),
        contest.CountFlag(("--one_by_one",), 1, "lines per turn that are searched line by line"),
    ],
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(contest.main(BENCHMARK))
