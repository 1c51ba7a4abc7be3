"""Writes a Markdown table of the results next to the paper's, and draws the learning curves."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from loralib.io.atomic import atomic_write_text
from loralib.io.pictures import save_figure
from reproduction.plan import Row
from reproduction.runs import Run, Tree, problem_of, run_of
from reproduction.tables import CONFIDENCE, half_width, markdown_table

RESULTS_NAME, PICTURE_NAME = "results.md", "learning_curves.png"


def median_with_interval(values: Sequence[float]) -> str:
    """Formats the median and, for two or more values, half of their mean's confidence interval."""
    text = f"{statistics.median(values):.1f}"
    return text if len(values) == 1 else f"{text}±{half_width(values):.1f}"


class Cell:
    """A recipe with all its runs.

    Args:
        tree: the tree that the recipe is in.
        runs: the recipe's runs that are asked for or exist; at least one.
    """

    def __init__(self, tree: Tree, runs: Sequence[Run]):
        self.runs = runs
        self.done = [run for run in runs if tree.figures(run) is not None]
        self.figures = [tree.figures(run) for run in self.done]
        self.problems = {run: problem_of(tree, run) for run in runs if run not in self.done}

    @property
    def result(self) -> str:
        """The medians with their intervals, or why there are none."""
        if self.figures:
            return "/".join(map(median_with_interval, zip(*self.figures, strict=True)))
        words = ("failed", "unfinished", "not run")
        return next(w for w in words if any(p.startswith(w) for p in self.problems.values()))

    @property
    def median(self) -> float | None:
        """The median of the first figure; None without a finished run."""
        return statistics.median(first for first, *_ in self.figures) if self.figures else None

    @property
    def each(self) -> str:
        """The figures of each finished run."""
        return ", ".join(
            f"{run.seed}: {'/'.join(f'{value:.1f}' for value in figures)}"
            for run, figures in zip(self.done, self.figures, strict=True)
        )

    def notes(self) -> list[str]:
        """Returns lines about the runs without figures; one line if all have the same problem."""
        problems = set(self.problems.values())
        if len(problems) == 1 and not self.done:
            return [problems.pop()]
        return [f"seed {run.seed}: {problem}" for run, problem in self.problems.items()]


def cells_of(row: Row, out: Path, asked: Sequence[Run]) -> dict[str, Cell]:
    """Returns a row's cells by column."""
    cells = {}
    for column, recipe in row.recipes.items():
        there = [path.name.removeprefix("seed") for path in (out / recipe).glob("seed*")]
        seeds = {int(seed) for seed in there if seed.isdecimal()}
        seeds |= {run.seed for run in asked if run.recipe == recipe}
        runs = [run_of(out, recipe, seed) for seed in sorted(seeds or row.tree.seeds[:1])]
        cells[column] = Cell(row.tree, runs)
    return cells


def report_row(row: Row, cells: Mapping[str, Cell]) -> list[str]:
    """Returns the lines of a row: its table, and notes on it."""
    tree = row.tree
    header = ["", "measure", "paper", "here", "runs", "each seed", "parameters trained"]
    rows: list[list[str]] = []
    notes: dict[str, list[str]] = {}
    scores = []
    for column, cell in cells.items():
        trained = tree.trained(cell.done[0]) if cell.done else ""
        paper = str(row.paper.get(column, ""))
        counts = f"{len(cell.done)} of {len(cell.runs)}" if cell.done else ""
        columns = (tree.columns[column], tree.measure(column), paper, cell.result)
        rows.append([*columns, counts, cell.each, trained])
        for note in cell.notes():
            notes.setdefault(note, []).append(tree.columns[column])
        scores += _other_scores(tree, tree.columns[column], cell)
    if "avg" in row.paper:
        medians = [cell.median for cell in cells.values()]
        here = "not all run" if None in medians else f"{statistics.mean(medians):.1f}"
        rows.append(["average", "of the first figures", str(row.paper["avg"]), here, "", "", ""])
    lines = [f"## {row.name}: {tree.title}\n", *markdown_table(header, rows)]
    if "params" in row.paper:
        lines.append(f"- parameters trained, in the paper: {row.paper['params']}")
    lines += [f"- {', '.join(names)}: {note}" for note, names in notes.items()]
    return [*lines, *scores, ""]


