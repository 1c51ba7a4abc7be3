"""Draws a run's learning curves as a picture, `learning_curves.png`, next to its records.

matplotlib is optional, and imported only when there is something to draw.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..io.pictures import import_figure, save_figure
from .reports import is_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

CURVES_NAME = "learning_curves.png"
HOW_TO_GET_IT = f"no {CURVES_NAME}: drawing it needs matplotlib (pip install matplotlib)"

_ACROSS = 3  # the most panels in a row
_MARKED = 40  # a line with at most this many points has them marked


class Place(NamedTuple):
    """Where a value of a run's records is drawn: the panel, and the line in it."""

    panel: str
    line: str


def is_matplotlib_available() -> bool:
    """Returns whether matplotlib is installed."""
    return is_installed("matplotlib")


def collect(
    records: Iterable[Mapping[str, Any]], place_of: Callable[[str], Place | None]
) -> dict[str, dict[str, dict[int, float]]]:
    """Collects the lines of a run's records: by panel and line, the values by step.

    If a step has several values, the first counts. A later one is from an evaluation after the run,
    with other weights or on other data.

    Args:
        records: each with its "step".
        place_of: returns where a value of this name is drawn; None for nowhere.
    """
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            place = place_of(name)
            if place is not None and isinstance(value, int | float):
                line = panels.setdefault(place.panel, {}).setdefault(place.line, {})
                line.setdefault(record["step"], value)
    return panels


def write_curves(
    folder: str | os.PathLike,
    records: Iterable[Mapping[str, Any]],
    place_of: Callable[[str], Place | None],
) -> Path | None:
    """Writes the picture of a run's records into its folder; for the main process only.

    If the picture cannot be written, this only warns, because the run has more to write. For the
    arguments see `collect`.

    Returns:
        The picture's path; None if there is nothing to draw, or it could not be written.
    """
    panels = collect(records, place_of)
    if not panels:
        return None
    path = Path(folder, CURVES_NAME)
    try:
        save_figure(_draw(panels), path, dpi=120)
    except (OSError, ValueError) as error:
        logger.warning("%s is not written: %s", path, error)
        return None
    return path


def _draw(panels: Mapping[str, Mapping[str, Mapping[int, float]]]) -> "Figure":
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure = import_figure()(figsize=(4.6 * across, 3.4 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    last = max(step for lines in panels.values() for points in lines.values() for step in points)
    for panel, (title, lines) in zip(axes, panels.items(), strict=False):
        _draw_panel(panel, title, lines)
        panel.set_xlim(0, 1.03 * max(last, 1))
    return figure


def _draw_panel(panel: "Axes", title: str, lines: Mapping[str, Mapping[int, float]]) -> None:
    for name, points in lines.items():
        steps = sorted(points)
        marker = "o" if len(steps) <= _MARKED else None
        panel.plot(steps, [points[step] for step in steps], marker=marker, ms=3.5, label=name)
    panel.set_title(title)
    panel.set_xlabel("step")
    panel.locator_params(axis="x", integer=True)
    panel.ticklabel_format(axis="y", scilimits=(-3, 5), useMathText=True)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1 or title not in lines:
        panel.legend(fontsize="small")
