"""Small things around the Trainer: names of checkpoints, what an evaluation returns, results."""

import json
import os
import re
import time
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loralib.io.atomic import atomic_write
from loralib.io.likeness import check_like

from .utils import logging

logger = logging.get_logger(__name__)

# Metrics in bytes, which people read in a larger unit.
_IN_BYTES = ("_mem_cpu_peak", "_mem_gpu_peak")

PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


class IntervalStrategy(str, Enum):
    """When to log, evaluate or save."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


EvaluationStrategy = IntervalStrategy


class SchedulerType(str, Enum):
    """Names of the learning-rate schedules."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"


class EvalPrediction(NamedTuple):
    """What `compute_metrics` is given: predictions and labels of the full set, in its order.

    One array each; a tuple of them where the model returns several, or where there are several
    kinds of labels. Where batches differ in length, rows are filled up with -100.
    """

    predictions: np.ndarray | tuple[np.ndarray, ...]
    label_ids: np.ndarray | tuple[np.ndarray, ...]


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns: as `EvalPrediction`, None for what there is not."""

    predictions: np.ndarray | tuple[np.ndarray, ...] | None
    label_ids: np.ndarray | tuple[np.ndarray, ...] | None
    metrics: dict[str, float]


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


def list_checkpoints(folder: str | os.PathLike) -> list[str]:
    """Paths of the ``checkpoint-<step>`` folders within `folder`, by step."""
    if not os.path.isdir(folder):
        return []
    found = [name for name in os.listdir(folder) if _CHECKPOINT.match(name)]
    found = [name for name in found if os.path.isdir(os.path.join(folder, name))]
    return [os.path.join(folder, name) for name in sorted(found, key=checkpoint_step)]


def checkpoint_step(path: str) -> int:
    """The step in a checkpoint folder's name."""
    return int(_CHECKPOINT.match(os.path.basename(path))[1])


def get_last_checkpoint(
    folder: str | os.PathLike, but: Collection[str] = frozenset()
) -> str | None:
    """The checkpoint of the latest step in `folder`, without those of the names `but`; or None."""
    found = reversed(list_checkpoints(folder))
    return next((path for path in found if os.path.basename(path) not in but), None)


def speed_metrics(split: str, start: float, num_samples: int | None = None) -> dict[str, float]:
    """``<split>_runtime`` in seconds since `start` and ``<split>_samples_per_second``."""
    seconds = max(time.time() - start, 1e-9)  # clocks have ticks, and may be set back
    speed = {} if num_samples is None else {"samples_per_second": round(num_samples / seconds, 3)}
    return {f"{split}_{name}": v for name, v in {"runtime": round(seconds, 4), **speed}.items()}


def log_metrics(split: str, metrics: dict[str, float]) -> None:
    """Logs metrics, one a line."""
    logger.info("***** %s metrics *****", split)
    for name in sorted(metrics):
        value = metrics[name]
        shown = f"{value / 2**20:,.1f} MiB" if name.endswith(_IN_BYTES) else value
        logger.info("  %s = %s", name, shown)


def save_metrics(folder: str | os.PathLike, split: str, metrics: dict[str, float]) -> None:
    """Writes ``<split>_results.json``, and adds to ``all_results.json``."""
    everything = Path(folder, "all_results.json")
    # Training comes first in a run: what was there before is of another one.
    begins = split == "train" or not everything.is_file()
    so_far = {} if begins else _read_results(everything)
    for path, values in (
        (Path(folder, f"{split}_results.json"), metrics),
        (everything, {**so_far, **metrics}),
    ):
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(values, indent=4, sort_keys=True) + "\n")


def _read_results(path: Path) -> dict[str, float]:
    """What ``all_results.json`` holds; nothing, and a warning, where it is damaged."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        check_like(results, {})
        return results
    except ValueError as error:
        logger.warning("%s: is damaged (%s), and is replaced", path, error)
        return {}
