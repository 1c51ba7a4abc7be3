"""Writes a run's metrics: ``metrics.jsonl``, TensorBoard's files, and learning curves."""

import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any
from weakref import finalize

from json_lines import write_json_lines
from loralib.io.atomic import naming_file
from loralib.text import counted
from loralib.training.curves import HOW_TO_GET_IT, Place, is_matplotlib_available, write_curves
from loralib.training.reports import (
    TENSORBOARD_FILE,
    check_installed,
    check_none_is_alone,
    is_installed,
)

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
# The panel and the label of each metric in the learning curves.
_PLACES = {
    "loss": Place("loss", "training"),
    "valid_loss": Place("loss", "validation"),
    "lr": Place("learning rate", "learning rate"),
    "valid_ppl": Place("perplexity", "validation"),
    "best_ppl": Place("perplexity", "the best so far"),
}
REPORTERS = ("tensorboard", "plot")


def check_report_to(asked: Collection[str]) -> None:
    """Checks the values of ``--report_to``.

    Raises:
        ValueError: "none" is given with others, or "tensorboard" but it is not installed.
    """
    check_none_is_alone(asked)
    if "tensorboard" in asked:
        check_installed("tensorboard")


class MetricsLog:
    """Writes a run's metrics to ``metrics.jsonl``, and wherever else ``--report_to`` says.

    Lines of steps after the one that the run resumes from are removed. A killed run left them.

    Args:
        work_dir: the run's folder.
        after_step: the step that the run resumes from; 0 starts a new log.
        is_main: whether this is the process that writes; in others, nothing happens.
        report_to: names in `REPORTERS`, or "all", or "none". Reporters that are not installed are
            left out. See `check_report_to`.
    """

    def __init__(
        self,
        work_dir: str | os.PathLike,
        after_step: int,
        is_main: bool = True,
        report_to: Collection[str] = ("all",),
    ):
        self.path = Path(work_dir, METRICS_NAME)
        self.is_main = is_main
        self._after_step = after_step
        asked = {*report_to}
        self._has_tensorboard = bool(asked & {"tensorboard", "all"}) and is_installed("tensorboard")
        self._draws = bool(asked & {"plot", "all"})
        self._writer = None
        if not is_main:
            return
        if self._draws and not is_matplotlib_available():
            level = logging.WARNING if "plot" in asked else logging.INFO
            logger.log(level, HOW_TO_GET_IT)
            self._draws = False
        kept = []
        if after_step > 0 and self.path.is_file():
            kept = [row for row in _sound_lines(self.path) if row["step"] <= after_step]
        write_json_lines(self.path, kept)

    def write(self, step: int, **figures: float) -> None:
        """Adds a line with the metrics of a step."""
        if not self.is_main:
            return
        with naming_file(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self._has_tensorboard:
            with naming_file(self.path.with_name("runs") / TENSORBOARD_FILE):
                self._show(step, figures)

    def sync(self) -> None:
        """Syncs the log, so that what it holds so far survives a power cut."""
        if self.is_main:
            with naming_file(self.path), open(self.path, "a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def draw(self) -> Path | None:
        """Writes ``learning_curves.png`` of the whole run, if that is asked for.

        Returns:
            The picture's path; None if there is no picture.
        """
        if not self.is_main or not self._draws:
            return None
        return write_curves(self.path.parent, _sound_lines(self.path), _PLACES.get)

    def _show(self, step: int, figures: dict[str, float]) -> None:
        """Adds metrics to TensorBoard's file; the first call opens it, which takes seconds."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.path.with_name("runs")
            self._writer = SummaryWriter(folder, purge_step=self._after_step + 1)
            # Ends the writer's thread once this log is gone.
            finalize(self, self._writer.close).atexit = False
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def _sound_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file's lines, except those that a kill or a power cut has damaged."""
    rows, damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            row["step"] + 0  # `write` puts a number there in every line
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            damaged += 1
    if damaged:
        logger.warning("%s: left out %s", path, counted(damaged, "damaged line"))
    return rows
