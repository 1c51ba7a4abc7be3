"""Carries out the study's runs of the encoder."""

import logging
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loralib.errors import TrainingError
from reproduction.run_file import RunFile, fingerprint
from reproduction.runs import read_json
from reproduction.study_data import TASKS, StudyTask
from reproduction.study_rows import Method
from reproduction.trials import Trial, Trials
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    glue_compute_metrics,
    set_seed,
)
from transformers.data.processors import glue_task
from transformers.utils.logging import set_verbosity_error

# The flags that all runs have in common.
COMMON = {"per_device_train_batch_size": 16, "warmup_ratio": 0.06, "weight_decay": 0.1}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
"""RoBERTa's dropout; the base was pretrained without."""
EPOCHS, TUNING_EPOCHS = 3, 1
"""Epochs of a run, and of a trial that chooses a learning rate on part of the training set."""
MAX_LENGTH = 64
HEAD = "classifier."


@dataclass(frozen=True)
class EncoderTrial(Trial):
    """A run of a method on a task, by its `StudyTask.name`."""

    method: Method
    task: str

    @property
    def epochs(self) -> int:
        """The number of passes over the training data."""
        return TUNING_EPOCHS if self.tuning else EPOCHS


@dataclass(frozen=True)
class Results:
    """The results of a trial.

    Args:
        score: the task's metric, from -1 or 0 to 1.
        loss: the loss on the same rows.
        parameters: the number of trained parameters, without the head's.
        head_parameters: the number of the head's parameters.
        seconds: the CPU time of training.
        memory: the peak memory of the process in bytes, including libraries.
    """

    score: float
    loss: float
    parameters: int
    head_parameters: int
    seconds: float
    memory: int


@dataclass(frozen=True)
class Experiment:
    """The base and the tasks on which trials are run.

    Args:
        folder: the study's folder with ``base/``, ``data/TASK.json``, and the Trainer's folder.
    """

    folder: Path

    @property
    def base(self) -> Path:
        """The encoder's folder."""
        return self.folder / "base"

    def data_file(self, task: str) -> Path:
        """Returns the path of the file with a task's rows by split."""
        return self.folder / "data" / f"{task}.json"

    def rows(self, task: str, split: str) -> list[dict[str, Any]]:
        """Reads a task's rows: `text_a`, `text_b` (None without a second text) and `label`."""
        return read_json(self.data_file(task))[split]

    def fingerprint(self) -> str:
        """Returns the fingerprint of the base's weights, its vocabulary, and the tasks' rows."""
        files = [self.base / name for name in ("pytorch_model.bin", "tokenizer.json")]
        return fingerprint([*files, *(self.data_file(task.name) for task in TASKS)])


def run_trial(experiment: Experiment, trial: EncoderTrial) -> Results:
    """Trains and measures a trial; run it in a new process, because it reports peak memory."""
    logging.disable(logging.WARNING)  # about the new head, and texts that are cut
    set_verbosity_error()
    task = next(task for task in TASKS if task.name == trial.task)
    splits = ("tuning_train", "tuning") if trial.tuning else ("train", "validation")
    training, measured = (experiment.rows(task.name, split) for split in splits)
    tokenizer = AutoTokenizer.from_pretrained(experiment.base)
    set_seed(trial.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        experiment.base,
        num_labels=glue_task(task.name).num_labels,
        **DROPOUT,
        **trial.method.row.flags,
    )
    if not trial.method.trains_base:
        model.train_only(kind.part for kind in model.adapted_by)
    args = TrainingArguments(
        **COMMON,
        output_dir=str(experiment.folder / "trainer"),
        num_train_epochs=trial.epochs,
        learning_rate=trial.learning_rate,
        seed=trial.seed,
        save_strategy="no",
        report_to=["none"],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args,
        DataCollatorWithPadding(tokenizer),
        encode(training, task, tokenizer),
        encode(measured, task, tokenizer),
        compute_metrics=lambda evaluated: {"score": score(task, evaluated)},
    )
    trainer.remove_callback(PrinterCallback)
    begun = time.process_time()
    memory = trainer.train().metrics["train_mem_cpu_peak"]
    seconds = time.process_time() - begun
    evaluated = trainer.evaluate()
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    head = sum(size for name, size in sizes.items() if name.startswith(HEAD))
    return Results(
        score=evaluated["eval_score"],
        loss=evaluated["eval_loss"],
        parameters=sum(sizes.values()) - head,
        head_parameters=head,
        seconds=round(seconds, 2),
        memory=memory,
    )


def encode(
    rows: list[dict[str, Any]], task: StudyTask, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Returns rows as the Trainer takes them."""
    first, second = [row["text_a"] for row in rows], [row["text_b"] for row in rows]
    texts = (first,) if second[0] is None else (first, second)
    ids = tokenizer(*texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    words = glue_task(task.name).label_words
    labels = [words.index(row["label"]) if words else float(row["label"]) for row in rows]
    return [{"input_ids": row, "label": label} for row, label in zip(ids, labels, strict=True)]


def score(task: StudyTask, evaluated: EvalPrediction) -> float:
    """Computes the task's metric."""
    outputs = np.asarray(evaluated.predictions)
    predictions = outputs.argmax(axis=1) if glue_task(task.name).label_words else outputs[:, 0]
    return glue_compute_metrics(task.name, predictions, evaluated.label_ids)[task.metric]


class EncoderTrials(Trials[EncoderTrial, Results]):
    """The trials of an experiment, each in a process of its own, on one thread.

    Args:
        experiment: the base and the tasks.
        runs: the results of finished trials.
        jobs: the number of trials that run at a time.
    """

    def __init__(self, experiment: Experiment, runs: RunFile[Results], jobs: int):
        super().__init__(runs)
        self.experiment, self.jobs = experiment, jobs
        self.fingerprint = experiment.fingerprint()

    def describe(self, trial: EncoderTrial) -> dict[str, Any]:
        """As in `Trials`."""
        return {
            "task": trial.task,
            "flags": {**COMMON, **DROPOUT, **trial.method.row.flags},
            "num_train_epochs": trial.epochs,
            "trains_base": trial.method.trains_base,
            "max_seq_length": MAX_LENGTH,
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
            "tuning": trial.tuning,
            "base_and_data": self.fingerprint,
        }

    def carry_out(self, trials: Sequence[EncoderTrial]) -> Iterator[tuple[EncoderTrial, Results]]:
        """As in `Trials`."""
        # Processes are forked from one that has imported everything and has run nothing.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # which optimizers import
        work = [(self.experiment, trial) for trial in trials]
        with context.Pool(self.jobs, _use_one_thread, maxtasksperchild=1) as pool:
            yield from pool.imap_unordered(_run, work)


def _use_one_thread() -> None:
    torch.set_num_threads(1)  # a model this small is not faster on several


def _run(work: tuple[Experiment, EncoderTrial]) -> tuple[EncoderTrial, Results]:
    experiment, trial = work
    try:
        return trial, run_trial(experiment, trial)
    except TrainingError:
        if not trial.tuning:
            raise
        # The loss is not finite: the learning rate is too large, and an infinite loss is never
        # chosen.
        return trial, Results(math.nan, math.inf, 0, 0, 0.0, 0)
