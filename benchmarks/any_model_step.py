"""Measures a LoRA step in upstream's own models, under `loralib.add_lora` and under PEFT.

    python benchmarks/any_model_step.py --peers_python .venv-peers/bin/python

The models have random weights: one of RoBERTa-base's shape with a classification head, and a
decoder like Llama with 12 layers. Batches have 8 rows as long as RTE's, padded to the longest. LoRA
or DoRA of rank 8 is on query and value, or on all linear layers. Both sides run upstream's
Transformers in the peers' environment, and the same step: forward, backward, clipping, AdamW. Each
contestant runs in a fresh process. They take turns on the same batches, in an order that rotates
from round to round. Their steps are in workers/. Prints Markdown; README.md says how to read it.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

import contest
import roberta_step
from rte_lengths import QUANTILES, count_tokens, draw_batches
from steps import WARMUP, columns

BATCH = 8
HALF = "bfloat16"  # because a model held in float16 throughout cannot be trained
PASSES = 2  # products with the weights: forward, and backward to the inputs


@dataclass(frozen=True)
class Model:
    """One of upstream's models.

    Args:
        shape: the settings of its configuration.
        gated: whether its feed-forward layers have three matrices instead of two.
        targets: sets of adapted modules by name, each given by the ends of the modules' names.
        modules_to_train: the modules of its new head.
        lora_dropout: LoRA's dropout in rows that have dropout, as in PEFT's examples.
    """

    shape: dict[str, Any]
    gated: bool
    targets: dict[str, tuple[str, ...]]
    modules_to_train: tuple[str, ...]
    lora_dropout: float


MODELS = {
    "RoBERTa-base": Model(
        shape=roberta_step.ROBERTA_BASE,
        gated=False,
        targets={
            "q/v": ("query", "value"),
            "all-linear": ("query", "key", "value", "intermediate.dense", "output.dense"),
        },
        modules_to_train=("classifier",),
        lora_dropout=0.1,
    ),
    "Llama, 12 layers": Model(
        shape={
            "vocab_size": 8000,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 2048,
            "max_position_embeddings": 512,
        },
        gated=True,
        targets={
            "q/v": ("q_proj", "v_proj"),
            "all-linear": (
                *("q_proj", "k_proj", "v_proj", "o_proj"),
                *("gate_proj", "up_proj", "down_proj"),
            ),
        },
        modules_to_train=(),
        lora_dropout=0.05,
    ),
}
QUICK = {"hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 256}


@dataclass(frozen=True)
class Contestant(contest.Contestant):
    """One row of the table.

    Args:
        model: a name in `MODELS`.
        adapted: a name in the model's `targets`.
        variant: "lora" or "dora".
        lora_dropout: dropout on the input of the updates.
    """

    model: str = ""
    adapted: str = ""
    variant: str = "lora"
    lora_dropout: float = 0.0


def settings() -> list[dict[str, Any]]:
    """Returns what is trained in which model: the fields that contestants of a baseline share."""
    every = [
        {"model": name, "adapted": adapted, "variant": variant, "lora_dropout": model.lora_dropout}
        for name, model in MODELS.items()
        for adapted in model.targets
        for variant in ("lora", "dora")
    ]
    undropped = [
        {"model": name, "adapted": "all-linear", "variant": "lora", "lora_dropout": 0.0}
        for name in MODELS
    ]
    return every + undropped


def contestants() -> list[Contestant]:
    """Returns all contestants."""
    return [one for fields in settings() for one in _with(fields)]


def _with(fields: dict[str, Any]) -> list[Contestant]:
    """Returns the contestants of both sides with these settings, in all their precisions."""
    kind = {"lora": "LoRA", "dora": "DoRA"}[fields["variant"]]
    dropout = f"dropout {fields['lora_dropout']}" if fields["lora_dropout"] else "no dropout"
    name = f"{fields['model']}, {fields['adapted']}, {kind}, {dropout}"
    in_half: dict[str, Any] = {"weights": HALF}
    of_loralib: list[dict[str, Any]] = [{}, in_half]
    of_peft = [*of_loralib, in_half | {"autocast": HALF}]
    return [
        *(Contestant(f"{name}: loralib", "loralib", **fields, **own) for own in of_loralib),
        *(Contestant(f"{name}: PEFT", "peers", **fields, **own) for own in of_peft),
    ]


def baseline_of(contestant: Contestant) -> Contestant:
    """Returns loralib's contestant with the same settings and dtype."""
    name = contestant.name.rpartition(": ")[0]
    own = {"name": f"{name}: loralib", "worker": "loralib"}
    return replace(contestant, **own, weights=contestant.dtype, autocast=None)


def gflop(contestant: Contestant, batch: list[int], shape: dict[str, Any]) -> float:
    """Returns billions of multiplications and additions per step, by the formula of README.md."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    gated = MODELS[contestant.model].gated
    weights = 4 * hidden**2 + (3 if gated else 2) * hidden * inner
    tokens, width = len(batch) * max(batch), max(batch)
    layer = 2 * PASSES * weights * tokens + 3 * 4 * hidden * tokens * width
    head = 2 * PASSES * hidden * shape["vocab_size"] * tokens if gated else 0
    return (shape["num_hidden_layers"] * layer + head) / 1e9


def measure(args: argparse.Namespace) -> contest.Measurement:
    """Returns the measurement that the flags ask for."""
    lengths = count_tokens(args.data_dir, args.vocab) if args.data_dir else QUANTILES
    smaller = QUICK if args.quick else {}

    def shape_of(contestant: Contestant) -> dict[str, Any]:
        return MODELS[contestant.model].shape | smaller

    def plan_of(contestant: Contestant, number: int) -> dict[str, Any]:
        model = MODELS[contestant.model]
        batches = draw_batches(lengths, WARMUP + args.steps, seed=number, rows=BATCH)
        return {
            "shape": shape_of(contestant),
            "targets": model.targets[contestant.adapted],
            "modules_to_train": model.modules_to_train,
            "rank": 8,
            "alpha": 16,
            "warmup": WARMUP,
            "batches": batches,
        }

    table = columns(
        "ms per real token",
        sum,
        sum,
        lambda _, batch: [max(batch)] * len(batch),
        lambda one, batch: gflop(one, batch, shape_of(one)),
    )
    return contest.Measurement(contestants(), baseline_of, plan_of, table)


BENCHMARK = contest.Benchmark(
    name="any_model_step",
    description=__doc__,
    data_help="a folder of GLUE, for RTE's lengths (default: quantiles)",
    rounds=2,
    flags=[contest.STEPS],
    measure=measure,
    needs_peers=True,
)

if __name__ == "__main__":
    sys.exit(contest.main(BENCHMARK))
