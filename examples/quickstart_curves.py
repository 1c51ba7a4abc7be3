"""The quickstart's learning curves: the head alone, LoRA, and full fine-tuning of the same base.

    python examples/quickstart_curves.py quickstart_output

trains the base in quickstart_output/base twice more: only its head, and all of it. Except for the
learning rate, the settings are those of the quickstart's LoRA run. It prints a table of the three
methods, and plots their accuracy on the development set after each epoch in
quickstart_output/learning_curves.png.

Every method has its own learning rate. LoRA's is in quickstart.sh, the others are in `METHODS`. To
choose them, --choose_rates trains each method with each of `Method.rates` and three seeds on four
fifths of the training set, and prints the final accuracy on the last fifth. It does not use the
development set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loralib.adapters.formats import read_adapter
from loralib.io.command_line import ArgumentParser, summary
from loralib.io.pictures import check_can_save, import_figure, save_figure
from loralib.training import process
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    glue_compute_metrics,
    set_seed,
)
from transformers.data.processors import load_glue_split
from transformers.utils.logging import set_verbosity_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASK = "sst2"
PICTURE_NAME = "learning_curves.png"
# The settings that all runs take from the LoRA run.
SHARED = (
    *("per_device_train_batch_size", "num_train_epochs", "warmup_ratio", "weight_decay"),
    *("evaluation_strategy", "seed"),
)
TUNING_SEEDS = (0, 1, 2)


@dataclass(frozen=True, eq=False)  # hashed by identity, to be a dict's key
class Method:
    """A way to train the base.

    Args:
        name: its name in the table and in the plot.
        learning_rate: the peak learning rate; None for LoRA, whose run already exists.
        rates: the learning rates to choose from.
        color: the color of its curve.
        settings: the model's settings.
    """

    name: str
    learning_rate: float | None
    rates: Sequence[float]
    color: str
    settings: Mapping[str, Any] = field(default_factory=dict)


HEAD = Method("the head alone", 4e-3, (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), "#6b7f95")
LORA = Method(
    "LoRA, r = 8",
    None,
    (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "#c2650c",
    {"apply_lora": True, "lora_r": 8, "lora_alpha": 16},
)
FULL = Method("full fine-tuning", 5e-4, (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), "#6f5fa6")
METHODS = (HEAD, LORA, FULL)


@dataclass(frozen=True)
class Curve:
    """The results of a run.

    Args:
        accuracies: the accuracy on the measured rows, in percent, by epoch.
        parameters: the number of trained parameters.
    """

    accuracies: Mapping[float, float]
    parameters: int

    @property
    def last(self) -> float:
        """The accuracy after the last epoch."""
        return self.accuracies[max(self.accuracies)]


class Quickstart:
    """The output of quickstart.sh.

    Args:
        folder: the output folder, with ``base``, ``data`` and ``sst2`` (the LoRA run).

    Raises:
        ValueError: one of these folders is missing.
    """

    def __init__(self, folder: Path):
        self.folder, self.lora_run = folder, folder / "sst2"
        for part in (folder / "base", folder / "data", self.lora_run):
            if not part.is_dir():
                raise ValueError(f"{part}: no such folder; quickstart.sh makes it: run that first")
        path = self.lora_run / "training_args.bin"
        given = torch.load(path, weights_only=True)
        self.settings = {name: given[name] for name in SHARED}
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "base")

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Returns the tokenized rows of a split."""
        examples = load_glue_split(TASK, self.folder / "data", split)
        encoded = self.tokenizer([example.text_a for example in examples], truncation=True)
        labels = [int(example.label) for example in examples]
        ids = zip(encoded["input_ids"], labels, strict=True)
        return [{"input_ids": row, "label": label} for row, label in ids]

    def lora_curve(self) -> Curve:
        """Returns the results of the quickstart's LoRA run."""
        state = json.loads((self.lora_run / "trainer_state.json").read_text(encoding="utf-8"))
        tensors = read_adapter(self.folder / "lora.bin").tensors
        parameters = sum(tensor.numel() for tensor in tensors.values())
        return Curve(_accuracies(state["log_history"]), parameters)

    def train(
        self,
        method: Method,
        learning_rate: float,
        training: list[dict[str, Any]],
        measured: list[dict[str, Any]],
        **settings: Any,
    ) -> Curve:
        """Trains the base, and returns the results.

        Args:
            method: the method.
            learning_rate: the peak learning rate.
            training: the rows to train on.
            measured: the rows to measure the accuracy on, as often as in the LoRA run.
            settings: settings that differ from the LoRA run's.
        """
        args = TrainingArguments(
            **{**self.settings, **settings},
            output_dir=str(self.folder / "others"),
            learning_rate=learning_rate,
            logging_strategy="no",
            save_strategy="no",
            report_to=["none"],
            disable_tqdm=True,
        )
        set_seed(args.seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            self.folder / "base", num_labels=2, **method.settings
        )
        if method is not FULL:
            model.train_only(kind.part for kind in model.adapted_by)
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"{method.name}: {parameters:,} parameters, learning rate {learning_rate:g}")
        padding = DataCollatorWithPadding(self.tokenizer)
        trainer = Trainer(model, args, padding, training, measured, compute_metrics=accuracy)
        trainer.remove_callback(PrinterCallback)  # a table follows
        trainer.add_callback(EpochPrinter)
        trainer.train()
        trainer.evaluate()  # needed without evaluations during training, otherwise a repetition
        return Curve(_accuracies(trainer.state.log_history), parameters)


