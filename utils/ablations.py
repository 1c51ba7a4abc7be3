"""Runs the paper's ablations on a small scale: projections (table 5), ranks (table 6), variants.

    bash quickstart.sh                                     makes the base and its task
    OMP_NUM_THREADS=1 python utils/ablations.py            trains on them, some 300 times

    OUTPUT_DIR/ablations.md       one table per question
    OUTPUT_DIR/ablations.png      the same as a picture
    OUTPUT_DIR/runs.jsonl         one line per finished run; the same command continues after them

A row of the tables is one choice of run_glue.py's flags, and trains as run_glue.py does. Rows also
differ in the learning rate, which is chosen for each row: each of --learning_rates is tried once on
four fifths of the training set, and the lowest loss on the last fifth wins. Then the row is trained
on the full training set, once per seed, and measured on the development set.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from loralib.io.command_line import ArgumentParser
from loralib.io.pictures import import_figure
from loralib.training import process
from reproduction.ablation_report import TABLE_NAME, Outcome, Settings, write_report
from reproduction.ablation_rows import HEAD_ALONE, QUESTIONS, Row
from reproduction.ablation_runs import AblationTrials, Experiment, Results
from reproduction.run_file import RunFile
from reproduction.trials import Cell, Trial, run_cells
from transformers.utils.logging import set_verbosity_error

LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
RUNS_NAME = "runs.jsonl"


def measure(
    trials: AblationTrials, rows: Sequence[Row], rates: Sequence[float], seeds: Sequence[int]
) -> dict[str, Outcome]:
    """Returns the rows' outcomes, by their keys; runs only what has not been run yet."""
    cells = {
        row.key: Cell(row, [Trial(row, rate, seed=0, tuning=True) for rate in rates])
        for row in rows
    }
    final = run_cells(trials, cells, list(cells), seeds)
    return {
        key: Outcome(runs[0].learning_rate, [trials.result(trial) for trial in runs])
        for key, runs in final.items()
    }


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        ValueError: a value is out of its range.
    """
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--quickstart_dir",
        type=Path,
        default=Path("quickstart_output"),
        help="folder with the base and the task, as quickstart.sh makes it (default: %(default)s)",
    )
    add(
        "--output_dir",
        type=Path,
        default=Path("output", "ablations"),
        help="folder for the tables, the picture and the runs (default: %(default)s)",
    )
    add(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2, 3, 4],
        help="one run of each row per seed; at least two (default: 0 to 4)",
    )
    add(
        "--learning_rates",
        nargs="+",
        type=float,
        default=LEARNING_RATES,
        help="those that a row chooses from; a single one is the same for all rows (default: "
        f"{' '.join(map(str, LEARNING_RATES))})",
    )
    add(
        "--num_train_epochs",
        type=float,
        default=2.0,
        help="passes over the training set (default: 2, after which the rows still differ)",
    )
    args = parser.parse_args(argv)
    args.seeds, args.learning_rates = (
        list(dict.fromkeys(values)) for values in (args.seeds, args.learning_rates)
    )
    if len(args.seeds) < 2:
        raise ValueError("--seeds: an interval needs at least two seeds")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what has not been run yet, and writes the report."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    set_verbosity_error()  # else every run warns that its head is newly initialized
    import_figure()
    experiment = Experiment(args.quickstart_dir, args.num_train_epochs, args.output_dir)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    trials = AblationTrials(experiment, RunFile(args.output_dir / RUNS_NAME, Results))
    rows = [HEAD_ALONE, *(row for question in QUESTIONS for row in question.rows)]
    outcomes = measure(trials, rows, args.learning_rates, args.seeds)
    settings = Settings(
        command=shlex.join(["python", "utils/ablations.py", *argv]),
        epochs=args.num_train_epochs,
        rates=args.learning_rates,
        labels=[example["label"] for example in experiment.development],
    )
    write_report(args.output_dir, outcomes, settings)
    print(args.output_dir / TABLE_NAME)


if __name__ == "__main__":
    process.run(main)
