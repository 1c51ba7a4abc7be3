"""Small things around the Trainer: seeds, names of checkpoints, what an evaluation hands over."""

import os
import random
import re
import time
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


class TrainingError(RuntimeError):
    """A run that cannot go on. The message is one line."""


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
    """What `compute_metrics` is given: logits and labels of the whole set, in its order."""

    predictions: np.ndarray
    label_ids: np.ndarray


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns."""

    predictions: np.ndarray
    label_ids: np.ndarray | None
    metrics: dict[str, float]


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


def set_seed(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The state of all generators that `set_seed` seeds, in a form that loads weights-only."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": (version, list(internal), gauss_next),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts the generators where `rng_state` found them."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


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


def get_last_checkpoint(folder: str | os.PathLike) -> str | None:
    """The checkpoint of the latest step in `folder`, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def speed_metrics(split: str, start: float, num_samples: int | None = None) -> dict[str, float]:
    """``<split>_runtime`` in seconds since `start` and ``<split>_samples_per_second``."""
    runtime = time.time() - start
    metrics = {f"{split}_runtime": round(runtime, 4)}
    if num_samples is not None:
        metrics[f"{split}_samples_per_second"] = round(num_samples / max(runtime, 1e-9), 3)
    return metrics
