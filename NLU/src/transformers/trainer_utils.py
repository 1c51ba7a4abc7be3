"""Small things around the Trainer: names of checkpoints, what it returns, results, searches."""

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

from loralib.io.atomic import atomic_write
from loralib.io.likeness import check_like
from loralib.training.determinism import set_seed  # noqa: F401 - upstream has it here

from .utils import logging

logger = logging.get_logger(__name__)

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


class HPSearchBackend(str, Enum):
    """What searches for hyperparameters."""

    OPTUNA = "optuna"
    RAY = "ray"


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


class BestRun(NamedTuple):
    """What `Trainer.hyperparameter_search` returns: the best trial, its objective, its choices."""

    run_id: str
    objective: float
    hyperparameters: dict[str, Any]


def is_score(name: str) -> bool:
    """Whether this is the name of a task's metric: not of the loss, a time, a speed or a size."""
    aside = ("_runtime", "_samples_per_second", "_samples")
    return name not in ("eval_loss", "epoch") and not name.endswith(aside) and "_mem_" not in name


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """What a search compares: the sum of an evaluation's metrics, or the loss where that is all.

    Times, speeds, memory and the epoch are no metrics.
    """
    scores = {name: value for name, value in metrics.items() if is_score(name)}
    return sum(scores.values()) if scores else metrics["eval_loss"]


def default_hp_space_optuna(trial: Any) -> dict[str, float]:
    """What a search with optuna varies, where nothing else is asked for: 4.4.2's ranges."""
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
    """Whether this is its machine's first process; `local_rank` is -1 where it is the only one."""
    return local_rank in (-1, 0)


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


def memory_metrics(split: str, device: torch.device) -> dict[str, int]:
    """Peak memory so far, in bytes: this process's on the CPU and, where used, on the GPU."""
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
        # Training comes first in a run: what was there before is of another one.
        begins = split == "train" or not everything.is_file()
        so_far = {} if begins else _read_results(everything)
        _write_results(everything, {**so_far, **metrics})


def _write_results(path: Path, results: dict[str, float]) -> None:
    with atomic_write(path) as temporary:
        text = json.dumps(results, indent=4, sort_keys=True)
        temporary.write_text(f"{text}\n", encoding="utf-8")


def _read_results(path: Path) -> dict[str, float]:
    """What ``all_results.json`` holds; nothing, and a warning, where it is damaged."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        check_like(results, {})
        return results
    except ValueError as error:
        logger.warning("%s: is damaged (%s), and is replaced", path, error)
        return {}