class EpochPrinter(TrainerCallback):
    """Prints a line after each epoch, because an epoch may take long on a busy machine."""

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Prints the epoch's number."""
        print(f"  epoch {state.epoch:g} of {args.num_train_epochs:g}", flush=True)


def accuracy(evaluated: EvalPrediction) -> dict[str, float]:
    """Returns the task's metric."""
    return glue_compute_metrics(TASK, evaluated.predictions.argmax(axis=1), evaluated.label_ids)


def _accuracies(history: Sequence[Mapping[str, float]]) -> dict[float, float]:
    """Returns the accuracies in a run's log, in percent, by epoch."""
    measured = [entry for entry in history if "eval_accuracy" in entry]
    return {entry["epoch"]: 100 * entry["eval_accuracy"] for entry in measured}


def try_rates(quickstart: Quickstart, seed: int) -> None:
    """Prints the accuracy of each method and rate on the last fifth of the training set."""
    rows = quickstart.rows("train")
    cut = len(rows) * 4 // 5
    for method in METHODS:
        for rate in method.rates:
            curve = quickstart.train(
                method, rate, rows[:cut], rows[cut:], seed=seed, evaluation_strategy="no"
            )
            print(f"{method.name}: rate {rate:g}: seed {seed}: {curve.last:.1f} %", flush=True)


def table(curves: Mapping[Method, Curve]) -> list[str]:
    """Returns a table with one line per method."""
    width = max(len(method.name) for method in curves)
    lines = [f"{'':<{width}}  accuracy, %  parameters trained"]
    for method, curve in curves.items():
        lines.append(f"{method.name:<{width}}  {curve.last:>11.1f}  {curve.parameters:>18,}")
    return lines


def draw(curves: Mapping[Method, Curve]) -> Figure:
    """Plots the accuracy over epochs, with one curve per method."""
    figure = import_figure()(figsize=(7.2, 4.6), layout="constrained")
    panel = figure.subplots()
    for method, curve in curves.items():
        label = f"{method.name}: {curve.last:.1f} %, {curve.parameters:,} parameters trained"
        epochs, accuracies = zip(*sorted(curve.accuracies.items()), strict=True)
        panel.plot(epochs, accuracies, "o-", color=method.color, linewidth=2, label=label)
    panel.set_xlabel("epoch")
    panel.set_ylabel("accuracy on the development set, %")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False)  # outside, so it hides no curve
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table and plots the curves; or tries learning rates."""
    parser = ArgumentParser(description=summary(__doc__))
    parser.add_argument("folder", type=Path, help="the quickstart's output folder")
    parser.add_argument(
        "--choose_rates",
        action="store_true",
        help="only try learning rates, on the training set alone, and print how they did",
    )
    args = parser.parse_args(argv)
    set_verbosity_error()  # hides every run's warning that its head is newly initialized
    quickstart = Quickstart(args.folder)
    if args.choose_rates:
        for seed in TUNING_SEEDS:
            try_rates(quickstart, seed)
        return
    picture = args.folder / PICTURE_NAME
    check_can_save(picture)
    training, development = quickstart.rows("train"), quickstart.rows("validation")
    curves = {
        method: quickstart.lora_curve()
        if method.learning_rate is None
        else quickstart.train(method, method.learning_rate, training, development)
        for method in METHODS
    }
    save_figure(draw(curves), picture, dpi=110)
    print("\n".join([*table(curves), f"learning curves: {picture}"]))


if __name__ == "__main__":
    process.run(main)
