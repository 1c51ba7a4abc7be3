"""Computes confidence intervals of means over seeds."""

import math
import statistics
from collections.abc import Sequence

from scipy import stats

CONFIDENCE = 0.95


def half_width(values: Sequence[float]) -> float:
    """Returns half the width of the confidence interval of the mean of two or more values.

    The interval is by Student's t.
    """
    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * error)
