"""Runs the recipes of the paper's GLUE and NLG tables with several seeds, and compares the results.

    python utils/reproduce.py "roberta-base LoRA"             a row of a table: all its recipes
    python utils/reproduce.py roberta_base_rte --seeds 0 1    a recipe of NLU/ or NLG/
    python utils/reproduce.py e2e_gpt2_md -- --bf16           flags for the recipe, after its own
    python utils/reproduce.py "roberta-base LoRA" --estimate  only what each recipe would take
    python utils/reproduce.py --study                         a small-scale study; see --study -h

Each run executes a recipe as a separate program, with a folder of its own:

    OUTPUT_DIR/results.md             the table, rewritten after every run
    OUTPUT_DIR/learning_curves.png    one panel per recipe, one line per seed
    OUTPUT_DIR/RECIPE/seedN/          log.txt; the recipe's output/; error.txt if it failed

If it is stopped, the same command continues: finished runs are not repeated, and a run that was
interrupted resumes from its last checkpoint.

GLUE's recipes get additional flags: to end with the evaluation that was best on the development set
(after an epoch for RoBERTa, after some steps for DeBERTa, as in the recipe), and to keep no other
checkpoints. MRPC, RTE and STS-B start from the LoRA weights of MNLI's run with the same seed, from
MNLI_CHECKPOINT if that is set, or, with neither, from the file that the recipe names. With fewer
GPUs than a recipe asks for, gradient accumulation keeps its batch size, unless NPROC is set.
"""

import argparse
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loralib.errors import TrainingError
from loralib.io.command_line import ArgumentParser
from loralib.io.hub import UNFETCHED, why_out_of_reach
from loralib.training import process
from reproduction.glue import Glue
from reproduction.nlg import Nlg
from reproduction.plan import SMALL_SEEDS, Row, check_settings, choose, plan_runs, read_rows
from reproduction.programs import execute, show_estimate
from reproduction.runs import Run, Tree, problem_of

logger = logging.getLogger(__name__)

