"""Confidence intervals of means over seeds."""

import math
import statistics
from collections.abc import Sequence

from scipy import stats

CONFIDENCE = 0.95


def half_width(values: Sequence[float]) -> float:
    """Half of the confidence interval of the values' mean (Student's t); of at least two values."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * error)
