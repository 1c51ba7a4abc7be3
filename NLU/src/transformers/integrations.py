"""Packages that are used where installed: TensorBoard, Weights & Biases, optuna for searches."""

import importlib.util
import os
from numbers import Real
from typing import TYPE_CHECKING, Any

from .modeling_utils import PreTrainedModel
from .trainer_callback import TrainerCallback, TrainerState
from .trainer_utils import BestRun, HPSearchBackend
from .training_args import TrainingArguments

if TYPE_CHECKING:
    from .trainer import Trainer

# ------------------------------------------------------------------------------------------------
# Logs
# ------------------------------------------------------------------------------------------------


def is_tensorboard_available() -> bool:
    """Whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def is_wandb_available() -> bool:
    """Whether Weights & Biases is installed."""
    return importlib.util.find_spec("wandb") is not None


def is_optuna_available() -> bool:
    """Whether optuna is installed."""
    return importlib.util.find_spec("optuna") is not None


def _named(logs: dict[str, float]) -> dict[str, float]:
    """``eval_loss`` -> ``eval/loss``, ``loss`` -> ``train/loss``; numbers only."""
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

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Has each trial of a search write into a folder of its own."""
        if state.is_hyper_param_search and self.writer is not None:
            self.writer.close()
            self.writer = None

    def on_log(
        self, args, state, control, model=None, logs: dict[str, float] | None = None, **kwargs
    ) -> None:
        """Adds a record; the first one opens the file. Evaluations may come after training."""
        if not state.is_world_process_zero:
            return
        if self.writer is None:
            self._open(args, state, model)
        for name, value in _named(logs or {}).items():
            self.writer.add_scalar(name, value, state.global_step)
        self.writer.flush()

    def _open(self, args: TrainingArguments, state: TrainerState, model) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(args.logging_dir, state.trial_name or "")
        self.writer = SummaryWriter(log_dir=folder)
        self.writer.add_text("args", args.to_json_string())
        if isinstance(model, PreTrainedModel):
            self.writer.add_text("model_config", model.config.to_json_string())


class WandbCallback(TrainerCallback):
    """Sends logs to Weights & Biases."""

    def __init__(self) -> None:
        self.run = None

    def on_log(
        self, args, state, control, model=None, logs: dict[str, float] | None = None, **kwargs
    ) -> None:
        """Sends a record; the first one starts a run of the name ``--run_name``."""
        if not state.is_world_process_zero:
            return
        if self.run is None:
            import wandb

            settings = args.to_dict()
            if isinstance(model, PreTrainedModel):
                settings |= model.config.to_dict()
            self.run = wandb.init(name=args.run_name, config=settings)
        self.run.log(_named(logs or {}), step=state.global_step)


_REPORTERS = {
    "tensorboard": (is_tensorboard_available, TensorBoardCallback),
    "wandb": (is_wandb_available, WandbCallback),
}


def reporting_callbacks(args: TrainingArguments) -> list[type[TrainerCallback]]:
    """The callbacks that ``--report_to`` asks for.

    Raises:
        ValueError: one is asked for by name and is not installed.
    """
    asked = args.report_to
    if "none" in asked:
        return []
    callbacks = []
    for name, (is_available, callback) in _REPORTERS.items():
        if name in asked and not is_available():
            raise ValueError(f"--report_to {name}: it is not installed (pip install {name})")
        if is_available() and (name in asked or "all" in asked):
            callbacks.append(callback)
    return callbacks


# ------------------------------------------------------------------------------------------------
# Searches for hyperparameters
# ------------------------------------------------------------------------------------------------


def check_hp_search_backend(backend: str | HPSearchBackend | None) -> None:
    """Checks that a search can run on what is asked for, or by default on optuna.

    Raises:
        ValueError: it is not carried, or unknown.
        RuntimeError: it is not installed.
    """
    backend = HPSearchBackend.OPTUNA if backend is None else HPSearchBackend(backend)
    if backend is HPSearchBackend.RAY:
        raise ValueError('hyperparameter_search knows backend="optuna"; Ray is not carried here')
    if not is_optuna_available():
        raise RuntimeError("hyperparameter_search needs optuna: pip install optuna")


def hp_params(trial: Any) -> dict[str, Any]:
    """What was chosen for a trial: optuna's own, or a dict of choices."""
    return dict(trial) if isinstance(trial, dict) else trial.params


def run_hp_search_optuna(
    trainer: "Trainer", n_trials: int, direction: str, **settings: Any
) -> BestRun:
    """Trains once a trial, with what optuna chooses.

    Args:
        trainer: its `objective` is the last evaluation's, or that of one after the training.
        n_trials: how many trials.
        direction: "minimize" or "maximize".
        settings: "timeout" in seconds; others are those of ``optuna.create_study``.
    """
    import optuna

    if settings.pop("n_jobs", 1) != 1:
        raise ValueError("hyperparameter_search trains one trial after the other: leave n_jobs out")
    timeout = settings.pop("timeout", None)

    def objective(trial: Any) -> float:
        trainer.objective = None
        trainer.train(trial=trial)
        if trainer.objective is None:
            trainer.objective = trainer.compute_objective(trainer.evaluate())
        return trainer.objective

    study = optuna.create_study(direction=direction, **settings)
    study.optimize(objective, n_trials=n_trials, timeout=timeout)
    best = study.best_trial
    return BestRun(str(best.number), best.value, best.params)


def report_to_optuna(trial: Any, epoch: float, objective: float) -> None:
    """Tells optuna of an evaluation within a trial.

    Raises:
        optuna.TrialPruned: it has seen enough of this trial.
    """
    import optuna

    trial.report(objective, int(epoch))
    if trial.should_prune():
        raise optuna.TrialPruned()