# Flags that this program gives each run itself.
OWN_FLAGS = (
    *("--seed", "--output_dir", "--overwrite_output_dir", "--logging_dir", "--save_total_limit"),
    *("--load_best_model_at_end", "--metric_for_best_model", "--greater_is_better"),
    *("--random_seed", "--work_dir", "--resume"),
)
# Environment variables that change what a run computes.
DECISIVE = ("NPROC", "MNLI_CHECKPOINT")


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads this program's arguments, and the flags for the recipes.

    Raises:
        ValueError: arguments exclude each other, or a flag after -- is one that this program sets.
    """
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="NAME",
        help="recipes, by the names of their scripts, and rows: those of the paper's tables",
    )
    add(
        "--seeds",
        nargs="+",
        type=int,
        help="one run each (default: 0 to 4 for GLUE, 110 to 114 for GPT-2; with --small, the "
        f"first {SMALL_SEEDS} of them)",
    )
    add(
        "--output_dir",
        type=Path,
        help="folder for the runs and the table (default: output/reproduce, or "
        "output/reproduce_small)",
    )
    add(
        "--small",
        action="store_true",
        help="a trial, in minutes on a CPU and offline: a few steps of the same recipes on a small "
        "base and small data that it makes; SST-2 on RoBERTa, and E2E",
    )
    add(
        "--estimate",
        action="store_true",
        help="print what a run of each recipe would take on this machine (parameters, memory, "
        "arithmetic, time), and train nothing",
    )
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    args, unknown = parser.parse_known_args(argv[:cut])
    if unknown:
        parser.refuse(unknown, "; flags of the recipes go after --, as in NAME -- --data_dir DATA")
    if args.estimate and args.small:
        raise ValueError("--estimate is for the full recipes: leave out --small")
    if args.output_dir is None:
        args.output_dir = Path("output", "reproduce_small" if args.small else "reproduce")
    flags = argv[cut + 1 :]
    for flag in flags:
        name = flag.split("=")[0]
        if name in OWN_FLAGS:
            raise ValueError(f"{name} cannot follow --: this program sets it for each run")
    return args, flags


def execute_all(
    runs: Sequence[tuple[Tree, Run]], flags: Sequence[str], after_each: Callable[[], object]
) -> None:
    """Executes every run that is not finished and can begin.

    If a run failed because a file could not be fetched, the recipe's other seeds need that file as
    well. They are left out as long as the hub cannot be reached.
    """
    lacking: set[str] = set()
    for number, (tree, run) in enumerate(runs, start=1):
        where = f"[{number}/{len(runs)}] {run}"
        if tree.figures(run) is not None:
            logger.info("%s: is finished", where)
            continue
        if obstacle := tree.obstacle(run):
            logger.info("%s: not run (%s)", where, obstacle)
            continue
        if run.recipe in lacking and (why := why_out_of_reach()):
            logger.info("%s: not run (a file that it needs cannot be fetched: %s)", where, why)
            continue
        logger.info("%s: %s", where, run.log)
        begun = time.monotonic()
        execute(tree, run, flags)
        minutes = (time.monotonic() - begun) / 60
        problem = problem_of(tree, run)
        logger.info("%s: %s, %.1f min", where, problem or "finished", minutes)
        if problem and UNFETCHED in problem:
            lacking.add(run.recipe)
        after_each()


def left_out(runs: Sequence[tuple[Tree, Run]]) -> dict[str, list[str]]:
    """Returns the recipes that cannot begin, each once, by the reason."""
    found: dict[str, dict[str, None]] = {}
    for tree, run in runs:
        if obstacle := tree.obstacle(run):
            found.setdefault(obstacle, {})[run.recipe] = None
    return {obstacle: list(recipes) for obstacle, recipes in found.items()}


def estimate_all(runs: Sequence[tuple[Tree, Run]], flags: Sequence[str]) -> None:
    """Prints each recipe's estimate once, because all its seeds take the same.

    Raises:
        TrainingError: a recipe failed; it has printed its error.
    """
    recipes: dict[str, tuple[Tree, Run]] = {}
    for tree, run in runs:
        recipes.setdefault(run.recipe, (tree, run))
    failed = []
    for tree, run in recipes.values():
        print(f"\n## {run.recipe}\n", flush=True)
        if show_estimate(tree, run, flags):
            failed.append(run.recipe)
    if failed:
        raise TrainingError(f"no estimate of {', '.join(failed)}: see above")


def reproduce(
    out: Path, rows: list[Row], runs: list[tuple[Tree, Run]], flags: list[str], small: bool
) -> None:
    """Executes the runs that are not finished, and writes the report of all rows.

    Raises:
        TrainingError: not all runs are finished.
    """
    from reproduction.report import RESULTS_NAME, write_report

    variables = {name: os.environ[name] for name in DECISIVE if os.environ.get(name)}
    settings = {"small": small, "flags": flags, "environment": variables}
    check_settings(out, settings)
    report_now = functools.partial(write_report, out, rows, [run for _, run in runs], settings)
    if small:
        # A recipe without small data is not a failure. The table mentions it, too.
        for obstacle, recipes in left_out(runs).items():
            logger.info("left out of the trial: %s (%s)", ", ".join(recipes), obstacle)
        runs = [(tree, run) for tree, run in runs if not tree.obstacle(run)]
    try:
        for tree in dict.fromkeys(tree for tree, _ in runs):
            if tree.small and not tree.small.is_dir():
                logger.info("making %s", tree.small)
                tree.make_small()
        execute_all(runs, flags, report_now)
    finally:
        print(report_now())
    missing = [run for tree, run in runs if tree.figures(run) is None]
    if missing:
        raise TrainingError(
            f"{len(missing)} of {len(runs)} runs are not finished: see {out / RESULTS_NAME}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Executes the runs that are asked for and not finished, and writes the report.

    Raises:
        ValueError: an argument is invalid, or another program is using a run's folder.
        TrainingError: not all runs are finished.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--study" in argv:
        from reproduction import study  # here, because it imports torch

        argv.remove("--study")
        study.main(argv)
        return
    args, flags = parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    out = args.output_dir.absolute()
    # Names are checked before libraries that take seconds to import.
    rows = read_rows([Glue(out, args.small), Nlg(out, args.small)])
    runs = plan_runs(choose(args.names, rows), rows, args.seeds, out)
    if args.estimate:
        estimate_all(runs, flags)
    else:
        reproduce(out, list(rows.values()), runs, flags, args.small)


def start() -> None:
    """Runs `main` as a program."""
    # On SIGTERM, an exception unwinds the stack, which also ends the run that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process.run(main)


if __name__ == "__main__":
    start()
