"""The quickstart's learning curves: the head alone, LoRA, and full fine-tuning of the same base.

    python examples/quickstart_curves.py quickstart_output

trains the base in quickstart_output/base twice more, its head alone and all of it, with the
settings of the quickstart's LoRA run but for the learning rate; prints a table of the three; and
draws their accuracy on the development set after each epoch into
quickstart_output/learning_curves.png.

Every method has a learning rate of its own: LoRA's is in quickstart.sh, the others' are in
`METHODS`. --choose_rates shows what to choose from: it trains each method with each of
`Method.rates` and three seeds on four fifths of the training set, and prints the accuracy on the
last fifth after the last epoch. The development set has no part in this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loralib.adapters.formats import read_adapter
from loralib.io.command_line import ArgumentParser
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
# What all runs have from the LoRA run.
SHARED = (
    *("per_device_train_batch_size", "num_train_epochs", "warmup_ratio", "weight_decay"),
    *("evaluation_strategy", "seed"),
)
TUNING_SEEDS = (0, 1, 2)


@dataclass(frozen=True, eq=False)  # by identity, as a key
class Method:
    """A way to train the base.

    Args:
        name: in the table and in the picture.
        learning_rate: its peak; None for LoRA, whose run has been made.
        rates: those to choose from.
        colour: of its curve.
        settings: of the model.
    """

    name: str
    learning_rate: float | None
    rates: Sequence[float]
    colour: str
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
    """What a run has come to.

    Args:
        accuracies: on the measured rows, in percent, by epoch.
        parameters: how many were trained.
    """

    accuracies: Mapping[float, float]
    parameters: int

    @property
    def last(self) -> float:
        """The accuracy after the last epoch."""
        return self.accuracies[max(self.accuracies)]


class Quickstart:
    """What quickstart.sh has made.

    Args:
        folder: with ``base``, ``data`` and ``sst2``, the LoRA run.

    Raises:
        ValueError: one of them is not there.
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
        """A split, tokenized."""
        examples = load_glue_split(TASK, self.folder / "data", split)
        encoded = self.tokenizer([example.text_a for example in examples], truncation=True)
        labels = [int(example.label) for example in examples]
        ids = zip(encoded["input_ids"], labels, strict=True)
        return [{"input_ids": row, "label": label} for row, label in ids]

    def lora_curve(self) -> Curve:
        """That of the run that has been made."""
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
        """Trains the base.

        Args:
            method: which part of it.
            learning_rate: the peak.
            training: rows to train on.
            measured: rows to measure the accuracy on, as often as the LoRA run was measured.
            settings: those that are others than the LoRA run's.
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
        trainer.evaluate()  # once more where that is done after each epoch
        return Curve(_accuracies(trainer.state.log_history), parameters)


class EpochPrinter(TrainerCallback):
    """Prints a line after each epoch: on a busy machine it takes long."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A line."""
        print(f"  epoch {state.epoch:g} of {args.num_train_epochs:g}", flush=True)


def accuracy(evaluated: EvalPrediction) -> dict[str, float]:
    """The task's metric."""
    return glue_compute_metrics(TASK, evaluated.predictions.argmax(axis=1), evaluated.label_ids)


def _accuracies(history: Sequence[Mapping[str, float]]) -> dict[float, float]:
    """In percent, by epoch."""
    measured = [entry for entry in history if "eval_accuracy" in entry]
    return {entry["epoch"]: 100 * entry["eval_accuracy"] for entry in measured}


def try_rates(quickstart: Quickstart, seed: int) -> None:
    """Prints how each method does with each of its rates on the last fifth of the training set."""
    rows = quickstart.rows("train")
    cut = len(rows) * 4 // 5
    for method in METHODS:
        for rate in method.rates:
            curve = quickstart.train(
                method, rate, rows[:cut], rows[cut:], seed=seed, evaluation_strategy="no"
            )
            print(f"{method.name}: rate {rate:g}: seed {seed}: {curve.last:.1f} %", flush=True)


def table(curves: Mapping[Method, Curve]) -> list[str]:
    """A line a method."""
    width = max(len(method.name) for method in curves)
    lines = [f"{'':<{width}}  accuracy, %  parameters trained"]
    for method, curve in curves.items():
        lines.append(f"{method.name:<{width}}  {curve.last:>11.1f}  {curve.parameters:>18,}")
    return lines


def draw(curves: Mapping[Method, Curve]) -> Figure:
    """The accuracy over epochs, a curve a method."""
    figure = import_figure()(figsize=(7.2, 4.6), layout="constrained")
    panel = figure.subplots()
    for method, curve in curves.items():
        label = f"{method.name}: {curve.last:.1f} %, {curve.parameters:,} parameters trained"
        epochs, accuracies = zip(*sorted(curve.accuracies.items()), strict=True)
        panel.plot(epochs, accuracies, "o-", color=method.colour, linewidth=2, label=label)
    panel.set_xlabel("epoch")
    panel.set_ylabel("accuracy on the development set, %")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False)  # where it hides nothing
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints and draws; or chooses learning rates."""
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="the quickstart's output folder")
    parser.add_argument(
        "--choose_rates",
        action="store_true",
        help="only try learning rates, on the training set alone, and print how they did",
    )
    args = parser.parse_args(argv)
    set_verbosity_error()  # every run would warn that its head is new
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
