"""Compares ways to adapt a small encoder and a small GPT-2.

    python utils/reproduce.py --study                               all of it: hours on two cores
    python utils/reproduce.py --study "LoRA, query + value, r = 4"  some rows of the tables
    python utils/reproduce.py --study "GPT-2, LoRA, r = 4"

Both bases are pretrained here, on the text of the training sets, so only data is downloaded. The
learning rate of each method is chosen from a few, with one shorter run each on four fifths of the
training set. Then the method is trained once per seed, and the final model of each run is measured.

    OUTPUT_DIR/study.md, study.png   the tables and the picture
    OUTPUT_DIR/runs.jsonl, gpt2/runs.jsonl
                                     one line per finished run; the same command continues
    OUTPUT_DIR/base/, gpt2/base.pt   the bases; one that is deleted is trained again
"""

import argparse
import datetime
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from loralib.errors import TrainingError
from loralib.io.atomic import atomic_write_text
from loralib.io.command_line import ArgumentParser
from loralib.io.pictures import import_figure
from loralib.nn.products import machine
from loralib.training import process
from reproduction.programs import environment, lock_folder
from reproduction.run_file import RunFile
from reproduction.runs import ROOT
from reproduction.study_data import TASKS, corpus_sentences, find_file, prepare_task
from reproduction.study_gpt2 import Gpt2Results, Gpt2Trial, Gpt2Trials
from reproduction.study_report import (
    TABLE_NAME,
    Gpt2Outcome,
    Outcome,
    Settings,
    report,
    write_report,
)
from reproduction.study_rows import (
    BY_RANK,
    GPT2_METHODS,
    METHODS,
    PROJECTIONS,
    WEIGHTS_TASK,
    Method,
)
from reproduction.study_runs import EncoderTrial, EncoderTrials, Experiment, Results
from reproduction.trials import Cell, run_cells

logger = logging.getLogger(__name__)

# The encoder has 5.7 million parameters, 1.9 million of them for the vocabulary. It is trained
# without dropout, because such a small model underfits rather than overfits this text.
BASE_SHAPE = {
    "vocab_size": 5000,
    "hidden_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_seq_length": 128,
}
BASE_FLAGS = {
    "num_train_epochs": 10,
    "learning_rate": 1e-3,
    "warmup_ratio": 0.02,
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "mlm_probability": 0.3,
    "seed": 0,
    "logging_steps": 50,
    "save_strategy": "no",
    "report_to": "none",
}
BASE_BATCH = 64


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        ValueError: a row is unknown, or a value is out of its range.
    """
    parser = ArgumentParser(prog="reproduce.py --study", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="ROW", help="some rows of the tables (default: all)")
    add(
        "--data_dir",
        type=Path,
        default=Path("glue_data"),
        help="GLUE's SST-2, CoLA, RTE and STS-B, as utils/download_glue_data.py fetches them "
        "(default: %(default)s)",
    )
    add(
        "--nlg_dir",
        type=Path,
        default=Path("NLG", "data"),
        help="E2E, WebNLG and DART, as NLG/download_data.sh fetches them (default: %(default)s)",
    )
    add(
        "--vocab",
        type=Path,
        default=Path("NLG", "vocab"),
        help="GPT-2's vocabulary, from the same script (default: %(default)s)",
    )
    add(
        "--output_dir",
        type=Path,
        default=Path("output", "study"),
        help="folder for the bases, the runs, the tables and the picture (default: %(default)s)",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run each (default: 0 1 2)")
    add(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="runs at a time, one core each (default: as many as there are cores)",
    )
    args = parser.parse_args(argv)
    known = [*all_methods(), *(method.name for method in GPT2_METHODS)]
    for name in args.names:
        if name not in known:
            raise ValueError(f"there is no row {name!r} in the study; rows: {'; '.join(known)}")
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs}: must be at least 1")
    args.seeds = list(dict.fromkeys(args.seeds))
    return args


def all_methods() -> dict[str, Method]:
    """Returns the encoder's methods, by name."""
    return {method.name: method for method in (*METHODS, *PROJECTIONS, *BY_RANK)}


def encoder_cells() -> dict[tuple[str, str], Cell]:
    """Returns the encoder's cells by task and method, with those of the first table first."""
    pairs = [(task.name, method) for method in METHODS for task in TASKS]
    pairs += [(WEIGHTS_TASK, method) for method in (*PROJECTIONS, *BY_RANK)]
    cells = {}
    for task, method in pairs:
        tuned = method.tuned_as or method
        tuning = [EncoderTrial(tuned, rate, 0, tuning=True, task=task) for rate in tuned.rates]
        cells[task, method.name] = Cell(method, tuning)
    return cells


def gpt2_cells() -> dict[str, Cell]:
    """Returns GPT-2's cells by method."""
    return {
        method.name: Cell(
            method, [Gpt2Trial(method, rate, 0, tuning=True) for rate in method.rates]
        )
        for method in GPT2_METHODS
    }


