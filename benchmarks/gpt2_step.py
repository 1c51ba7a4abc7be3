"""Measures a LoRA step of GPT-2 per example: this project, PEFT, and the release's setting.

    python benchmarks/gpt2_step.py --peers_python .venv-peers/bin/python

The model has GPT-2 small's shape and random weights, with LoRA of rank 4 and dropout 0.1 on the
attention's query and value. Batches have 8 rows as long as E2E's, and the loss has label smoothing
0.1. A step is forward, backward, AdamW. steps.py lists who takes part, and workers/ has their
steps. Prints Markdown; README.md says how to read it.
"""

import argparse
import sys

import contest
from gpt2_e2e import GPT2_SMALL, QUICK, ROWS, Row, count_rows, draw_batches
from steps import (
    WARMUP_IN_HALF,
    Contestant,
    baselines,
    columns,
    contestants,
    layer_products,
    take_batches,
)


def computed(contestant: Contestant, batch: list[Row]) -> list[int]:
    """Returns the tokens computed for each row: up to its last target here, padded elsewhere."""
    lengths = [context + completion for context, completion in batch]
    if contestant.worker == "ours":
        return [length - 1 for length in lengths]
    return contestant.padded(lengths)


def gflop(contestant: Contestant, batch: list[Row], shape: dict) -> float:
    """Returns billions of multiplications and additions per step, by the formula of README.md."""
    width, layers = shape["n_embd"], shape["n_layer"]
    lengths = computed(contestant, batch)
    tokens = targets = sum(lengths)
    if contestant.worker == "ours":
        targets = sum(completion for _, completion in batch)
    # In the last layer, only queries, keys and values are computed for tokens that are not targets.
    linear = width**2 * ((12 * layers - 9) * tokens + 9 * targets)
    head = width * shape["vocab_size"] * targets
    attention = layers * 3 * 4 * width * sum(n**2 for n in lengths)
    return (2 * contestant.passes * (linear + head) + attention) / 1e9


def measure(args: argparse.Namespace) -> contest.Measurement:
    """Returns the measurement that the flags ask for."""
    rows = count_rows(args.data_dir, args.vocab) if args.data_dir else ROWS
    shape = QUICK if args.quick else GPT2_SMALL

    def plan_of(contestant: Contestant, number: int) -> dict:
        batches = draw_batches(rows, WARMUP_IN_HALF + args.steps, seed=number)
        return {"shape": shape} | take_batches(contestant, batches, args.steps)

    table = columns(
        "ms per example",
        len,
        lambda batch: sum(map(sum, batch)),
        computed,
        lambda who, batch: gflop(who, batch, shape),
    )
    tokens = sum(map(sum, draw_batches(rows, 1, seed=0)[0]))
    products = layer_products(tokens, shape["n_embd"], 4 * shape["n_embd"], fused=True)
    return contest.Measurement(
        contestants(args.device),
        contest.by_dtype(baselines(args.device)),
        plan_of,
        table,
        products,
    )


BENCHMARK = contest.Benchmark(
    name="gpt2_step",
    description=__doc__,
    data_help="a folder with E2E's train.txt or valid.txt, for its lengths (default: quantiles)",
    rounds=3,
    flags=[contest.STEPS],
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(contest.main(BENCHMARK))
