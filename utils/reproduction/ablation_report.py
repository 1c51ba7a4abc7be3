"""Writes the results of utils/ablations.py: one Markdown table per question, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loralib.io.atomic import atomic_write_text
from loralib.io.pictures import import_figure, save_figure
from reproduction.ablation_rows import ALPHA, HEAD_ALONE, QUESTIONS, Row
from reproduction.ablation_runs import Results
from reproduction.tables import CONFIDENCE, half_width, markdown_table, with_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLE_NAME, PICTURE_NAME = "ablations.md", "ablations.png"


@dataclass(frozen=True)
class Outcome:
    """A row's results.

    Args:
        learning_rate: the learning rate of all runs.
        runs: the results of the runs, one per seed; at least two.
    """

    learning_rate: float
    runs: Sequence[Results]

    @property
    def accuracies(self) -> list[float]:
        """Each seed's accuracy, in percent."""
        return [100 * run.accuracy for run in self.runs]

    @property
    def mean(self) -> float:
        """The mean of the accuracies."""
        return statistics.mean(self.accuracies)

    @property
    def half(self) -> float:
        """Half the width of the mean's confidence interval."""
        return half_width(self.accuracies)

    def cells(self) -> list[str]:
        """Returns the row's cells in the table, without its name and rank."""
        seconds = statistics.mean(run.seconds for run in self.runs)
        return [
            with_interval(self.accuracies),
            f"{self.runs[0].lora_parameters:,}",
            f"{self.learning_rate:g}",
            f"{seconds:.1f}",
        ]


Outcomes = Mapping[str, Outcome]
"""Outcomes by the key of their row."""


@dataclass(frozen=True)
class Settings:
    """How the rows were trained.

    Args:
        command: the command that was run.
        epochs: passes over the training set.
        rates: the learning rates to choose from; a single one is that of all rows.
        labels: the labels of the development set.
    """

    command: str
    epochs: float
    rates: Sequence[float]
    labels: Sequence[int]


def report(outcomes: Outcomes, settings: Settings) -> str:
    """Returns all tables, with text on how they were made and what they mean.

    Args:
        outcomes: the outcome of every row of every question, and of `HEAD_ALONE`.
        settings: how the rows were trained.
    """
    lines = [
        "# The paper's ablations on a small scale\n",
        "<!-- not run: trains hundreds of models -->",
        f"```bash\nbash quickstart.sh\n{settings.command}\n```\n",
        *_introduction(outcomes[HEAD_ALONE.key], settings),
        f"![accuracies with their intervals]({PICTURE_NAME})\n",
    ]
    header = ["", "r", "accuracy, %", "LoRA's parameters", "learning rate", "seconds"]
    for question in QUESTIONS:
        rows = [[row.name, str(row.rank), *outcomes[row.key].cells()] for row in question.rows]
        lines += [f"## {question.title}\n", *markdown_table(header, rows)]
    return "\n".join([*lines, *_limits(outcomes, settings)]) + "\n"


def _introduction(head: Outcome, settings: Settings) -> list[str]:
    labels = settings.labels
    majority = max(labels.count(label) for label in set(labels)) / len(labels)
    rates = ", ".join(f"{rate:g}" for rate in settings.rates)
    chosen = f"All rows use a learning rate of {rates}."
    if len(settings.rates) > 1:
        chosen = (
            f"A row's learning rate is the one of {rates} with the lowest loss on a fifth of the "
            "training set, after one run on the rest."
        )
    return [
        f"The script trains the quickstart's base on its task, {settings.epochs:g} passes per run, "
        f"and measures the accuracy on the {len(labels)} sentences of the development set. "
        f"Accuracies are means over {len(head.runs)} seeds, ± half of the "
        f"{100 * CONFIDENCE:.0f} % confidence interval (Student's t). {chosen} LoRA's alpha is "
        f"{ALPHA} throughout. Seconds are CPU time for one run.\n",
        f"Always predicting the more frequent label gives {100 * majority:.1f} %. Training the "
        f"head alone, without LoRA, gives {with_interval(head.accuracies)} (learning rate "
        f"{head.learning_rate:g}); the head, {head.runs[0].parameters:,} parameters, is trained in "
        "all rows.\n",
    ]


