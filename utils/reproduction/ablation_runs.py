"""Carries out the runs of utils/ablations.py."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.run_file import RunFile
from reproduction.trials import Trial, Trials
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    glue_compute_metrics,
    set_seed,
)
from transformers.data.processors import load_glue_split

TASK = "sst2"
# The flags that all runs have in common, as in the quickstart.
COMMON = {"per_device_train_batch_size": 16, "warmup_ratio": 0.06, "weight_decay": 0.1}
# Flags of rows that are for the Trainer; the others are for the model.
OF_TRAINER = {"lora_plus_ratio"}


@dataclass(frozen=True)
class Results:
    """The results of a trial.

    Args:
        accuracy: the accuracy, from 0 to 1.
        loss: the loss on the same sentences.
        lora_parameters: the number of trained LoRA parameters.
        parameters: the number of all trained parameters.
        seconds: the CPU time of training.
    """

    accuracy: float
    loss: float
    lora_parameters: int
    parameters: int
    seconds: float


class Experiment:
    """The base and the task on which trials are run.

    Args:
        quickstart: the folder with both.
        epochs: passes over the training set.
        scratch: the Trainer's output folder; nothing is saved there.

    Raises:
        ValueError: base or data are missing.
    """

    def __init__(self, quickstart: Path, epochs: float, scratch: Path):
        self.base, self.epochs, self.scratch = quickstart / "base", epochs, scratch
        if not self.base.is_dir():
            raise ValueError(f"{self.base}: no such folder; quickstart.sh makes it: run that first")
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.training, self.development = (
            self._read(quickstart / "data", split) for split in ("train", "validation")
        )
        digest = hashlib.sha256((self.base / "pytorch_model.bin").read_bytes())
        digest.update(json.dumps([self.training, self.development]).encode())
        self.fingerprint = digest.hexdigest()[:16]

    def _read(self, data: Path, split: str) -> list[dict[str, Any]]:
        examples = load_glue_split(TASK, data, split)
        encoded = self.tokenizer([example.text_a for example in examples], truncation=True)
        labels = [int(example.label) for example in examples]
        ids = zip(encoded["input_ids"], labels, strict=True)
        return [{"input_ids": row, "label": label} for row, label in ids]

    def run(self, trial: Trial) -> Results:
        """Trains and measures a trial, whose method is a `Row`."""
        training, measured = self.training, self.development
        if trial.tuning:
            cut = len(training) * 4 // 5
            training, measured = training[:cut], training[cut:]
        flags = trial.method.flags
        set_seed(trial.seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            self.base, num_labels=2, **{n: flags[n] for n in flags.keys() - OF_TRAINER}
        )
        model.train_only(kind.part for kind in model.adapted_by)
        args = TrainingArguments(
            **{n: flags[n] for n in flags.keys() & OF_TRAINER},
            **COMMON,
            output_dir=str(self.scratch),
            num_train_epochs=self.epochs,
            learning_rate=trial.learning_rate,
            seed=trial.seed,
            save_strategy="no",
            report_to=["none"],
            disable_tqdm=True,
        )
        padding = DataCollatorWithPadding(self.tokenizer)
        trainer = Trainer(model, args, padding, training, measured, compute_metrics=accuracy)
        trainer.remove_callback(PrinterCallback)
        begun = time.process_time()
        trainer.train()
        seconds = time.process_time() - begun
        evaluated = trainer.evaluate()
        trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
        return Results(
            accuracy=evaluated["eval_accuracy"],
            loss=evaluated["eval_loss"],
            lora_parameters=sum(size for name, size in trained.items() if "lora_" in name),
            parameters=sum(trained.values()),
            seconds=round(seconds, 2),
        )


def accuracy(evaluated: EvalPrediction) -> dict[str, float]:
    """Computes the task's metric."""
    return glue_compute_metrics(TASK, evaluated.predictions.argmax(axis=1), evaluated.label_ids)


class AblationTrials(Trials[Trial, Results]):
    """The trials of an experiment, one after the other.

    Args:
        experiment: the base and the task.
        runs: the results of finished trials.
    """

    def __init__(self, experiment: Experiment, runs: RunFile[Results]):
        super().__init__(runs)
        self.experiment = experiment

    def describe(self, trial: Trial) -> dict[str, Any]:
        """As in `Trials`."""
        epochs = self.experiment.epochs
        return {
            "flags": {**COMMON, "num_train_epochs": epochs, **trial.method.flags},
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
            "tuning": trial.tuning,
            "base_and_data": self.experiment.fingerprint,
        }

    def carry_out(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Results]]:
        """As in `Trials`."""
        for trial in trials:
            yield trial, self.experiment.run(trial)
