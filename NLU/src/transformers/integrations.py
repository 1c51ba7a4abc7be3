"""Optional packages: TensorBoard, Weights & Biases, matplotlib and optuna."""

import math
import os
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

from loralib.io.atomic import naming_file
from loralib.training.curves import (
    HOW_TO_GET_IT,
    Place,
    is_matplotlib_available,
    write_curves,
)
from loralib.training.reports import TENSORBOARD_FILE, check_installed, is_installed

from .modeling_utils import PreTrainedModel
from .trainer_callback import TrainerCallback, TrainerState
from .trainer_utils import BestRun, DivergedError, HPSearchBackend, is_score
from .training_args import TrainingArguments
from .utils import logging

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.get_logger(__name__)

# ---- logs ----


def is_tensorboard_available() -> bool:
    """Returns whether TensorBoard is installed."""
    return is_installed("tensorboard")


def is_wandb_available() -> bool:
    """Returns whether Weights & Biases is installed."""
    return is_installed("wandb")


def is_optuna_available() -> bool:
    """Returns whether optuna is installed."""
    return is_installed("optuna")


def _named(logs: dict[str, float]) -> dict[str, float]:
    """Renames ``eval_loss`` to ``eval/loss`` and ``loss`` to ``train/loss``; keeps only numbers."""
    named = {}
    for name, value in logs.items():
        if isinstance(value, Real):
            evaluated = name.startswith("eval_")
            named[f"{'eval' if evaluated else 'train'}/{name.removeprefix('eval_')}"] = float(value)
    return named


class TensorBoardCallback(TrainerCallback):
    """Writes logs to ``args.logging_dir``."""

    def __init__(self) -> None:
        self.writer = None
        self._is_trial = False  # whether the open file is a trial's

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Closes the file before and after a trial, so that each trial has its own folder."""
        if self.writer is not None and (self._is_trial or state.is_hyper_param_search):
            self.writer.close()
            self.writer = None

    def on_log(
        self, args, state, control, model=None, logs: dict[str, float] | None = None, **kwargs
    ) -> None:
        """Writes a record. The first one opens the file, which may be after training."""
        if not state.is_world_process_zero:
            return
        folder = os.path.join(args.logging_dir, state.trial_name or "")
        with naming_file(os.path.join(folder, TENSORBOARD_FILE)):
            if self.writer is None:
                self._open(folder, args, state, model)
            for name, value in _named(logs or {}).items():
                self.writer.add_scalar(name, value, state.global_step)
            self.writer.flush()

    def _open(self, folder: str, args: TrainingArguments, state: TrainerState, model) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer, self._is_trial = SummaryWriter(log_dir=folder), state.is_hyper_param_search
        # Ends the writer's thread once this object is gone. There may be logs until then.
        finalize(self, self.writer.close).atexit = False
        self.writer.add_text("args", args.to_json_string())
        if isinstance(model, PreTrainedModel):
            self.writer.add_text("model_config", model.config.to_json_string())


class WandbCallback(TrainerCallback):
    """Sends logs to Weights & Biases."""

    def __init__(self) -> None:
        self.run = None
        self._is_trial = False  # whether the run is a trial's

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Ends the run before and after a trial, because the steps of each trial begin at 1."""
        if self.run is not None and (self._is_trial or state.is_hyper_param_search):
            self.run.finish()
            self.run = None

    def on_log(
        self, args, state, control, model=None, logs: dict[str, float] | None = None, **kwargs
    ) -> None:
        """Sends a record. The first one starts a run named ``--run_name``.

        In a search, this is the name of a group of runs, which have the names of the trials.
        """
        if not state.is_world_process_zero:
            return
        if self.run is None:
            import wandb

            settings = args.to_dict()
            if isinstance(model, PreTrainedModel):
                settings |= model.config.to_dict()
            self._is_trial = state.is_hyper_param_search
            names = {"name": args.run_name}
            if self._is_trial:
                names = {"name": state.trial_name, "group": args.run_name}
            self.run = wandb.init(**names, config=settings)
        self.run.log(_named(logs or {}), step=state.global_step)


def place_of(name: str) -> Place | None:
    """Returns where a logged value appears in the plot of a run, or None if it does not."""
    known = {
        "loss": Place("loss", "training"),
        "eval_loss": Place("loss", "evaluation"),
        "learning_rate": Place("learning rate", "learning rate"),
    }
    if name in known or not name.startswith("eval_") or not is_score(name):
        return known.get(name)
    metric = name.removeprefix("eval_")
    return Place(metric, metric)


