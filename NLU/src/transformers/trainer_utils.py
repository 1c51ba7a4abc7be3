"""Helpers of the Trainer: checkpoint names, return types, metrics files, search defaults."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from loralib.errors import TrainingError
from loralib.io.atomic import atomic_write_text
from loralib.io.structure import check_structure
from loralib.training.determinism import set_seed  # noqa: F401 - upstream has it here

from .utils import logging

logger = logging.get_logger(__name__)

PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


class IntervalStrategy(str, Enum):
    """The choices of when to log, evaluate or save."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


EvaluationStrategy = IntervalStrategy


class SchedulerType(str, Enum):
    """The names of the learning-rate schedules."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"


class HPSearchBackend(str, Enum):
    """The names of the libraries that search for hyperparameters."""

    OPTUNA = "optuna"
    RAY = "ray"


class DivergedError(TrainingError):
    """A run whose loss or weights are not finite."""


class EvalPrediction(NamedTuple):
    """The argument of `compute_metrics`: predictions and labels of the full set, in its order.

    Each is an array, or a tuple of arrays if the model returns several predictions or there are
    several kinds of labels. If batches differ in length, rows are padded with -100.
    """

    predictions: np.ndarray | tuple[np.ndarray, ...]
    label_ids: np.ndarray | tuple[np.ndarray, ...]


class PredictionOutput(NamedTuple):
    """The result of `Trainer.predict`, as in `EvalPrediction`; None if there are none."""

    predictions: np.ndarray | tuple[np.ndarray, ...] | None
    label_ids: np.ndarray | tuple[np.ndarray, ...] | None
    metrics: dict[str, float]


class TrainOutput(NamedTuple):
    """The result of `Trainer.train`."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """The result of `Trainer.hyperparameter_search`: the best trial, its objective and choices."""

    run_id: str
    objective: float
    hyperparameters: dict[str, Any]


def is_score(name: str) -> bool:
    """Returns whether this names a task's metric, not the loss, a time, a speed or a size."""
    aside = ("_runtime", "_samples_per_second", "_samples")
    return name not in ("eval_loss", "epoch") and not name.endswith(aside) and "_mem_" not in name


_LESS_IS_BETTER = ("loss", "error", "mse", "rmse", "mae", "perplexity")


def is_less_better(name: str) -> bool:
    """Returns whether less is better of the metric with this name, such as ``eval_mse``.

    scikit-learn's ``neg_…`` scores, such as ``neg_mean_squared_error``, are better if greater.
    """
    name = name.lower()
    return name.endswith(_LESS_IS_BETTER) and not {"neg", "negative"} & {*name.split("_")}


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """Returns the sum of an evaluation's metrics, or its loss if there are none.

    Times, speeds, memory and the epoch do not count as metrics.
    """
    scores = {name: value for name, value in metrics.items() if is_score(name)}
    return sum(scores.values()) if scores else metrics["eval_loss"]


def default_hp_space_optuna(trial: Any) -> dict[str, float]:
    """Returns a trial's choices of hyperparameters, in the ranges of transformers 4.4.2."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical(
            "per_device_train_batch_size", [4, 8, 16, 32, 64]
        ),
    }


default_hp_space: dict[HPSearchBackend, Callable[[Any], dict[str, float]]] = {
    HPSearchBackend.OPTUNA: default_hp_space_optuna
}


def is_main_process(local_rank: int) -> bool:
    """Returns whether this is its machine's first process (-1 means that it is the only one)."""
    return local_rank in (-1, 0)


def list_checkpoints(folder: str | os.PathLike) -> list[str]:
    """Returns the paths of the ``checkpoint-<step>`` folders in `folder`, sorted by step."""
    if not os.path.isdir(folder):
        return []
    found = [name for name in os.listdir(folder) if _CHECKPOINT.match(name)]
    found = [name for name in found if os.path.isdir(os.path.join(folder, name))]
    return [os.path.join(folder, name) for name in sorted(found, key=checkpoint_step)]


def checkpoint_step(path: str) -> int:
    """Returns the step in a checkpoint folder's name."""
    return int(_CHECKPOINT.match(os.path.basename(path))[1])


def get_last_checkpoint(
    folder: str | os.PathLike, but: Collection[str] = frozenset()
) -> str | None:
    """Returns the latest checkpoint in `folder` whose name is not in `but`, or None."""
    found = reversed(list_checkpoints(folder))
    return next((path for path in found if os.path.basename(path) not in but), None)


def speed_metrics(split: str, start: float, num_samples: int | None = None) -> dict[str, float]:
    """Returns ``<split>_runtime`` (seconds since `start`) and ``<split>_samples_per_second``."""
    seconds = max(time.time() - start, 1e-9)  # the clock may be coarse, or be set back
    metrics = {f"{split}_runtime": round(seconds, 4)}
    if num_samples is not None:
        metrics[f"{split}_samples_per_second"] = round(num_samples / seconds, 3)
    return metrics


def memory_metrics(split: str, device: torch.device) -> dict[str, int]:
    """Returns this process's peak memory so far, in bytes, on the CPU and, if used, on the GPU."""
    metrics = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        metrics[f"{split}_mem_cpu_peak"] = peak * unit
    if device.type == "cuda":
        metrics[f"{split}_mem_gpu_peak"] = torch.cuda.max_memory_allocated(device)
    return metrics


def save_metrics(
    folder: str | os.PathLike, split: str, metrics: dict[str, float], combined: bool = True
) -> None:
    """Writes ``<split>_results.json`` and, with `combined`, adds to ``all_results.json``."""
    _write_results(Path(folder, f"{split}_results.json"), metrics)
    if combined:
        everything = Path(folder, "all_results.json")
        # Training comes first in a run, so an existing file is from another run.
        begins = split == "train" or not everything.is_file()
        so_far = {} if begins else _read_results(everything)
        _write_results(everything, {**so_far, **metrics})


def _write_results(path: Path, results: dict[str, float]) -> None:
    atomic_write_text(path, json.dumps(results, indent=4, sort_keys=True) + "\n")


def _read_results(path: Path) -> dict[str, float]:
    """Returns the content of ``all_results.json``; if it is damaged, warns and returns {}."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        check_structure(results, {})
        return results
    except ValueError as error:
        logger.warning("%s: is damaged (%s), and is replaced", path, error)
        return {}
