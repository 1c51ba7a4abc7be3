"""Formats console output: messages, aligned tables, shares and times in words.

Colors are used only on terminals, and only if NO_COLOR is not set (https://no-color.org). PyTorch
is not imported here, because some scripts do not need it.
"""

import logging
import os
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import TextIO

from ..text import counted

# The ANSI codes of the styles in use.
_STYLES = {"bold": 1, "dim": 2, "red": 31, "yellow": 33, "cyan": 36}
_LEVELS = {
    logging.DEBUG: "dim",
    logging.WARNING: "yellow",
    logging.ERROR: "red",
    logging.CRITICAL: "red",
}

Rows = Iterable[tuple[str, str]]
"""Rows of a table: pairs of a name and its value, both as text."""


# ---- colors and tables ----


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a stream is a terminal. Python's streams are None if closed from outside."""
    return stream is not None and stream.isatty()


def has_colors(stream: TextIO | None) -> bool:
    """Returns whether text written to a stream may be colored."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return is_terminal(stream)


def painted(text: str, style: str, stream: TextIO | None) -> str:
    """Styles text as "bold", "dim", "red", "yellow" or "cyan", if the stream has colors."""
    return f"\033[{_STYLES[style]}m{text}\033[0m" if has_colors(stream) else text


def table(*groups: Rows, indent: str = "", width: int = 0, stream: TextIO | None = None) -> str:
    """Formats rows of names and values as a table with aligned values.

    Args:
        groups: groups of rows, separated by empty lines.
        indent: text before each row.
        width: the least width of the names' column.
        stream: the stream that will show the table. Without one the table has no colors.
    """
    listed = [list(group) for group in groups]
    width = max([width, *(len(name) for rows in listed for name, _ in rows)])

    def line(name: str, value: str) -> str:
        padded = name.ljust(width)
        shown = padded if stream is None else painted(padded, "cyan", stream)
        return f"{indent}{shown}  {value}" if value else f"{indent}{shown.rstrip()}"

    return "\n\n".join("\n".join(line(*row) for row in rows) for rows in listed)


# ---- figures in words ----


def share_in_words(part: int, whole: int) -> str:
    """Returns text like "1,000 of 4,000 (25.00 %)"."""
    return f"{part:,} of {whole:,} ({100 * part / max(whole, 1):.2f} %)"


def in_words(seconds: float) -> str:
    """Returns a time like "0.41 s", "3 min 20 s", "5 h 1 min" or "12 d 3 h"."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (unit, size), (smaller, part) in pairwise(units):
        if seconds >= size:
            return f"{seconds // size:,.0f} {unit} {seconds % size // part:.0f} {smaller}"
    return f"{seconds:.3g} s"


def steps_in_words(steps: int, examples: int) -> str:
    """Returns text like "10 of 4 examples each"."""
    return f"{steps:,} of {counted(examples, 'example')}{' each' if steps != 1 else ''}"


def training_in_words(steps: int, resumed_from: int, seconds: float) -> str:
    """Returns text like "10 steps in 4 s" or, of a resumed run, "10 steps, the last 3 in 2 s".

    Args:
        steps: the run's steps, including those before it was interrupted.
        resumed_from: the step that it resumed from, or 0.
        seconds: how long the steps since then took.
    """
    all_steps = counted(steps, "step")
    if not resumed_from:
        return f"{all_steps} in {in_words(seconds)}"
    if resumed_from >= steps:
        return f"{all_steps}, all before this start"
    return f"{all_steps}, the last {steps - resumed_from:,} in {in_words(seconds)}"


def devices_in_words(device: object, processes: int) -> str:
    """Returns text like "cpu" and "cuda, 4 processes". The device is the main process's."""
    kind = str(device).partition(":")[0]
    return str(device) if processes == 1 else f"{kind}, {processes} processes"


class Pace:
    """The speed of a run, and its remaining time. Time spent between steps counts as well.

    Args:
        done: the number of steps done before this run.
        total: the total number of steps.
    """

    def __init__(self, done: int, total: int):
        self._before, self._total, self._begun = done, total, time.perf_counter()

    def at(self, step: int) -> str:
        """Returns text like "12.3 steps/s, 1 min 20 s left", or "" before the run's first step."""
        if step <= self._before:
            return ""
        seconds = max(time.perf_counter() - self._begun, 1e-9)
        speed = (step - self._before) / seconds
        rate = f"{speed:.3g} steps/s" if speed >= 1 else f"{1 / speed:.3g} s a step"
        left = (self._total - step) / speed
        return f"{rate}, {in_words(left)} left" if left > 0 else rate


# ---- messages ----


def say(line: str) -> None:
    """Shows a line on standard error, above any progress bars.

    Text and newline are written in one call, because several processes may write to the same
    stream. If standard error was closed from outside, nothing is shown.
    """
    if sys.stderr is None:
        return  # print would use standard output, which is for the program's results
    tqdm = sys.modules.get("tqdm")  # the only source of progress bars
    if tqdm is not None and getattr(tqdm.tqdm, "_instances", None):
        tqdm.tqdm.write(f"{line}\n", file=sys.stderr, end="")
    else:
        print(f"{line}\n", file=sys.stderr, end="", flush=True)


class ConsoleHandler(logging.Handler):
    """Shows log messages on standard error, above any progress bars.

    Each message has its time. Warnings and above, and debug messages, also have their level. Debug
    messages name their logger.

    Args:
        level: the lowest level of the messages that are shown.

    Attributes:
        warnings: the warnings so far, shown or not, each once, in order.
    """

    def __init__(self, level: int = logging.NOTSET):
        super().__init__(level)
        self.shown_from = level
        self.setLevel(min(level, logging.WARNING))
        self.setFormatter(_Lines())
        self.warnings: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Shows a message, and records it if it is a warning."""
        try:
            if record.levelno == logging.WARNING:
                self.warnings[record.getMessage()] = None
            if record.levelno >= self.shown_from:
                say(self.format(record))
        except Exception:
            self.handleError(record)


class _Lines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def usesTime(self) -> bool:
        """As in `logging.Formatter`."""
        return True

    def formatMessage(self, record: logging.LogRecord) -> str:
        """As in `logging.Formatter`."""
        shown = painted(record.asctime, "dim", sys.stderr)
        if record.levelno >= logging.WARNING or record.levelno <= logging.DEBUG:
            name = f" {record.name}" if record.levelno <= logging.DEBUG else ""
            style = _LEVELS.get(record.levelno, "bold")
            shown += f" {painted(f'{record.levelname}{name}', style, sys.stderr)}:"
        first, *rest = record.message.split("\n")
        head = painted(first, "bold", sys.stderr) if rest else first
        return "\n".join([f"{shown} {head}", *rest])