class CurvesCallback(TrainerCallback):
    """Writes ``learning_curves.png`` into ``args.output_dir`` at the end of a run.

    The plot has all records of the run, also those from before it was resumed. If the run has not
    evaluated its last weights, the first evaluation after it is added.

    Attributes:
        path: the plot's file; None until it is written.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._is_training = False

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Notes that the evaluations from here on belong to the run."""
        self._is_training = True

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Writes the plot."""
        self._is_training = False
        self._write(args, state)

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Writes the plot again if this is the first evaluation of the last weights, after the run.

        Not for later evaluations, which may be on other data; not after a search, when the output
        folder is no longer the trial's; and not with `load_best_model_at_end`, when the weights are
        from another step.
        """
        of_the_run = state.max_steps and not state.is_hyper_param_search
        if self._is_training or not of_the_run or args.load_best_model_at_end:
            return
        evaluations = [
            record
            for record in state.log_history
            if record["step"] == state.global_step and any(n.startswith("eval_") for n in record)
        ]
        if len(evaluations) == 1:  # this one
            self._write(args, state)

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        if state.is_world_process_zero:
            self.path = write_curves(args.output_dir, state.log_history, place_of)


_REPORTERS = {
    "tensorboard": (is_tensorboard_available, TensorBoardCallback),
    "wandb": (is_wandb_available, WandbCallback),
    "plot": (is_matplotlib_available, CurvesCallback),
}


def reporting_callbacks(args: TrainingArguments) -> list[type[TrainerCallback]]:
    """Returns the callbacks that ``--report_to`` asks for.

    If matplotlib is missing, a message says how to install it, and the run goes on without a plot.

    Raises:
        ValueError: any other package is asked for by name and is not installed.
    """
    wanted = args.report_to
    if "none" in wanted:
        return []
    callbacks = []
    for name, (is_available, callback) in _REPORTERS.items():
        if is_available():
            if name in wanted or "all" in wanted:
                callbacks.append(callback)
        elif name == "plot":
            level = logging.WARNING if name in wanted else logging.INFO
            if name in wanted or ("all" in wanted and args.do_train):
                logger.log(level, HOW_TO_GET_IT)
        elif name in wanted:
            check_installed(name)
    return callbacks


# ---- searches for hyperparameters ----


def check_hp_search_backend(backend: str | HPSearchBackend | None) -> None:
    """Checks that a search can run with `backend` (by default optuna).

    Raises:
        ValueError: the backend is not supported here, or unknown.
        RuntimeError: optuna is not installed.
    """
    backend = HPSearchBackend.OPTUNA if backend is None else HPSearchBackend(backend)
    if backend is HPSearchBackend.RAY:
        raise ValueError('hyperparameter_search supports only backend="optuna", not Ray')
    if not is_optuna_available():
        raise RuntimeError("hyperparameter_search needs optuna: pip install optuna")


def hp_params(trial: Any) -> dict[str, Any]:
    """Returns the hyperparameters of a trial, which is optuna's or a dict of them."""
    return dict(trial) if isinstance(trial, dict) else trial.params


def run_hp_search_optuna(
    trainer: "Trainer", n_trials: int, direction: str, **settings: Any
) -> BestRun:
    """Trains once per trial with optuna's choices, and returns the best trial.

    Args:
        trainer: the Trainer. A trial's objective is that of its last evaluation. If it has none,
            the model is evaluated after training. A trial that diverges has none, and fails.
        n_trials: the number of trials.
        direction: "minimize" or "maximize".
        settings: "timeout" in seconds, and arguments of ``optuna.create_study``.
    """
    import optuna

    if settings.pop("n_jobs", 1) != 1:
        raise ValueError("hyperparameter_search trains one trial after the other: leave n_jobs out")
    timeout = settings.pop("timeout", None)

    def objective(trial: Any) -> float:
        trainer.objective = None
        try:
            trainer.train(trial=trial)
        except DivergedError as error:
            logger.warning("trial %s has failed: %s", trial.number, error)
            return math.nan  # to optuna, a failed trial, after which the search goes on
        if trainer.objective is None:
            trainer.objective = trainer.compute_objective(trainer.evaluate())
        return trainer.objective

    study = optuna.create_study(direction=direction, **settings)
    study.optimize(objective, n_trials=n_trials, timeout=timeout)
    best = study.best_trial
    return BestRun(str(best.number), best.value, best.params)


def report_to_optuna(trial: Any, number: int, objective: float) -> None:
    """Reports an evaluation within a trial to optuna.

    Args:
        trial: optuna's trial.
        number: the evaluation's number within the trial. By it, optuna compares trials, whose
            epochs may differ in steps; of two reports of one number, it ignores the second.
        objective: its objective.

    Raises:
        optuna.TrialPruned: optuna ends this trial early.
    """
    import optuna

    trial.report(objective, number)
    if trial.should_prune():
        raise optuna.TrialPruned()
