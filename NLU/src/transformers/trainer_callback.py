"""The Trainer's callbacks and state: when to log, evaluate and save, progress bars, stopping."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

from loralib.errors import CheckpointError
from loralib.io.atomic import atomic_write_text
from loralib.io.console import Pace, in_words
from loralib.io.structure import check_structure

from .tokenization_utils_base import PreTrainedTokenizerBase
from .trainer_data import length_of
from .trainer_utils import IntervalStrategy
from .training_args import TrainingArguments
from .utils import logging

logger = logging.get_logger(__name__)


@dataclass
class TrainerState:
    """How far a run has come. Saved as ``trainer_state.json`` in every checkpoint and at the end.

    Args:
        epoch: epochs so far, as a fraction; None before the first training.
        global_step: optimizer steps so far.
        max_steps: optimizer steps of the whole run.
        num_train_epochs: epochs of the whole run.
        total_flos: floating-point operations so far; see `Trainer.floating_point_ops`.
        log_history: all log records.
        best_metric: the best value so far of metric_for_best_model.
        best_model_checkpoint: its checkpoint's folder.
        is_local_process_zero: whether this process is its machine's first one.
        is_world_process_zero: whether this process is the main one.
        is_hyper_param_search: whether the run is a trial of a search.
        trial_name: the trial's name.
        trial_params: the hyperparameters chosen for it.
    """

    epoch: float | None = None
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None

    def save_to_json(self, json_path: str | os.PathLike) -> None:
        """Writes the state to a JSON file."""
        atomic_write_text(json_path, json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike) -> "TrainerState":
        """Reads what `save_to_json` wrote.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            values = json.loads(Path(json_path).read_text(encoding="utf-8"))
            check_structure(values, asdict(cls()))
            filled = {
                "epoch": 0.0,
                "best_metric": 0.0,
                "best_model_checkpoint": "",
                "trial_name": "",
                "trial_params": {},
            }
            known = {name: like for name, like in filled.items() if values[name] is not None}
            check_structure(values, known)
            for record in values["log_history"]:
                check_structure(record, {"step": 0}, "an entry of 'log_history'")
            return cls(**values)
        except (ValueError, TypeError, OSError) as error:
            reason = getattr(error, "strerror", None) or error  # without the path once more
            raise CheckpointError(f"{json_path}: not a trainer's state ({reason})") from error


@dataclass
class TrainerControl:
    """Requests from callbacks, which the Trainer fulfills at the next opportunity.

    With several processes, all have to request the same at the same step. If one process stops or
    saves alone, the others wait for it until ``--ddp_timeout`` raises an error.

    Attributes:
        should_training_stop: end the run.
        should_epoch_stop: end this epoch and begin the next one.
        should_save, should_evaluate, should_log: save, evaluate or log after this step.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class TrainerCallback:
    """Base class with one method per event. A method may change `control` or return another one.

    All methods take the arguments, the state and the control. Their keyword arguments are model,
    tokenizer, optimizer, lr_scheduler, train_dataloader and eval_dataloader (None if there is none)
    and, for log and evaluation events, logs or metrics.
    """

    def on_init_end(self, args, state, control, **kwargs):
        """Called when the Trainer has been created."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Called when training begins."""

    def on_train_end(self, args, state, control, **kwargs):
        """Called when training has ended."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Called when an epoch begins."""

    def on_epoch_end(self, args, state, control, **kwargs):
        """Called when an epoch has ended."""

    def on_step_begin(self, args, state, control, **kwargs):
        """Called before the first batch of an update."""

    def on_substep_end(self, args, state, control, **kwargs):
        """Called after a batch that is not the last one of its update."""

    def on_step_end(self, args, state, control, **kwargs):
        """Called after an update."""

    def on_prediction_step(self, args, state, control, **kwargs):
        """Called after a batch of `eval_dataloader`; `description` names the loop."""

    def on_evaluate(self, args, state, control, **kwargs):
        """Called after an evaluation, with its results as `metrics`."""

    def on_predict(self, args, state, control, **kwargs):
        """Called after a prediction, with its results as `metrics`."""

    def on_log(self, args, state, control, **kwargs):
        """Called after `logs` were recorded."""

    def on_save(self, args, state, control, **kwargs):
        """Called after a checkpoint was written."""


