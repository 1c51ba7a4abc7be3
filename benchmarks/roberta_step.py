"""Measures a LoRA step of RoBERTa per real token: this project, PEFT, and the release's setting.

    python benchmarks/roberta_step.py --peers_python .venv-peers/bin/python

The model has RoBERTa-base's shape, random weights and dropout, with LoRA of rank 8 on query and
value and a trained head. Batches have 16 rows as long as RTE's. A step is forward, backward,
clipping, AdamW. Each contestant runs in a fresh process. They take turns on the same batches, in an
order that rotates from round to round, so that a busy machine slows all of them. steps.py lists
them, and workers/ has their steps. Prints Markdown; README.md says how to read it.
"""

import argparse
import sys
from collections.abc import Callable

import contest
from rte_lengths import QUANTILES, count_tokens, draw_batches
from steps import (
    WARMUP_IN_HALF,
    Contestant,
    baselines,
    columns,
    contestants,
    layer_products,
    take_batches,
)

ROBERTA_BASE = {
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
QUICK = {**ROBERTA_BASE, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 384}


def computed(contestant: Contestant, batch: list[int]) -> list[int]:
    """Returns the tokens computed for each row: only real ones here, padded ones elsewhere."""
    return batch if contestant.worker == "ours" else contestant.padded(batch)


def gflop(contestant: Contestant, batch: list[int], shape: dict) -> float:
    """Returns billions of multiplications and additions per step, by the formula of README.md."""
    tokens, is_ours = computed(contestant, batch), contestant.worker == "ours"
    return arithmetic(tokens, shape, contestant.passes, 3, is_ours)


def arithmetic(
    tokens: list[int],
    shape: dict,
    passes: int,
    attention_passes: int,
    first_only: bool,
    distances: int = 0,
) -> float:
    """Computes the formula of README.md, in billions of multiplications and additions.

    Args:
        tokens: the number of tokens computed for each row.
        shape: the model's settings.
        passes: how often a step multiplies with the weights.
        attention_passes: how often it computes as much as attention's forward pass.
        first_only: whether the last layer computes only keys and values for all tokens, and the
            rest for each row's first token.
        distances: pairs of a token and a relative position that a pass through attention
            multiplies.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    weights = 4 * hidden**2 + 2 * hidden * shape["intermediate_size"]
    linear = 2 * weights * passes * sum(tokens)
    attention = attention_passes * hidden * (4 * sum(n**2 for n in tokens) + 2 * distances)
    if first_only:
        # In the last layer, only keys and values are computed for every token.
        layers -= 1 - 2 * hidden**2 / weights
    return layers * (linear + attention) / 1e9


def measure(args: argparse.Namespace) -> contest.Measurement:
    """Returns the measurement that the flags ask for."""
    shape = QUICK if args.quick else ROBERTA_BASE
    return measure_shape(args, shape, contestants(args.device), gflop)


def measure_shape(
    args: argparse.Namespace,
    shape: dict,
    taking_part: list[Contestant],
    gflop: Callable[[Contestant, list[int], dict], float],
) -> contest.Measurement:
    """Returns the measurement of some contestants on batches with RTE's lengths.

    Args:
        args: the flags.
        shape: the model's settings.
        taking_part: the contestants.
        gflop: contestant, batch, shape -> billions of multiplications and additions in a step.
    """
    lengths = count_tokens(args.data_dir, args.vocab) if args.data_dir else QUANTILES

    def plan_of(contestant: Contestant, number: int) -> dict:
        batches = draw_batches(lengths, WARMUP_IN_HALF + args.steps, seed=number)
        settings = {"shape": shape, "rank": 8, "alpha": 16}
        return settings | take_batches(contestant, batches, args.steps)

    table = columns(
        "ms per real token", sum, sum, computed, lambda who, batch: gflop(who, batch, shape)
    )
    tokens = sum(draw_batches(lengths, 1, seed=0)[0])
    products = layer_products(tokens, shape["hidden_size"], shape["intermediate_size"])
    return contest.Measurement(
        taking_part, contest.by_dtype(baselines(args.device)), plan_of, table, products
    )


BENCHMARK = contest.Benchmark(
    name="roberta_step",
    description=__doc__,
    data_help="a folder of GLUE, for RTE's lengths (default: quantiles)",
    rounds=3,
    flags=[contest.STEPS],
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(contest.main(BENCHMARK))