class Study:
    """The steps of the study; each does only what has not been done yet.

    Args:
        args: the command line's arguments.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.out: Path = args.output_dir.absolute()
        self.experiment = Experiment(self.out)
        self.corpus = self.out / "corpus.txt"

    def prepare(self) -> None:
        """Writes the tasks' rows and the corpus."""
        for task in TASKS:
            path = self.experiment.data_file(task.name)
            if not path.is_file():
                splits = prepare_task(task, self.args.data_dir)
                rows = {name: [asdict(row) for row in rows] for name, rows in splits.items()}
                path.parent.mkdir(exist_ok=True)
                atomic_write_text(path, json.dumps(rows))
        if not self.corpus.is_file():
            sentences = corpus_sentences(self.args.data_dir, self.args.nlg_dir)
            atomic_write_text(self.corpus, "\n".join(sentences) + "\n")

    def train_base(self) -> None:
        """Pretrains the encoder with run_mlm.py.

        Raises:
            TrainingError: run_mlm.py failed; it has printed its error.
        """
        if (self.experiment.base / "pytorch_model.bin").is_file():
            return
        logger.info("pretraining the encoder: %s", self.experiment.base)
        processes = max(number for number in (1, 2, 4, 8) if number <= self.args.jobs)
        flags = {
            "train_file": self.corpus,
            "output_dir": self.experiment.base,
            "per_device_train_batch_size": BASE_BATCH // processes,
            **BASE_SHAPE,
            **BASE_FLAGS,
        }
        command = [
            *(sys.executable, "-m", "torch.distributed.launch", f"--nproc_per_node={processes}"),
            str(ROOT / "examples/language-modeling/run_mlm.py"),
            *("--do_train", "--bf16", "--overwrite_output_dir"),
            *(str(text) for name, value in flags.items() for text in (f"--{name}", value)),
        ]
        if subprocess.run(command, env=environment({"OMP_NUM_THREADS": "1"})).returncode:
            raise TrainingError("the encoder could not be pretrained: see above")

    def adapt_encoder(self) -> dict[tuple[str, str], Outcome]:
        """Runs what is asked for; returns all finished outcomes by task and method."""
        cells = encoder_cells()
        wanted = [key for key in cells if self.is_wanted(key[1])]
        if wanted:
            self.train_base()
        if not (self.experiment.base / "pytorch_model.bin").is_file():
            return {}
        runs = RunFile(self.out / "runs.jsonl", Results)
        trials = EncoderTrials(self.experiment, runs, self.args.jobs)
        final = run_cells(trials, cells, wanted, self.args.seeds)
        return {
            key: Outcome(
                row[0].learning_rate,
                cells[key].is_at_end(row[0].learning_rate),
                [trials.result(trial) for trial in row],
            )
            for key, row in final.items()
        }

    def adapt_gpt2(self) -> dict[str, Gpt2Outcome]:
        """Runs what is asked for; returns all finished outcomes by method."""
        cells = gpt2_cells()
        wanted = [name for name in cells if self.is_wanted(name)]
        folder = self.out / "gpt2"
        runs = RunFile(folder / "runs.jsonl", Gpt2Results)
        trials = Gpt2Trials(folder, self.args.vocab.absolute(), runs, self.args.jobs)
        if wanted:
            sentences = self.corpus.read_text(encoding="utf-8").splitlines()
            e2e = find_file(self.args.nlg_dir.absolute(), "e2e/valid.txt").parent
            trials.prepare(sentences, e2e)
            logger.info("pretraining GPT-2: %s", trials.base)
            trials.train_base()
        if not trials.base.is_file():
            return {}
        final = run_cells(trials, cells, wanted, self.args.seeds)
        return {
            name: Gpt2Outcome(row[0].learning_rate, [trials.result(trial) for trial in row])
            for name, row in final.items()
        }

    def is_wanted(self, name: str) -> bool:
        """Returns whether a row is to be run."""
        return not self.args.names or name in self.args.names

    def labels(self) -> dict[str, list[str]]:
        """Returns the labels of the development sets, by task."""
        return {
            task.name: [row["label"] for row in self.experiment.rows(task.name, "validation")]
            for task in TASKS
        }


def main(argv: Sequence[str]) -> None:
    """Runs what is asked for and has not been run yet, and writes the report.

    Args:
        argv: the command line, without ``--study``.
    """
    args = parse_args(argv)
    process.set_up_logging(own=["reproduction"])
    import_figure()  # fails now, not after hours of work, if matplotlib is missing
    with lock_folder(args.output_dir):
        study = Study(args)
        study.prepare()
        outcomes, gpt2 = study.adapt_encoder(), study.adapt_gpt2()
        settings = Settings(
            seeds=args.seeds,
            labels=study.labels(),
            words=len(study.corpus.read_text(encoding="utf-8").split()),
            made=f"{machine()}; {datetime.date.today():%d %B %Y}",
        )
        write_report(study.out, report(outcomes, gpt2, settings), outcomes)
    print(study.out / TABLE_NAME)