class CallbackHandler(TrainerCallback):
    """Calls all callbacks, in the order in which they were added.

    Args:
        callbacks: the callbacks, as objects or classes.
        model, tokenizer, optimizer, lr_scheduler: passed to the callbacks as keyword arguments.

    Attributes:
        train_dataloader, eval_dataloader: likewise; None if there is none.
    """

    def __init__(
        self,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]],
        model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
    ):
        self.callbacks: list[TrainerCallback] = []
        self.model, self.tokenizer = model, tokenizer
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback, given as an object or a class."""
        added = callback() if isinstance(callback, type) else callback
        if any(type(there) is type(added) for there in self.callbacks):
            logger.warning(
                "there is a %s among the callbacks already; those in effect: %s",
                type(added),
                ", ".join(type(there).__name__ for there in self.callbacks),
            )
        self.callbacks.append(added)

    def pop_callback(
        self, callback: TrainerCallback | type[TrainerCallback]
    ) -> TrainerCallback | None:
        """Removes and returns a callback, or the first one of a class; None if there is none.

        A subclass's objects are the class's, too.
        """
        for there in self.callbacks:
            if there is callback or (isinstance(callback, type) and isinstance(there, callback)):
                self.callbacks.remove(there)
                return there
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Removes a callback, or the first one of a class."""
        self.pop_callback(callback)

    def on_init_end(self, args, state, control):
        """Calls the callbacks when the Trainer has been created."""
        return self.call_event("on_init_end", args, state, control)

    def on_train_begin(self, args, state, control):
        """Clears the request to stop training, and calls the callbacks."""
        control.should_training_stop = False
        return self.call_event("on_train_begin", args, state, control)

    def on_train_end(self, args, state, control):
        """Calls the callbacks when training has ended."""
        return self.call_event("on_train_end", args, state, control)

    def on_epoch_begin(self, args, state, control):
        """Clears the request to stop the epoch, and calls the callbacks."""
        control.should_epoch_stop = False
        return self.call_event("on_epoch_begin", args, state, control)

    def on_epoch_end(self, args, state, control):
        """Calls the callbacks when an epoch has ended."""
        return self.call_event("on_epoch_end", args, state, control)

    def on_step_begin(self, args, state, control):
        """Clears the requests of the last step, and calls the callbacks."""
        control.should_log = control.should_evaluate = control.should_save = False
        return self.call_event("on_step_begin", args, state, control)

    def on_substep_end(self, args, state, control):
        """Calls the callbacks after a batch that is not the last one of its update."""
        return self.call_event("on_substep_end", args, state, control)

    def on_step_end(self, args, state, control):
        """Calls the callbacks after an update."""
        return self.call_event("on_step_end", args, state, control)

    def on_prediction_step(self, args, state, control, **about):
        """Calls the callbacks after a batch of an evaluation or a prediction."""
        return self.call_event("on_prediction_step", args, state, control, **about)

    def on_evaluate(self, args, state, control, metrics):
        """Clears the request to evaluate, and calls the callbacks."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics)

    def on_predict(self, args, state, control, metrics):
        """Calls the callbacks after a prediction."""
        return self.call_event("on_predict", args, state, control, metrics=metrics)

    def on_log(self, args, state, control, logs):
        """Clears the request to log, and calls the callbacks."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs)

    def on_save(self, args, state, control):
        """Clears the request to save, and calls the callbacks."""
        control.should_save = False
        return self.call_event("on_save", args, state, control)

    def call_event(
        self,
        event: str,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **about: Any,
    ) -> TrainerControl:
        """Calls all callbacks' method `event`, such as ``on_step_end``.

        Returns:
            The control that a callback returned last, or `control` if none did.
        """
        for callback in [*self.callbacks]:  # a callback may add and remove others, or itself
            there = {name: value for name, value in vars(self).items() if name != "callbacks"}
            result = getattr(callback, event)(args, state, control, **there, **about)
            control = control if result is None else result
        return control


# What callbacks can request -> the arguments with its strategy and its interval in steps.
_OCCASIONS = {
    "should_log": ("logging_strategy", "logging_steps"),
    "should_evaluate": ("evaluation_strategy", "eval_steps"),
    "should_save": ("save_strategy", "save_steps"),
}


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates, saves and stops when the arguments say so."""

    def on_step_end(self, args, state, control, **kwargs) -> TrainerControl:
        """Requests what is due at this step."""
        step = state.global_step
        for request, (strategy, interval) in _OCCASIONS.items():
            if getattr(args, strategy) is IntervalStrategy.STEPS:
                _ask(control, request, step % getattr(args, interval) == 0)
        _ask(control, "should_log", args.logging_first_step and step == 1)
        _ask(control, "should_training_stop", step >= state.max_steps)
        return control

    def on_epoch_end(self, args, state, control, **kwargs) -> TrainerControl:
        """Requests what is due at the end of an epoch."""
        for request, (strategy, _) in _OCCASIONS.items():
            _ask(control, request, getattr(args, strategy) is IntervalStrategy.EPOCH)
        return control


def _ask(control: TrainerControl, request: str, due: bool) -> None:
    """Makes a request if `due`; requests of other callbacks are kept."""
    setattr(control, request, getattr(control, request) or due)


class ProgressCallback(TrainerCallback):
    """Shows a bar for the run's steps and one for each evaluation, in the main process only."""

    def __init__(self) -> None:
        # The open bars by description.
        self._bars: dict[str, tqdm] = {}
        # The description of the evaluation in progress, if there is one.
        self._evaluated: str | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Opens the run's bar, at the step from which the run resumes."""
        self._open(state, "training", state.max_steps, "step", state.global_step)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Moves the run's bar to the current step."""
        if "training" in self._bars:
            bar = self._bars["training"]
            bar.update(state.global_step - bar.n)

    def on_prediction_step(
        self, args, state, control, eval_dataloader=None, description="evaluating", **kwargs
    ) -> None:
        """Advances the evaluation's bar by one batch, and opens it at the first one."""
        if self._evaluated != description:
            self._close(self._evaluated)
            self._evaluated = description
            self._open(state, description, length_of(eval_dataloader), "batch")
        if description in self._bars:
            self._bars[description].update()

    def on_log(self, args, state, control, logs: dict[str, float] | None = None, **kwargs) -> None:
        """Shows a log record: the loss beside the run's bar, an evaluation's results above it.

        If log messages are off, the whole record is printed above the bar, as in transformers 4.4.
        The run's last record, its summary, is left to `log_metrics`.
        """
        bar = self._bars.get("training")
        if bar is None or "train_runtime" in logs:
            return
        if not logger.isEnabledFor(logging.INFO):
            if args.log_level is None:
                bar.write(str(logs))
        elif "loss" in logs:
            bar.set_postfix_str(_in_one_line(logs), refresh=False)
        else:
            logger.info("%s", _record_in_words(state, logs))

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Closes the evaluation's bar."""
        self._close(self._evaluated)
        self._evaluated = None

    on_predict = on_evaluate

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Closes the run's bar."""
        self._close("training")

    def _open(
        self, state: TrainerState, what: str, total: int | None, unit: str, done: int = 0
    ) -> None:
        """Opens a bar. One opened below another is erased when it closes."""
        self._close(what)
        if state.is_world_process_zero:
            self._bars[what] = tqdm(
                desc=what, total=total, initial=done, unit=unit, leave=not self._bars
            )

    def _close(self, what: str | None) -> None:
        if what in self._bars:
            self._bars.pop(what).close()