def _limits(outcomes: Outcomes, settings: Settings) -> list[str]:
    count = len(settings.labels)
    # In percent, half of the 95 % interval of an accuracy of 90 %, by the normal approximation.
    half = 196 * (0.9 * 0.1 / count) ** 0.5
    return [
        "## What this shows, and what it does not\n",
        "- The base has two layers, and the sentences come from one small grammar. With a large "
        "model and real text, the rows may rank differently. The paper's tables 5 and 6 are for "
        "GPT-3 with 175 billion parameters, on WikiSQL and MultiNLI.",
        f"- Training ends after {settings.epochs:g} passes, while the rows still differ: the "
        "figures show how fast a row learns as much as how well it does in the end.",
        f"- {_about_rates(outcomes, settings.rates)}",
        "- The intervals cover the seeds only: new weights, the order of the data, and dropout. "
        "They say nothing about another base or other sentences. The sampling error alone, for an "
        f"accuracy of 90 % on {count} sentences, is ±{half:.1f}. All rows share it, because they "
        "are tested on the same sentences.",
        f"- Among {len(outcomes)} rows, some look better or worse than they are by chance.",
    ]


def _about_rates(outcomes: Outcomes, rates: Sequence[float]) -> str:
    if len(rates) == 1:
        return (
            "One learning rate for all favors the rows whose scaling it suits: with one alpha, "
            "r = 1 has 64 times the scaling of r = 64, and rsLoRA and LoRA+ take larger steps."
        )
    ends = {min(rates), max(rates)}
    rows = {row.key: row for question in QUESTIONS for row in question.rows}
    at_ends = [str(row) for key, row in rows.items() if outcomes[key].learning_rate in ends]
    return (
        "Each learning rate was chosen from a few, with one run each, and may not be the best. "
        "Rows with the largest or the smallest rate, where a better one may lie beyond it: "
        f"{'; '.join(at_ends) or 'none'}."
    )


def draw(outcomes: Outcomes) -> Figure:
    """Draws one panel per question: means with their intervals, and a line for the head alone."""
    figure = import_figure()(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, len(QUESTIONS))
    for panel, question in zip(panels, QUESTIONS, strict=True):
        panel.set_title(question.title, fontsize="medium")
        head = outcomes[HEAD_ALONE.key].mean
        line = {"color": "gray", "linestyle": "--", "linewidth": 1}
        if question.over_rank:
            panel.axhline(head, label=HEAD_ALONE.name, **line)
            _draw_curves(panel, question.rows, outcomes)
        else:
            panel.axvline(head, label=HEAD_ALONE.name, **line)
            _draw_points(panel, question.rows, outcomes)
        panel.grid(alpha=0.3)
    entries = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    # Below the panels, where it hides nothing.
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(entries))
    return figure


def _draw_points(panel: Axes, rows: Sequence[Row], outcomes: Outcomes) -> None:
    """Draws each row of the table on a line of its own, from top to bottom."""
    found = [outcomes[row.key] for row in rows]
    places = range(len(rows))
    panel.errorbar(
        [outcome.mean for outcome in found],
        places,
        xerr=[outcome.half for outcome in found],
        fmt="o",
        capsize=3,
    )
    is_one_rank = len({row.rank for row in rows}) == 1  # then the title has it
    names = [row.name if is_one_rank else str(row) for row in rows]
    panel.set_yticks(places, names)
    panel.invert_yaxis()
    panel.set_xlabel("accuracy, %")


def _draw_curves(panel: Axes, rows: Sequence[Row], outcomes: Outcomes) -> None:
    """Draws a curve for the rows of each name, shifted so that no interval hides another."""
    names = list(dict.fromkeys(row.name for row in rows))
    for number, name in enumerate(names):
        own = [row for row in rows if row.name == name]
        found = [outcomes[row.key] for row in own]
        aside = 2 ** (0.12 * (number - (len(names) - 1) / 2))
        panel.errorbar(
            [row.rank * aside for row in own],
            [outcome.mean for outcome in found],
            yerr=[outcome.half for outcome in found],
            fmt="o-",
            capsize=3,
            label=name,
        )
    ranks = sorted({row.rank for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ranks, [str(rank) for rank in ranks])
    panel.set_xlabel("rank r")
    panel.set_ylabel("accuracy, %")


def write_report(out: Path, outcomes: Outcomes, settings: Settings) -> None:
    """Writes tables and picture into a folder."""
    atomic_write_text(out / TABLE_NAME, report(outcomes, settings))
    save_figure(draw(outcomes), out / PICTURE_NAME)
