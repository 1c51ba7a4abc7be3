"""The runs of utils/ablations.py: what each of them trains."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.ablation_rows import Row
from reproduction.run_file import RunFile
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
# The flags that all runs have in common; those of the quickstart.
COMMON = {"per_device_train_batch_size": 16, "warmup_ratio": 0.06, "weight_decay": 0.1}
# The row's flags that are the Trainer's; the others are the model's.
OF_TRAINER = {"lora_plus_ratio"}


@dataclass(frozen=True)
class Trial:
    """A run of a row.

    Args:
        row: what is trained.
        learning_rate: its peak.
        seed: of the new weights, the order of the data, and dropout.
        tuning: whether it is there to choose the learning rate, on the training set alone.
    """

    row: Row
    learning_rate: float
    seed: int
    tuning: bool


@dataclass(frozen=True)
class Results:
    """What a trial has come to.

    Args:
        accuracy: from 0 to 1.
        loss: on the same sentences.
        lora_parameters: those of LoRA that were trained.
        parameters: all that were trained.
        seconds: of the processor, for training.
    """

    accuracy: float
    loss: float
    lora_parameters: int
    parameters: int
    seconds: float


class Experiment:
    """The base and its task, on which trials are run.

    Args:
        quickstart: folder with both.
        epochs: passes over the training set.
        scratch: a folder that the Trainer may take for its own; nothing is saved there.

    Raises:
        ValueError: base or data are not there.
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

    def describe(self, trial: Trial) -> dict[str, Any]:
        """All that decides a trial's results; what it is known by in the file of runs."""
        return {
            "flags": {**COMMON, "num_train_epochs": self.epochs, **trial.row.flags},
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
            "tuning": trial.tuning,
            "base_and_data": self.fingerprint,
        }

    def run(self, trial: Trial) -> Results:
        """Trains and measures."""
        training, measured = self.training, self.development
        if trial.tuning:
            cut = len(training) * 4 // 5
            training, measured = training[:cut], training[cut:]
        flags = trial.row.flags
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
    """The task's metric."""
    return glue_compute_metrics(TASK, evaluated.predictions.argmax(axis=1), evaluated.label_ids)


class Runs:
    """The experiment's runs, of which none is run twice.

    Args:
        file: the results of those that are finished.
    """

    def __init__(self, file: RunFile[Results]):
        self.file = file

    def result(self, experiment: Experiment, trial: Trial) -> Results:
        """A trial's, from the file where it is there; else it is run, and written."""
        run = experiment.describe(trial)
        if run not in self.file:
            self.file[run] = experiment.run(trial)
        return self.file[run]
