"""The Trainer's default callbacks: when to log, evaluate and save, early stopping, and bars."""

import io
import math

import pytest
from tqdm import tqdm

from transformers import IntervalStrategy, TrainerControl, TrainerState, TrainingArguments
from transformers import trainer_callback as callbacks
from transformers.trainer_utils import speed_metrics

OFF = {"logging_strategy": "no", "evaluation_strategy": "no", "save_strategy": "no"}
LOG, EVALUATE, SAVE, STOP = (
    "should_log",
    "should_evaluate",
    "should_save",
    "should_training_stop",
)


@pytest.fixture
def arguments(tmp_path):
    """Makes TrainingArguments without logging, evaluation or saving, except as given."""
    return lambda **given: TrainingArguments(str(tmp_path), **{**OFF, **given})


def requests(control):
    return {name for name, asked in vars(control).items() if asked}


# ---- when to act ----


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, {10: {STOP}}),
        ({"logging_first_step": True}, {1: {LOG}, 10: {STOP}}),
        ({"logging_strategy": "steps", "logging_steps": 4}, {4: {LOG}, 8: {LOG}, 10: {STOP}}),
        ({"evaluation_strategy": "steps", "eval_steps": 5}, {5: {EVALUATE}, 10: {EVALUATE, STOP}}),
        ({"evaluation_strategy": "steps", "logging_steps": 7}, {7: {EVALUATE}, 10: {STOP}}),
        (
            {"save_strategy": "steps", "save_steps": 3},
            {3: {SAVE}, 6: {SAVE}, 9: {SAVE}, 10: {STOP}},
        ),
        (
            {
                **{"logging_strategy": "steps", "logging_steps": 5, "logging_first_step": True},
                **{"evaluation_strategy": "epoch", "save_strategy": "steps", "save_steps": 10},
            },
            {1: {LOG}, 5: {LOG}, 10: {LOG, SAVE, STOP}},
        ),
        (dict.fromkeys(OFF, "epoch"), {10: {STOP}}),
    ],
)
def test_default_flow_at_a_step_s_end(arguments, settings, steps):
    args, flow = arguments(**settings), callbacks.DefaultFlowCallback()
    for step in range(1, 12):
        control = TrainerControl()
        flow.on_step_end(args, TrainerState(global_step=step, max_steps=10), control)
        assert requests(control) == steps.get(step, {STOP} if step > 10 else set())


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, set()),
        (dict.fromkeys(OFF, "steps"), set()),
        ({"logging_strategy": "epoch"}, {LOG}),
        ({"evaluation_strategy": "epoch"}, {EVALUATE}),
        ({"save_strategy": "epoch"}, {SAVE}),
        (dict.fromkeys(OFF, "epoch"), {LOG, EVALUATE, SAVE}),
    ],
)
def test_default_flow_at_an_epoch_s_end(arguments, settings, asked):
    control = TrainerControl()
    callbacks.DefaultFlowCallback().on_epoch_end(arguments(**settings), TrainerState(), control)
    assert requests(control) == asked


def test_default_flow_keeps_requests_of_other_callbacks(arguments):
    flow, state = callbacks.DefaultFlowCallback(), TrainerState(global_step=1, max_steps=10)
    for event in (flow.on_step_end, flow.on_epoch_end):
        control = TrainerControl(True, False, True, True, True)
        event(arguments(), state, control)
        assert requests(control) == {LOG, EVALUATE, SAVE, STOP}


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ((1, 2, 3), (0, 0, 0)),
        ((1, 1.5, 2), (0, 1, 2)),  # a gain has to be above the threshold
        ((1, 1.25, 1.75, 2.5), (0, 1, 2, 0)),  # measured by the best, which small gains raise
        ((1, 0, 1, 1.75), (0, 1, 2, 0)),
        ((math.nan, 1, math.nan, 1.75), (1, 0, 1, 0)),
    ],
)
def test_evaluations_without_an_improvement_are_counted(arguments, greater, values, counts):
    args = arguments(
        **{"load_best_model_at_end": True, "evaluation_strategy": "steps", "eval_steps": 1},
        **{"metric_for_best_model": "score", "greater_is_better": greater},
    )
    stopping = callbacks.EarlyStoppingCallback(2, early_stopping_threshold=0.5)
    control = TrainerControl()
    stopping.on_train_begin(args, TrainerState(), control)
    for value, count in zip(values, counts, strict=True):
        metrics = {"eval_score": value if greater else -value}
        stopping.on_evaluate(args, TrainerState(), control, metrics=metrics)
        assert stopping.early_stopping_patience_counter == count
    assert control.should_training_stop == (2 in counts)


