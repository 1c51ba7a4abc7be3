"""Writes the results of the study: Markdown tables, and a picture."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loralib.io.atomic import atomic_write_text
from loralib.io.pictures import import_figure, save_figure
from reproduction.ablation_rows import ALPHA, HEAD_ALONE
from reproduction.study_data import TASKS, StudyTask
from reproduction.study_gpt2 import EPOCHS as GPT2_EPOCHS
from reproduction.study_gpt2 import Gpt2Results
from reproduction.study_rows import (
    BY_RANK,
    LORA,
    METHODS,
    PROJECTIONS,
    WEIGHTS_TASK,
    Method,
)
from reproduction.study_runs import EPOCHS, Results
from reproduction.tables import CONFIDENCE, half_width, markdown_table, with_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLE_NAME, PICTURE_NAME = "study.md", "study.png"
COMMANDS = """\
python utils/download_glue_data.py --data_dir glue_data --tasks SST,CoLA,RTE,STS
bash NLG/download_data.sh
python utils/reproduce.py --study"""
MIB = 2**20
USED = ("seconds", "memory, MiB")


@dataclass(frozen=True)
class Outcome:
    """A method's results on a task.

    Args:
        learning_rate: the learning rate of all runs.
        at_end: whether it is the largest or the smallest of those it was chosen from.
        runs: the results of the runs, one per seed.
    """

    learning_rate: float
    at_end: bool
    runs: Sequence[Results]

    @property
    def scores(self) -> list[float]:
        """Each seed's score, in percent."""
        return [100 * run.score for run in self.runs]

    @property
    def mean(self) -> float:
        """The mean of the scores."""
        return statistics.mean(self.scores)

    @property
    def half(self) -> float:
        """Half the width of the mean's confidence interval; 0 with one seed."""
        return half_width(self.scores) if len(self.runs) > 1 else 0.0

    @property
    def seconds(self) -> float:
        """The mean CPU time of one training."""
        return statistics.mean(run.seconds for run in self.runs)

    @property
    def cell(self) -> str:
        """The cell in a table of scores."""
        return with_interval(self.scores)


Outcomes = Mapping[tuple[str, str], Outcome]
"""Finished outcomes, by task and method."""


@dataclass(frozen=True)
class Gpt2Outcome:
    """A method's results on E2E.

    Args:
        learning_rate: the learning rate of all runs.
        runs: the results of the runs, one per seed.
    """

    learning_rate: float
    runs: Sequence[Gpt2Results]


@dataclass(frozen=True)
class Settings:
    """How the results were made.

    Args:
        seeds: the seeds of the runs.
        labels: the labels of each task's development set, by task.
        words: the number of words in the corpus.
        made: the machine and the date.
    """

    seeds: Sequence[int]
    labels: Mapping[str, Sequence[str]]
    words: int
    made: str


def report(outcomes: Outcomes, gpt2: Mapping[str, Gpt2Outcome], settings: Settings) -> str:
    """Returns all tables, with text on how they were made and what they mean."""
    task = next(task for task in TASKS if task.name == WEIGHTS_TASK)
    lines = [
        "# A study on a small scale\n",
        f"<!-- not run: trains for hours -->\n```bash\n{COMMANDS}\n```\n",
        *_introduction(settings),
        f"![scores by trained parameters]({PICTURE_NAME})\n",
        "## Four tasks\n",
        *four_tasks(outcomes, settings),
        "### Learning rates chosen\n",
        *chosen_rates(outcomes),
        f"## Which projections ({task.title}, as in the paper's table 5)\n",
        *one_task(task, PROJECTIONS, outcomes),
        f"## Which rank ({task.title}, as in the paper's table 6)\n",
        *one_task(task, BY_RANK, outcomes),
        "## GPT-2 on E2E\n",
        *gpt2_table(gpt2),
        *_limits(outcomes, settings),
    ]
    return "\n".join(lines)


