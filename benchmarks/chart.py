"""A benchmark's table as a bar chart: each contestant's time, with this project's as 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loralib.io.pictures import import_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, OTHERS = "#c2650c", "#6b7f95"
# From this quotient of the longest and the shortest bar on, lengths are logarithms.
WIDE = 30


@dataclass(frozen=True)
class Bar:
    """A contestant.

    Args:
        label: its name and precision.
        value: "times ours", the length.
        says: its time, as text.
        is_ours: whether it is this project's.
        group: what it is compared with; the bars of a group are next to each other.
    """

    label: str
    value: float
    says: str
    is_ours: bool
    group: object


def in_order(bars: Sequence[Bar]) -> list[Bar]:
    """Groups as they come; in each the fastest first, which puts the closest peer next to ours."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    return sorted(bars, key=lambda bar: (groups.index(bar.group), bar.value))


def draw(title: str, bars: Sequence[Bar], footer: str) -> Figure:
    """The chart.

    Args:
        title: what was measured.
        bars: at least one.
        footer: on what machine.
    """
    bars = in_order(bars)
    lengths = [bar.value for bar in bars]
    figure = import_figure()(figsize=(10, 1.6 + 0.32 * len(bars)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    panel = figure.subplots()
    for is_ours, name, colour in ((True, "this project", OURS), (False, "others", OTHERS)):
        places = [place for place, bar in enumerate(bars) if bar.is_ours is is_ours]
        if places:
            panel.barh(places, [lengths[place] for place in places], color=colour, label=name)
    panel.axvline(1, color="#1f2328", linewidth=1)
    panel.invert_yaxis()
    if max(lengths) > WIDE * min(lengths):
        panel.set_xscale("log")
    # What the bars are on their left, how long they are on their right: no text meets a bar.
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