@pytest.mark.parametrize(
    ("patience", "values", "stops"),
    [
        (0, [], False),
        (0, [1], True),
        (2, [2, 1], False),
        (2, [2, 1, 0], True),
        (2, [math.nan, math.nan], True),
    ],
)
def test_a_resumed_run_ends_if_it_had_stopped_early(arguments, patience, values, stops):
    args = arguments(
        **{"load_best_model_at_end": True, "evaluation_strategy": "steps", "eval_steps": 1},
        **{"metric_for_best_model": "score"},
    )
    state, control = TrainerState(), TrainerControl()
    for step, value in enumerate(values, 1):
        state.log_history += [{"loss": 0.5, "step": step}, {"eval_score": value, "step": step}]
    callbacks.EarlyStoppingCallback(patience).on_train_begin(args, state, control)
    assert control.should_training_stop is stops


# ---- bars ----


@pytest.fixture
def bars(monkeypatch):
    """The bars in the order in which they were made; their `.text` is what they wrote."""
    opened, screen = [], io.StringIO()

    class Bar(tqdm):
        text = property(lambda self: screen.getvalue())

        def __init__(self, **settings):
            super().__init__(**settings, file=screen)
            opened.append(self)

        def write(self, line):
            super().write(line, file=screen)

    monkeypatch.setattr(callbacks, "tqdm", Bar)
    return opened


def test_bars_of_a_run_and_its_evaluations(bars, arguments):
    args, progress = arguments(), callbacks.ProgressCallback()
    state = TrainerState(global_step=3, max_steps=8)
    progress.on_train_begin(args, state, None)
    (run,) = bars
    assert (run.n, run.total, run.desc.rstrip(": "), run.leave) == (3, 8, "training", True)
    for state.global_step in (4, 6):
        progress.on_step_end(args, state, None)
        assert run.n == state.global_step
    for _ in range(2):
        progress.on_prediction_step(args, state, None, eval_dataloader=range(5))
    evaluation = bars[1]
    assert (evaluation.n, evaluation.total, evaluation.leave) == (2, 5, False)
    progress.on_log(args, state, None, logs={"loss": 0.25})
    assert "{'loss': 0.25}" in run.text
    progress.on_evaluate(args, state, None)
    assert evaluation.disable  # closed
    assert not run.disable
    progress.on_prediction_step(args, state, None, eval_dataloader=range(4))
    assert (len(bars), bars[2].n, bars[2].total) == (3, 1, 4)
    progress.on_prediction_step(args, state, None, eval_dataloader=range(3), description="other")
    assert [bar.disable for bar in bars] == [False, True, True, False]
    progress.on_predict(args, state, None)
    progress.on_train_end(args, state, None)
    assert all(bar.disable for bar in bars)


def test_the_bar_of_an_evaluation_without_a_run_stays(bars, arguments):
    args, state, progress = arguments(), TrainerState(), callbacks.ProgressCallback()
    progress.on_prediction_step(args, state, None, eval_dataloader=range(1))
    progress.on_log(args, state, None, logs={"eval_loss": 0.5})
    progress.on_evaluate(args, state, None)
    (bar,) = bars
    assert bar.leave
    assert "eval_loss" not in bar.text