def _introduction(settings: Settings) -> list[str]:
    rows = ", ".join(f"{task.train_rows:,} rows of {task.title}" for task in TASKS)
    return [
        "The script pretrains an encoder of 5.7 million parameters (RoBERTa with two layers of "
        "width 384) with `run_mlm.py`, and a GPT-2 of 7.4 million (`gpt2.xs`) with `gpt2_ft.py`. "
        f"Both are pretrained on {settings.words:,} words: the sentences of the four training sets "
        "and of the development sets of DART and WebNLG, without any text that is used for "
        "measuring. Then it adapts them. The tasks use random parts of their training sets: "
        f"{rows}. GPT-2 is trained on E2E's validation set and writes texts for its test set.\n",
        f"A run makes {EPOCHS} passes on GLUE and {GPT2_EPOCHS} on E2E. A method's learning "
        "rate is the one of a few with the lowest loss on a fifth of the task's training set, "
        "after one pass over the rest. A run's final model is measured on the development "
        f"set. Figures are means over {len(settings.seeds)} seeds, ± half of the {CONFIDENCE:.0%} "
        f"confidence interval (Student's t). LoRA's alpha is {ALPHA} throughout. The task's head "
        "is newly initialized and trained in all rows; it is not counted among the trained "
        "parameters. Seconds are CPU time on one core for one run; the first table adds up the "
        "four tasks. Memory is the process's peak, including Python and PyTorch. Measured on: "
        f"{settings.made}.\n",
    ]


def _limits(outcomes: Outcomes, settings: Settings) -> list[str]:
    at_ends = sum(outcome.at_end for outcome in outcomes.values())
    return [
        "## What this shows, and what it does not\n",
        f"- These bases have seen {settings.words:,} words; RoBERTa has seen 160 GB of text. How "
        "well a small change to the weights does depends on what the base already knows, so the "
        "methods may rank differently with bases like RoBERTa, which the paper used.",
        f"- {EPOCHS} passes over few rows end before a method has learned all it can: the figures "
        "show how fast it learns as much as how well it does in the end.",
        f"- Each learning rate was chosen from a few, with one run each. For {at_ends} of "
        f"{len(outcomes)} pairs of task and method it is the largest or the smallest (marked by an "
        "asterisk): a better one may lie beyond it. In SST-2, phrases of one sentence are in both "
        "of the parts that the choice is made with.",
        "- The intervals cover the seeds only: new weights, the order of the data, and dropout. "
        "They say nothing about another base, or other texts of the same task.",
        f"- Among {len(outcomes)} figures, some look better or worse than they are by chance.",
        "",
    ]


def four_tasks(outcomes: Outcomes, settings: Settings) -> list[str]:
    """Returns the table of methods on all tasks; its first row is the most frequent label."""
    header = ["", "trained", *(f"{task.title}, {task.metric_title}" for task in TASKS)]
    header += ["mean", *USED]
    rows = [["the most frequent label", "-", *(_majority(t, settings) for t in TASKS), *"---"]]
    for method in METHODS:
        found = [outcomes.get((task.name, method.name)) for task in TASKS]
        done = [outcome for outcome in found if outcome is not None]
        if not done:
            continue
        cells = ["not run" if outcome is None else outcome.cell for outcome in found]
        complete = len(done) == len(TASKS)
        mean = f"{statistics.mean(o.mean for o in done):.1f}" if complete else "-"
        seconds = f"{sum(o.seconds for o in done):.0f}" if complete else "-"
        memory = max(run.memory for outcome in done for run in outcome.runs) / MIB
        trained = f"{done[0].runs[0].parameters:,}"
        rows.append([method.name, trained, *cells, mean, seconds, f"{memory:,.0f}"])
    return markdown_table(header, rows)


def _majority(task: StudyTask, settings: Settings) -> str:
    if task.metric != "accuracy":
        return "0"
    labels = Counter(settings.labels[task.name])
    return f"{100 * max(labels.values()) / labels.total():.1f}"


