"""Draws a benchmark's table as a bar chart of times, relative to this project's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loralib.io.pictures import import_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, OTHERS = "#c2650c", "#6b7f95"
# If the longest bar is more than this many times as long as the shortest, the axis is logarithmic.
WIDE = 30


@dataclass(frozen=True)
class Bar:
    """A contestant's bar.

    Args:
        label: the contestant's name and precision.
        value: its "times ours", which is the bar's length.
        says: its time, as text.
        is_ours: whether the contestant is this project's.
        group: the contestant that it is compared with; bars of a group are next to each other.
    """

    label: str
    value: float
    says: str
    is_ours: bool
    group: object


def in_order(bars: Sequence[Bar]) -> list[Bar]:
    """Sorts bars by group, as groups first occur, and in each by time, the fastest first.

    This puts the closest peer next to this project.
    """
    groups = list(dict.fromkeys(bar.group for bar in bars))
    return sorted(bars, key=lambda bar: (groups.index(bar.group), bar.value))


def draw(title: str, bars: Sequence[Bar], footer: str) -> Figure:
    """Draws the chart.

    Args:
        title: what was measured.
        bars: the bars, at least one.
        footer: the machine that it was measured on.
    """
    bars = in_order(bars)
    lengths = [bar.value for bar in bars]
    figure = import_figure()(figsize=(10, 1.6 + 0.32 * len(bars)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    panel = figure.subplots()
    for is_ours, name, color in ((True, "this project", OURS), (False, "others", OTHERS)):
        places = [place for place, bar in enumerate(bars) if bar.is_ours is is_ours]
        if places:
            panel.barh(places, [lengths[place] for place in places], color=color, label=name)
    panel.axvline(1, color="#1f2328", linewidth=1)
    panel.invert_yaxis()
    if max(lengths) > WIDE * min(lengths):
        panel.set_xscale("log")
    # Labels are on the left of the bars and times on the right, so that no text overlaps a bar.
    for side, texts in (
        (panel, [bar.label for bar in bars]),
        (panel.secondary_yaxis("right"), [bar.says for bar in bars]),
    ):
        side.set_yticks(range(len(bars)), texts, fontsize="small")
        side.tick_params("y", length=0)
        side.spines[:].set_visible(False)
    panel.spines["bottom"].set_visible(True)
    panel.set_xlabel("time, divided by this project's")
    panel.set_title(title, fontsize="medium")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize="small")
    figure.supxlabel(footer, fontsize="x-small", color="#59636e")
    return figure
