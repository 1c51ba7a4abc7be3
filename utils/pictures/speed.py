"""Draws how much longer the fastest peer takes than this project.

The figures, the machine and the days of the measurements are read from the tables in
benchmarks/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from loralib.io.pictures import import_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

README = Path(__file__).resolve().parents[2] / "benchmarks" / "README.md"
PRECISIONS = {"float32": "#6b7f95", "bfloat16": "#c2650c"}
"""The precisions that are compared, with the colors of their bars."""


@dataclass(frozen=True)
class Work:
    """A kind of work that is timed.

    Args:
        section: its section in benchmarks/README.md.
        name: its name in the picture.
        peer: the contestant that this project is compared with; if it has several rows in a
            precision, the fastest counts.
    """

    section: str
    name: str
    peer: str


WORKS = (
    Work("A LoRA step of RoBERTa-base", "LoRA training step,\nRoBERTa-base\n(PEFT)", "PEFT"),
    Work(
        "A LoRA step of DeBERTa-v2 in base shape",
        "LoRA training step,\nDeBERTa-v2, base shape\n(PEFT)",
        "PEFT",
    ),
    Work("A LoRA step of GPT-2 small", "LoRA training step,\nGPT-2 small\n(PEFT)", "PEFT"),
    Work(
        "Beam search of GPT-2 small",
        "beam search, 10 beams,\nGPT-2 small\n(Transformers' generate)",
        "generate, distinct prompts",
    ),
)


@dataclass(frozen=True)
class Speeds:
    """The figures of the tables.

    Args:
        ratios: the fastest peer's time divided by this project's, by name of work and precision.
        machine: the machine that they were measured on.
        days: the days on which they were measured.
    """

    ratios: Mapping[str, Mapping[str, float]]
    machine: str
    days: Sequence[str]

    def as_text(self) -> str:
        """Returns all figures as JSON, to be stored in the picture."""
        return json.dumps({"ratios": self.ratios, "machine": self.machine, "days": self.days})


def read_speeds(page: str) -> Speeds:
    """Reads the figures.

    Args:
        page: the text of benchmarks/README.md.

    Raises:
        ValueError: a section, its table, a peer, the machine or a day is missing.
    """
    ratios, days = {}, []
    for work in WORKS:
        figures = _figures(page, work.section)
        ratios[work.name] = {
            precision: _fastest(figures, work, precision) for precision in PRECISIONS
        }
        days.append(_found(r"(\d{1,2} [A-Z][a-z]+ \d{4})", figures, f"{work.section}: a day"))
    first = _figures(page, WORKS[0].section)
    machine = _found(r"On (\d+ cores of .+?), \d", first, f"{WORKS[0].section}: the machine")
    in_order = sorted(set(days), key=lambda day: datetime.strptime(day, "%d %B %Y"))
    return Speeds(ratios, machine, in_order)


def _figures(page: str, section: str) -> str:
    """Returns the text under "Figures" in a section."""
    return _found(
        rf"^## {re.escape(section)}\n(?:(?!^## ).*\n)*?### Figures\n((?:(?!^##).*(?:\n|\Z))+)",
        page,
        f"the section '{section}' with its figures",
    )


def _found(pattern: str, text: str, what: str) -> str:
    """Returns the pattern's group in the text.

    Raises:
        ValueError: there is no match.
    """
    match = re.search(pattern, text, re.M)
    if not match:
        raise ValueError(f"{README}: {what} is not found")
    return match[1]


def _fastest(figures: str, work: Work, precision: str) -> float:
    lines = [line.strip("| ") for line in figures.splitlines() if line.startswith("|")]
    titles, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    found = [dict(zip(titles, row, strict=False)) for row in rows]
    ratios = [
        float(row["times ours"])
        for row in found
        if row["contestant"] == work.peer and row["precision"].split()[0] == precision
    ]
    if not ratios:
        raise ValueError(f"{README}: {work.section}: no row of '{work.peer}' in {precision}")
    return min(ratios)


def draw(speeds: Speeds) -> Figure:
    """Draws a group of bars for each work, with one bar per precision."""
    figure = import_figure()(figsize=(7.6, 4.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    panel = figure.subplots()
    height = 0.36
    for number, (precision, color) in enumerate(PRECISIONS.items()):
        places = [place + (number - 0.5) * height for place in range(len(speeds.ratios))]
        values = [of_work[precision] for of_work in speeds.ratios.values()]
        bars = panel.barh(places, values, height * 0.92, color=color, label=precision)
        panel.bar_label(
            bars, [f"{value:.2f}\N{MULTIPLICATION SIGN}" for value in values], padding=4
        )
    panel.axvline(1, color="#1f2328", linewidth=1.5)
    panel.text(1, -0.62, "this project", ha="center", va="bottom", fontweight="bold")
    panel.set_yticks(range(len(speeds.ratios)), speeds.ratios.keys())
    panel.tick_params("y", length=0)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.12 * max(max(of_work.values()) for of_work in speeds.ratios.values()))
    panel.set_xlabel("the fastest peer's time, divided by this project's")
    panel.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=len(PRECISIONS), frameon=False)
    measured = f"measured on {speeds.machine}, {' and '.join(speeds.days)}"
    figure.supxlabel(measured, fontsize="small", color="#59636e")
    return figure