def _other_scores(tree: Tree, name: str, cell: Cell) -> list[str]:
    runs = [tree.other_scores(run) for run in cell.done]
    in_all = [key for key in runs[0] if all(key in scores for scores in runs)] if runs else []
    if not in_all:
        return []
    medians = {key: statistics.median(scores[key] for scores in runs) for key in in_all}
    listed = ", ".join(f"{key} {median:.4g}" for key, median in medians.items())
    return [f"- {name}, medians of the other scores: {listed}"]


def report(
    rows: Sequence[Row], cells: Mapping[str, Mapping[str, Cell]], settings: Mapping[str, Any]
) -> str:
    """Returns all tables as Markdown, with text on what the figures mean."""
    lines = ["# Reproduction\n"]
    if settings["small"]:
        lines.append(
            "**A trial**: a small base, a sample of small data and a few steps. It shows that "
            "everything runs, and its figures mean nothing.\n"
        )
    lines.append(
        "Here: the median over the finished runs; on GLUE, each at its evaluation that was best on "
        "the development set (by the first of two figures), on the other corpora after the last "
        "epoch. "
        f"± is half the width of the {CONFIDENCE:.0%} confidence interval of the runs' mean "
        "(Student's t). Paper: as printed there.\n"
    )
    if settings.get("environment"):
        given = " ".join(f"{name}={value}" for name, value in settings["environment"].items())
        lines.append(f"In the environment: `{given}`.\n")
    if settings["flags"]:
        lines.append(f"Flags after the recipes' own: `{' '.join(settings['flags'])}`.\n")
    for row in rows:
        lines += report_row(row, cells[row.name])
    lines.append(f"![learning curves]({PICTURE_NAME})")
    return "\n".join(lines) + "\n"


def draw(tree_runs: Mapping[str, tuple[Tree, list[Run]]]) -> Figure:
    """Draws the learning curves: one panel per recipe, one line per seed.

    Args:
        tree_runs: the tree and the runs of each recipe.
    """
    across = min(3, max(len(tree_runs), 1))
    down = max(math.ceil(len(tree_runs) / across), 1)
    figure = Figure(figsize=(4.5 * across, 3.5 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel in panels[len(tree_runs) :]:
        panel.set_axis_off()
    for panel, (recipe, (tree, runs)) in zip(panels, tree_runs.items(), strict=False):
        panel.set_title(recipe)
        across_label, up_label = tree.curve_axes(runs[0])
        panel.set_xlabel(across_label)
        panel.set_ylabel(up_label)
        for run in runs:
            panel.plot(*tree.curve(run), marker=".", label=f"seed {run.seed}")
        panel.legend(fontsize="small")
    return figure


def write_report(
    out: Path, rows: Sequence[Row], asked: Sequence[Run], settings: Mapping[str, Any]
) -> str:
    """Writes table and picture; returns the table.

    Args:
        out: the output folder.
        rows: all rows; those appear that have a run that is asked for or exists.
        asked: the runs that are asked for.
        settings: the settings of all runs.
    """
    names = {run.recipe for run in asked}
    rows = [
        row
        for row in rows
        if any(recipe in names or (out / recipe).is_dir() for recipe in row.recipes.values())
    ]
    cells = {row.name: cells_of(row, out, asked) for row in rows}
    text = report(rows, cells, settings)
    atomic_write_text(out / RESULTS_NAME, text)
    begun = {}
    for row in rows:
        for column, cell in cells[row.name].items():
            if runs := [run for run in cell.runs if run.log.is_file()]:
                begun[row.recipes[column]] = (row.tree, runs)
    save_figure(draw(begun), out / PICTURE_NAME, dpi=150)
    return text
