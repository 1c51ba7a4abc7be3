"""The Trainer's hyperparameter search with optuna, which trains once per trial."""

import os
from collections.abc import Callable
from numbers import Real
from typing import Any

from .integrations import (
    check_hp_search_backend,
    hp_params,
    report_to_optuna,
    run_hp_search_optuna,
)
from .trainer_callback import TrainerState
from .trainer_utils import (
    BestRun,
    HPSearchBackend,
    default_compute_objective,
    default_hp_space,
)
from .training_args import TrainingArguments


class TrainerSearch:
    """The part of `Trainer` that searches for hyperparameters.

    Attributes:
        objective: the objective of the current trial's last evaluation.
    """

    args: TrainingArguments
    state: TrainerState
    model_init: Callable[..., Any] | None
    hp_name: Callable[[Any], str] | None = None
    hp_space: Callable[[Any], dict[str, Any]] | None = None
    compute_objective: Callable[[dict[str, float]], float] | None = None
    objective: float | None = None
    _cannot_evaluate: Callable[[], bool]
    _trial: Any = None  # the current trial
    _evaluations: int = 0  # those of the current trial so far
    _search_folder: str  # has a folder for each trial
    _settings: dict[str, Any]  # those of the search, from which every trial starts

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun:
        """Trains once per trial, each with other settings, and returns the best trial.

        Each trial's checkpoints are in a separate folder below ``args.output_dir``. A trial whose
        loss or weights are not finite counts as failed. Afterwards, ``args`` has the last trial's
        settings. Needs a `model_init` and optuna.

        Args:
            hp_space: takes optuna's trial and returns settings of ``args`` by name; by default
                `default_hp_space_optuna`.
            compute_objective: takes an evaluation's metrics and returns the value to compare; by
                default `default_compute_objective`.
            n_trials: the number of trials.
            direction: "minimize" or "maximize" the objective.
            backend: "optuna".
            hp_name: takes a trial and returns its name; by default "run-0", "run-1", …
            kwargs: "timeout" in seconds, and arguments of ``optuna.create_study``.

        Raises:
            RuntimeError: there is no `model_init`, or optuna is not installed.
            ValueError: another backend is asked for, there are several processes, or there is no
                set to evaluate.
        """
        if self.args.world_size > 1:
            raise ValueError("hyperparameter_search runs on one process: start it without others")
        check_hp_search_backend(backend)
        if self.model_init is None:
            raise RuntimeError("hyperparameter_search needs a Trainer with a model_init")
        if self._cannot_evaluate():
            raise ValueError(
                "hyperparameter_search compares evaluations: give the Trainer an eval_dataset"
            )
        self.hp_space = hp_space or default_hp_space[HPSearchBackend.OPTUNA]
        self.compute_objective = compute_objective or default_compute_objective
        self.hp_name = hp_name
        self._search_folder = self.args.output_dir
        self._settings = dict(vars(self.args))
        try:
            return run_hp_search_optuna(self, n_trials, direction, **kwargs)
        finally:
            self.args.output_dir, self._trial = self._search_folder, None

    def _set_up_trial(self, trial: Any) -> None:
        """Sets the settings that a trial has chosen.

        Raises:
            ValueError: there is no such setting, or the value is not allowed.
        """
        self._trial, self._evaluations = trial, 0
        if trial is None:
            return
        if self.hp_space is None:
            raise ValueError("train takes a trial only from hyperparameter_search")
        args = self.args
        vars(args).update(self._settings)  # without the choices of the trial before
        for name, value in self.hp_space(trial).items():
            if not hasattr(args, name):
                raise ValueError(f"hp_space chooses {name}, which TrainingArguments do not have")
            setattr(args, name, _in_type_of(getattr(args, name), name, value))
        args.check()

    def _name_trial(self) -> None:
        """Records the trial's name and choices in the state, and sets its output folder."""
        trial, state = self._trial, self.state
        if trial is None:
            return
        name = f"run-{trial.number}" if self.hp_name is None else self.hp_name(trial)
        state.is_hyper_param_search, state.trial_name = True, name
        state.trial_params = hp_params(trial)
        self.args.output_dir = os.path.join(self._search_folder, name)

    def _report_to_hp_search(self, metrics: dict[str, float]) -> None:
        """Reports an evaluation to the search, which may end the trial."""
        if self._trial is not None:
            self.objective = self.compute_objective(dict(metrics))
            self._evaluations += 1
            report_to_optuna(self._trial, self._evaluations, self.objective)


def _in_type_of(before: Any, name: str, value: Any) -> Any:
    """Returns a trial's choice of a setting in the type of the value that it replaces.

    Raises:
        ValueError: that would be another value, as 0 is for 0.1, and True for "no".
    """
    if before is None:
        return value
    kind = type(before)
    converted = kind(value)
    if (kind is bool or isinstance(value, Real)) and converted != value:
        raise ValueError(
            f"hp_space chooses {value!r} for {name}, which has to be of type {kind.__name__}"
        )
    return converted