def test_a_new_run_closes_the_bar_of_an_interrupted_one(bars, arguments):
    args, progress = arguments(), callbacks.ProgressCallback()
    for _ in range(2):
        progress.on_train_begin(args, TrainerState(max_steps=8), None)
    assert [bar.disable for bar in bars] == [True, False]
    assert bars[1].leave
    progress.on_train_end(args, TrainerState(), None)


def test_other_processes_show_nothing(bars, arguments):
    args, progress = arguments(), callbacks.ProgressCallback()
    state = TrainerState(max_steps=8, is_world_process_zero=False)
    progress.on_train_begin(args, state, None)
    progress.on_step_end(args, state, None)
    progress.on_prediction_step(args, state, None, eval_dataloader=range(5))
    progress.on_log(args, state, None, logs={})
    progress.on_evaluate(args, state, None)
    progress.on_train_end(args, state, None)
    assert not bars


def test_printer_prints_records_of_training_alone(arguments, capsys):
    """`log_metrics` prints evaluations outside of a run, and a run's summary."""
    args, printer = arguments(), callbacks.PrinterCallback()
    state = TrainerState(global_step=3, max_steps=8)
    for main in (True, False):
        state.is_world_process_zero = main
        printer.on_log(args, state, None, logs={"eval_loss": 0.75})
        printer.on_train_begin(args, state, None)
        printer.on_log(args, state, None, logs={"loss": 0.25})
        printer.on_log(args, state, None, logs={"train_runtime": 9.0})
        printer.on_train_end(args, state, None)
        printer.on_log(args, state, None, logs={"eval_loss": 0.5})
        assert capsys.readouterr().out == ("{'loss': 0.25}\n" if main else "")


@pytest.mark.parametrize("kind", [callbacks.ProgressCallback, callbacks.PrinterCallback])
def test_a_log_level_above_info_hides_records(bars, arguments, capsys, kind):
    args, state, callback = arguments(log_level="warning"), TrainerState(max_steps=8), kind()
    callback.on_train_begin(args, state, None)
    callback.on_log(args, state, None, logs={"loss": 0.25})
    callback.on_train_end(args, state, None)
    assert "loss" not in "".join([capsys.readouterr().out, *(bar.text for bar in bars)])


# ---- records, speed and strategies ----


def test_log_does_not_change_its_argument(make_trainer):
    trainer = make_trainer()
    trainer.state.epoch, trainer.state.global_step = 1.23456, 7
    given = {"loss": 0.5}
    trainer.log(given)
    assert given == {"loss": 0.5}
    assert trainer.state.log_history == [{"loss": 0.5, "epoch": 1.23, "step": 7}]
    trainer.state.epoch = None
    trainer.log(given)
    assert trainer.state.log_history[1] == {"loss": 0.5, "step": 7}


@pytest.mark.parametrize(
    ("passed", "samples", "expected"),
    [
        (4.0, 10, {"x_runtime": 4.0, "x_samples_per_second": 2.5}),
        (3.14159265, 22, {"x_runtime": 3.1416, "x_samples_per_second": 7.003}),
        (2.0, None, {"x_runtime": 2.0}),
        (2.0, 0, {"x_runtime": 2.0, "x_samples_per_second": 0.0}),
        (0.0, 1, {"x_runtime": 0.0, "x_samples_per_second": 1e9}),
    ],
)
def test_speed_metrics(monkeypatch, passed, samples, expected):
    monkeypatch.setattr("time.time", lambda: 100.0 + passed)
    assert speed_metrics("x", 100.0, samples) == expected


def test_strategies_can_be_names_or_enums(arguments):
    for given in ("epoch", IntervalStrategy.EPOCH):
        args = arguments(**dict.fromkeys(OFF, given), lr_scheduler_type="cosine")
        assert all(getattr(args, name) is IntervalStrategy.EPOCH for name in OFF)
        assert args.lr_scheduler_type.name == "COSINE"
    for name in (*OFF, "lr_scheduler_type"):
        with pytest.raises(ValueError, match=f"--{name} must be one of .*, not 'sometimes'"):
            arguments(**{name: "sometimes"})
