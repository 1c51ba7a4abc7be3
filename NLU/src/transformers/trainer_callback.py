"""What happens around the Trainer's steps: its state, its control flow, progress and stopping."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from loralib.errors import CheckpointError
from loralib.io.atomic import atomic_write
from loralib.io.likeness import check_like

from .trainer_utils import IntervalStrategy
from .training_args import TrainingArguments


@dataclass
class TrainerState:
    """Where a run is; ``trainer_state.json`` in every checkpoint and at the end.

    Args:
        epoch: passes over the training set so far, a fraction.
        global_step: updates so far.
        max_steps: updates in all.
        num_train_epochs: passes in all.
        log_history: all log records.
        best_metric: the best evaluation so far, by metric_for_best_model.
        best_model_checkpoint: its checkpoint's folder.
        is_world_process_zero: whether this process is the main one.
    """

    epoch: float | None = None
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_world_process_zero: bool = True

    def save_to_json(self, path: str | os.PathLike) -> None:
        """Writes the state."""
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    @classmethod
    def load_from_json(cls, path: str | os.PathLike) -> "TrainerState":
        """Reads what `save_to_json` wrote.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            check_like(values, asdict(cls()))
            filled = {"epoch": 0.0, "best_metric": 0.0, "best_model_checkpoint": ""}
            known = {name: like for name, like in filled.items() if values[name] is not None}
            check_like(values, known)
            for record in values["log_history"]:
                check_like(record, {"step": 0}, "an entry of 'log_history'")
            return cls(**values)
        except (ValueError, TypeError, OSError) as error:
            raise CheckpointError(f"{path}: not a trainer's state ({error})") from error


@dataclass
class TrainerControl:
    """What callbacks ask the Trainer for at its next opportunity."""

    should_training_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


class TrainerCallback:
    """Base class: one method an event, each of which may change `control`.

    All take the arguments, the state, the control, and by name what the event is about: model,
    optimizer, lr_scheduler, and for the log and evaluation events logs or metrics.
    """

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Training begins."""

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Training has ended."""

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        """A pass over the training set begins."""

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        """A pass over the training set has ended."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """An update was made."""

    def on_prediction_step(self, args, state, control, **kwargs) -> None:
        """A batch of `num_batches` was computed; `what` is evaluating, or predicting."""

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """An evaluation has ended; `metrics` are its results."""

    def on_predict(self, args, state, control, **kwargs) -> None:
        """A prediction has ended."""

    def on_log(self, args, state, control, **kwargs) -> None:
        """`logs` were recorded."""

    def on_save(self, args, state, control, **kwargs) -> None:
        """A checkpoint was written."""


class CallbackHandler:
    """Calls every callback, in the order in which they were added."""

    def __init__(self, callbacks: list[TrainerCallback | type[TrainerCallback]], **around: Any):
        self.callbacks: list[TrainerCallback] = []
        self.around = around
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback, or one of a class."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def call(
        self,
        event: str,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **about: Any,
    ) -> None:
        """Tells all callbacks of `event`, such as ``on_step_end``."""
        for callback in self.callbacks:
            getattr(callback, event)(args, state, control, **self.around, **about)


# What callbacks can ask for -> the arguments that say on what occasion, and at which steps.
_OCCASIONS = {
    "should_log": ("logging_strategy", "logging_steps"),
    "should_evaluate": ("evaluation_strategy", "eval_steps"),
    "should_save": ("save_strategy", "save_steps"),
}


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates, saves and stops when the arguments say so."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Asks for what falls on this step."""
        step = state.global_step
        for request, (strategy, interval) in _OCCASIONS.items():
            if getattr(args, strategy) is IntervalStrategy.STEPS:
                _ask(control, request, step % getattr(args, interval) == 0)
        _ask(control, "should_log", args.logging_first_step and step == 1)
        _ask(control, "should_training_stop", step >= state.max_steps)

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        """Asks for what falls on an epoch's end."""
        for request, (strategy, _) in _OCCASIONS.items():
            _ask(control, request, getattr(args, strategy) is IntervalStrategy.EPOCH)


