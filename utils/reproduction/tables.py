"""Formats Markdown tables, and computes confidence intervals of means over seeds."""

import math
import statistics
from collections.abc import Sequence

from scipy import stats

CONFIDENCE = 0.95


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, and an empty one."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] + [""]


def with_interval(values: Sequence[float], digits: int = 1) -> str:
    """Formats the mean and, for two or more values, half the width of its confidence interval."""
    text = f"{statistics.mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {half_width(values):.{digits}f}"


def half_width(values: Sequence[float]) -> float:
    """Returns half the width of the confidence interval of the mean of two or more values.

    The interval is by Student's t.
    """
    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * error)
