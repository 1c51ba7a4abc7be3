"""Which of a run's checkpoints is the best, by an evaluation's metric."""

import math
from collections.abc import Iterable
from numbers import Real
from pathlib import Path

from loralib.errors import TrainingError
from loralib.training.distributed import gather_objects

from .trainer_callback import TrainerState
from .trainer_utils import PREFIX_CHECKPOINT_DIR
from .training_args import TrainingArguments
from .utils import logging

logger = logging.get_logger(__name__)


def check_best_metric(args: TrainingArguments, metrics: Iterable[str]) -> None:
    """Refuses a metric_for_best_model that evaluations do not return.

    Scripts call it before they train.

    Args:
        args: the settings with the metric, if any.
        metrics: the names of the metrics that an evaluation returns.

    Raises:
        TrainingError: the metric is not among them.
    """
    name, known = args.eval_metric_name, [metric.removeprefix("eval_") for metric in metrics]
    if name is not None and name.removeprefix("eval_") not in known:
        raise TrainingError(
            f"--metric_for_best_model: no evaluation gives {name}; known: {', '.join(known)}"
        )


def note_best(
    state: TrainerState, args: TrainingArguments, metrics: dict[str, float], folder: Path
) -> None:
    """Records an evaluation and its checkpoint in the Trainer's state if it is the best so far.

    Raises:
        TrainingError: the evaluation lacks the metric that is compared, or it is not a number.
    """
    name = args.eval_metric_name
    if name is None:
        return
    check_best_metric(args, metrics)
    value, best = metrics[name], state.best_metric
    if not isinstance(value, Real):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise TrainingError(
            f"--metric_for_best_model: {name} is {kind}, not a number: compute_metrics has to "
            "return one number to compare by"
        )
    if math.isnan(value):
        logger.warning("%s is not a number at step %s", name, state.global_step)
        return
    if best is None or (value > best if args.greater_is_better else value < best):
        state.best_metric = value
        state.best_model_checkpoint = str(folder)


def find_best(state: TrainerState, args: TrainingArguments, folder: Path) -> None:
    """Finds the best of the existing checkpoints when a run resumes, and records it in `state`.

    Since the checkpoint was written, the folder may have been copied or moved, checkpoints may have
    been deleted, and another metric may have been chosen. All processes have to call this, and use
    what the first one finds.

    Args:
        state: the Trainer's state, with the run's evaluations.
        args: the settings with the metric to compare.
        folder: the run's output folder.
    """
    name = args.eval_metric_name
    if name is None:
        return
    noted, value = state.best_model_checkpoint, state.best_metric
    state.best_model_checkpoint = state.best_metric = None
    for record in state.log_history:
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{record['step']}"
        if not math.isnan(record.get(name, math.nan)) and checkpoint.is_dir():
            note_best(state, args, record, checkpoint)
    found = state.best_model_checkpoint and Path(state.best_model_checkpoint).name
    found, state.best_metric = gather_objects((found, state.best_metric), args.world_size)[0]
    state.best_model_checkpoint = found and str(folder / found)
    if noted and state.best_metric != value:
        logger.warning(
            "the best model was %s; the best of the remaining checkpoints is %s, by %s",
            *(noted, state.best_model_checkpoint or "none", args.metric_for_best_model),
        )
