"""Profiles where the time of this project's LoRA step goes on a CPU.

    python benchmarks/step_parts.py gpt2_step --data_dir E2E --vocab VOCAB

The steps are those of roberta_step.py, deberta_step.py or gpt2_step.py, in a fresh process for each
precision. Every batch is computed twice, first timed and then profiled, so that only the timed step
includes the compilation of kernels for it. Prints Markdown; README.md says how to read it.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import contest
import deberta_step
import gpt2_step
import roberta_step
import steps

from loralib.io.command_line import ArgumentParser, summary
from loralib.nn.fast_paths import are_fast_paths_off

MODULES = (roberta_step, deberta_step, gpt2_step)
STEPS = {module.BENCHMARK.name: module.BENCHMARK for module in MODULES}
# The part of a step that is in none of the worker's parts: Python.
BETWEEN = "between operations"
# Copies, calls, masks, additions, some of which fewer or larger operations could save.
RESTS = ("attention, the rest", "dropout outside of it, the rest", "the rest", BETWEEN)
# The rows of whole steps, below those of their parts.
KERNELS, PROFILED, TIMED = "kernels: all but rests", "a step, profiled", "a step"
AT_THE_RATE = "its arithmetic at the machine's rate"
# Below them, the last one as a share of a step's time, and of its kernels' time.
SHARES = {"as a share of a step": TIMED, "as a share of its kernels": KERNELS}


def main(argv: list[str] | None = None) -> int:
    """Parses the flags, measures in each precision and prints."""
    args, load = parse(argv), os.getloadavg()[0]
    measurement = STEPS[args.step].measure(args)
    columns, runs = {}, {}
    for dtype, contestant in steps.baselines("cpu").items():
        try:
            columns[dtype], run = measure(contestant, measurement, args)
        except RuntimeError as error:
            sys.exit(f"{contestant.label} failed: {error}")
        runs[contestant] = [run]
    print(table(columns), contest.machine(runs, load, args.quick), sep="\n\n")
    return 0


def measure(
    contestant: steps.Contestant, measurement: contest.Measurement, args: argparse.Namespace
) -> tuple[dict[str, float], dict]:
    """Measures a contestant; returns its column of the table, and what the worker wrote.

    Raises:
        RuntimeError: a worker failed; the message says how.
    """
    plan = {"seed": 0, "threads": args.threads, "device": "cpu", "step": args.step}
    plan |= {**asdict(contestant), **measurement.plan_of(contestant, 0)}
    before = contest.matrix_rate(contestant.dtype, measurement.products, args)
    run = contest.run_worker(sys.executable, "step_parts_ours", plan)
    after = contest.matrix_rate(contestant.dtype, measurement.products, args)
    timed = plan["batches"][plan["warmup"] :]
    gflop = fmean(measurement.columns.gflop(contestant, batch) for batch in timed)
    return column(run) | {AT_THE_RATE: gflop / fmean((before, after))}, run


def column(run: Mapping[str, Any]) -> dict[str, float]:
    """Returns a step's seconds by part, largest first, then those of whole steps.

    Args:
        run: what the worker wrote.
    """
    count = len(run["seconds"])
    parts = {part: seconds / count for part, seconds in run["parts"].items()}
    profiled = fmean(run["profiled"])
    parts[BETWEEN] = profiled - sum(parts.values())
    ordered = dict(sorted(parts.items(), key=lambda item: -item[1]))
    kernels = sum(seconds for part, seconds in parts.items() if part not in RESTS)
    return ordered | {KERNELS: kernels, PROFILED: profiled, TIMED: fmean(run["seconds"])}


def table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the Markdown table of a step's milliseconds, and of each part's share.

    Args:
        columns: for each precision, what `measure` returns as its column.
    """
    order = dict.fromkeys(name for found in columns.values() for name in found)
    lines = [f"| ms | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    wholes = (KERNELS, PROFILED, TIMED, AT_THE_RATE)
    for name in (*(name for name in order if name not in wholes), *wholes):
        cells = []
        for found in columns.values():
            seconds = found.get(name, 0.0)
            is_share = name not in wholes or name == KERNELS
            share = f" ({seconds / found[PROFILED]:.0%})" if is_share else ""
            cells.append(f"{1e3 * seconds:,.1f}{share}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for share, whole in SHARES.items():
        cells = [f"{found[AT_THE_RATE] / found[whole]:.0%}" for found in columns.values()]
        lines.append(f"| {share} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process if flags do not fit."""
    parser = ArgumentParser(description=summary(__doc__))
    add = parser.add_argument
    add("step", choices=sorted(STEPS), help="the benchmark whose steps are profiled")
    add("--data_dir", type=Path, help="as in that script (default: quantiles of its lengths)")
    add("--vocab", type=Path, help="folder of a byte-level BPE; goes with --data_dir")
    add("--steps", type=contest.positive, default=6, help="steps in each precision (%(default)s)")
    add("--threads", type=contest.positive, help="CPU threads (default: PyTorch's)")
    add("--quick", action="store_true", help="a tiny shape, to check that the script works")
    args = parser.parse_args(argv, argparse.Namespace(device="cpu"))
    if (args.data_dir is None) != (args.vocab is None):
        parser.error("give both --data_dir and --vocab, or neither")
    if are_fast_paths_off():
        parser.error(
            "LORALIB_PLAIN is set, which turns off the operations that are measured: unset it"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
