"""Measures a LoRA step of DeBERTa-v2 per real token: this project and PEFT.

    python benchmarks/deberta_step.py --peers_python .venv-peers/bin/python

The model has DeBERTa-v3-base's shape and random weights. All else is as in roberta_step.py. Prints
Markdown; README.md says how to read it.
"""

import argparse
import sys

import contest
import roberta_step
from roberta_step import computed
from steps import Contestant, contestants

DEBERTA_V3_BASE = {
    "vocab_size": 128100,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "relative_attention": True,
    "max_relative_positions": -1,
    "position_buckets": 256,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
QUICK = {**DEBERTA_V3_BASE, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 384}


def gflop(contestant: Contestant, batch: list[int], shape: dict) -> float:
    """Returns billions of multiplications and additions per step, by the formula of README.md."""
    tokens, is_ours = computed(contestant, batch), contestant.worker == "ours"
    # Upstream multiplies with all rows of the relative positions' embedding.
    rows = 2 * shape["position_buckets"]
    distances = sum(n * (2 * n - 1 if is_ours else rows) for n in tokens)
    terms = len(shape["pos_att_type"].split("|"))
    return roberta_step.arithmetic(
        tokens, shape, contestant.passes, 3, is_ours, distances=terms * distances
    )


def measure(args: argparse.Namespace) -> contest.Measurement:
    """Returns the measurement that the flags ask for.

    No contestant pads to 512 tokens, because upstream's attention would need more memory than most
    machines have.
    """
    shape = QUICK if args.quick else DEBERTA_V3_BASE
    taking_part = [one for one in contestants(args.device) if not one.pad_to]
    return roberta_step.measure_shape(args, shape, taking_part, gflop)


BENCHMARK = contest.Benchmark(
    name="deberta_step",
    description=__doc__,
    data_help=roberta_step.BENCHMARK.data_help,
    rounds=3,
    flags=[contest.STEPS],
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(contest.main(BENCHMARK))