class PrinterCallback(TrainerCallback):
    """Shows a run's log records, one line each, if progress bars are turned off.

    They are log messages. If those are off, the records are printed, as in transformers 4.4.
    """

    def __init__(self) -> None:
        self._pace: Pace | None = None  # only during a run

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Begins to show records."""
        self._pace = Pace(state.global_step, state.max_steps)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Stops showing records; later ones are left to `log_metrics`, like the run's summary."""
        self._pace = None

    def on_log(self, args, state, control, logs: dict[str, float] | None = None, **kwargs) -> None:
        """Shows a record, if a run is in progress."""
        if not state.is_world_process_zero or self._pace is None or "train_runtime" in logs:
            return
        if logger.isEnabledFor(logging.INFO):
            pace = self._pace.at(state.global_step) if "loss" in logs else ""
            words = _record_in_words(state, logs)
            logger.info("%s", f"{words}; {pace}" if pace else words)
        elif args.log_level is None:
            print(logs, flush=True)


def _record_in_words(state: TrainerState, logs: dict[str, float]) -> str:
    """Formats a log record, such as "step 5 of 25: loss 0.7, lr 1e-05"."""
    what = "evaluation: " if "eval_loss" in logs else ""
    return f"step {state.global_step:,} of {state.max_steps:,}: {what}{_in_one_line(logs)}"


def _in_one_line(logs: dict[str, float]) -> str:
    """Formats a record's values, without the prefix "eval_" and without an evaluation's speed."""
    shown = []
    for name, value in logs.items():
        if name == "eval_runtime":
            shown.append(f"in {in_words(value)}")
        elif not name.endswith("_samples_per_second"):
            word = "lr" if name == "learning_rate" else name.removeprefix("eval_")
            shown.append(f"{word} {value:.4g}" if isinstance(value, float) else f"{word} {value}")
    return ", ".join(shown)


class EarlyStoppingCallback(TrainerCallback):
    """Stops a run whose evaluations no longer improve. Needs load_best_model_at_end.

    Args:
        early_stopping_patience: the number of evaluations without improvement that ends the run.
        early_stopping_threshold: an evaluation counts as an improvement if it is better than the
            best by more than this.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0):
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.best: float | None = None
        self.early_stopping_patience_counter = 0  # evaluations since the last improvement

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Checks the arguments and, in a resumed run, counts its earlier evaluations again."""
        if not args.load_best_model_at_end:
            raise ValueError("EarlyStoppingCallback needs --load_best_model_at_end")
        self.best, self.early_stopping_patience_counter = None, 0
        evaluations = [r for r in state.log_history if args.eval_metric_name in r]
        for record in evaluations:
            self._count(args, record)
        if evaluations:
            self._stop(control)

    def on_evaluate(
        self, args, state, control, metrics: dict[str, float] | None = None, **kwargs
    ) -> None:
        """Compares an evaluation with the best so far."""
        self._count(args, metrics or {})
        self._stop(control)

    def _stop(self, control: TrainerControl) -> None:
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def _count(self, args: TrainingArguments, metrics: dict[str, float]) -> None:
        value = metrics.get(args.eval_metric_name)
        if not isinstance(value, Real):  # an error when the checkpoint is saved, see `note_best`
            return
        if self.best is None:
            gain = math.nan if math.isnan(value) else math.inf
        else:
            gain = value - self.best if args.greater_is_better else self.best - value
        # As in 4.4.2, a gain up to the threshold sets a new best but does not reset the counter.
        # A gain that is not a number is none.
        if gain > 0:
            self.best = value
        if gain > self.early_stopping_threshold:
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