def _ask(control: TrainerControl, request: str, due: bool) -> None:
    """Asks for something that is due; what others have asked for stands."""
    setattr(control, request, getattr(control, request) or due)


class ProgressCallback(TrainerCallback):
    """A bar over the run's updates, and one over each evaluation; from the main process only."""

    def __init__(self) -> None:
        # The bars on the screen by what they show.
        self._bars: dict[str, tqdm] = {}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Opens the run's bar, at the step that it resumes from."""
        self._open(state, "training", state.max_steps, "step", state.global_step)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Moves the run's bar to the step."""
        if "training" in self._bars:
            bar = self._bars["training"]
            bar.update(state.global_step - bar.n)

    def on_prediction_step(
        self, args, state, control, num_batches: int = 0, what: str = "evaluating", **kwargs
    ) -> None:
        """Moves the evaluation's bar on by a batch, opening it before the first."""
        if what not in self._bars:
            self._open(state, what, num_batches, "batch")
        if what in self._bars:
            self._bars[what].update()

    def on_log(self, args, state, control, logs: dict[str, float] | None = None, **kwargs) -> None:
        """Shows a record above the run's bar; its last, the summary, is for `log_metrics`."""
        if "training" in self._bars and "train_runtime" not in logs:
            self._bars["training"].write(str(logs))

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Closes the evaluation's bar."""
        self._close("evaluating")
        self._close("predicting")

    on_predict = on_evaluate

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Closes the run's bar."""
        self._close("training")

    def _open(self, state: TrainerState, what: str, total: int, unit: str, done: int = 0) -> None:
        """Puts a bar on the screen; one that comes up below another is wiped off at its end."""
        if state.is_world_process_zero:
            self._bars[what] = tqdm(
                desc=what, total=total, initial=done, unit=unit, leave=not self._bars
            )

    def _close(self, what: str) -> None:
        if what in self._bars:
            self._bars.pop(what).close()


class PrinterCallback(TrainerCallback):
    """Prints a run's log records, where bars are not wanted."""

    def __init__(self) -> None:
        self._is_training = False

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """The records from here on are the run's."""
        self._is_training = True

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """The records from here on are for `log_metrics`, as the run's summary is."""
        self._is_training = False

    def on_log(self, args, state, control, logs: dict[str, float] | None = None, **kwargs) -> None:
        """Prints a record."""
        if state.is_world_process_zero and self._is_training and "train_runtime" not in logs:
            print(logs, flush=True)


class EarlyStoppingCallback(TrainerCallback):
    """Stops a run whose evaluations no longer improve. Needs load_best_model_at_end.

    Args:
        early_stopping_patience: evaluations without an improvement after which to stop.
        early_stopping_threshold: how much better an evaluation must be to count.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0):
        self.patience = early_stopping_patience
        self.threshold = early_stopping_threshold
        self.best: float | None = None
        self.evaluations_since = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Checks the arguments, and recounts the evaluations of a run that is resumed."""
        if not args.load_best_model_at_end:
            raise ValueError("EarlyStoppingCallback needs --load_best_model_at_end")
        self.best, self.evaluations_since = None, 0
        for record in state.log_history:
            self._count(args, record)
        if self.best is not None:
            self._stop(control)

    def on_evaluate(
        self, args, state, control, metrics: dict[str, float] | None = None, **kwargs
    ) -> None:
        """Compares an evaluation with the best so far."""
        self._count(args, metrics or {})
        self._stop(control)

    def _stop(self, control: TrainerControl) -> None:
        if self.evaluations_since >= self.patience:
            control.should_training_stop = True

    def _count(self, args: TrainingArguments, metrics: dict[str, float]) -> None:
        value = metrics.get(f"eval_{args.metric_for_best_model.removeprefix('eval_')}")
        if value is None:
            return
        gain = 0.0 if self.best is None else value - self.best
        gain = gain if args.greater_is_better else -gain
        if not math.isnan(value) and (self.best is None or gain > self.threshold):
            self.best, self.evaluations_since = value, 0
        else:
            self.evaluations_since += 1