def chosen_rates(outcomes: Outcomes) -> list[str]:
    """Returns the table of learning rates; the largest and the smallest tried are marked."""
    rows = []
    for method in METHODS:
        found = [outcomes.get((task.name, method.name)) for task in TASKS]
        if any(found):
            cells = [f"{o.learning_rate:g}{'*' * o.at_end}" if o else "-" for o in found]
            rows.append([method.name, *cells])
    legend = "\\* The largest or the smallest rate tried: a better one may lie beyond it.\n"
    return [*markdown_table(["", *(task.title for task in TASKS)], rows), legend]


def one_task(task: StudyTask, methods: Sequence[Method], outcomes: Outcomes) -> list[str]:
    """Returns a table of some methods on one task."""
    rows = [
        [
            *(method.name, f"{found.runs[0].parameters:,}", found.cell),
            *(f"{found.learning_rate:g}{'*' * found.at_end}", f"{found.seconds:.0f}"),
        ]
        for method in methods
        if (found := outcomes.get((task.name, method.name))) is not None
    ]
    header = ["", "trained", f"{task.metric_title}, %", "learning rate", "seconds"]
    return markdown_table(header, rows)


def gpt2_table(outcomes: Mapping[str, Gpt2Outcome]) -> list[str]:
    """Returns the table of GPT-2's results on E2E; losses are per token, in nats."""
    if not outcomes:
        return ["Not run.\n"]
    first, *others = [run.scores for found in outcomes.values() for run in found.runs]
    # Some need Java, and a study may have been continued without it.
    scores = [name for name in first if all(name in their for their in others)]
    rows = [
        [
            name,
            f"{found.runs[0].parameters:,}",
            *(with_interval([run.scores[score] for run in found.runs], 3) for score in scores),
            with_interval([run.loss for run in found.runs], 3),
            f"{found.learning_rate:g}",
            f"{statistics.mean(run.seconds for run in found.runs):.0f}",
            f"{max(run.memory for run in found.runs) / MIB:,.0f}",
        ]
        for name, found in outcomes.items()
    ]
    return markdown_table(["", "trained", *scores, "test loss", "learning rate", *USED], rows)


def draw(outcomes: Outcomes) -> Figure:
    """Draws one panel per task: scores by trained parameters, with LoRA's ranks as a curve."""
    figure = import_figure()(figsize=(11, 7), layout="constrained")
    for panel, task in zip(figure.subplots(len(TASKS) // 2, 2).ravel(), TASKS, strict=True):
        _draw_task(panel, task, outcomes)
    panel_entries = figure.axes[0].get_legend_handles_labels()
    figure.legend(*panel_entries, loc="outside lower center", ncols=3)
    return figure


def _draw_task(panel: Axes, task: StudyTask, outcomes: Outcomes) -> None:
    panel.set_title(task.title)
    panel.set_xscale("log")
    panel.set_xlabel("trained parameters, without the head")
    panel.set_ylabel(f"{task.metric_title}, %")
    panel.grid(alpha=0.3)
    ranks = {method.name for method in LORA.values()}
    curve = [o for name in ranks if (o := outcomes.get((task.name, name)))]
    curve.sort(key=lambda outcome: outcome.runs[0].parameters)
    if curve:
        _draw_points(panel, curve, "o-", "LoRA, query + value, r = 1 to 64")
    for method in METHODS:
        found = outcomes.get((task.name, method.name))
        if found is None or method.name in ranks:
            continue
        if method.row == HEAD_ALONE:
            panel.axhline(found.mean, color="gray", linestyle="--", label=method.name)
        else:
            _draw_points(panel, [found], "s", method.name)


def _draw_points(panel: Axes, found: Sequence[Outcome], style: str, label: str) -> None:
    panel.errorbar(
        [outcome.runs[0].parameters for outcome in found],
        [outcome.mean for outcome in found],
        yerr=[outcome.half for outcome in found],
        fmt=style,
        capsize=3,
        label=label,
    )


def write_report(out: Path, text: str, outcomes: Outcomes) -> None:
    """Writes tables and picture into a folder."""
    atomic_write_text(out / TABLE_NAME, text)
    save_figure(draw(outcomes), out / PICTURE_NAME)
