"""Callbacks of the Trainer: their events, arguments and requests; adding and removing them."""

import itertools
import logging
import math

import pytest
from small_trainers import Line, make_line_trainer, make_points
from torch.utils.data import IterableDataset

from transformers import (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_callback import CallbackHandler

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Events(TrainerCallback):
    """Records the events in order, their epochs, and the keyword arguments of the last of each."""

    def __init__(self):
        self.names, self.epochs, self.given = [], [], {}


def _recorder(name):
    def event(self, args, state, control, **given):
        self.names.append(name)
        self.epochs.append(state.epoch)
        self.given[name] = given

    return event


for event_name in EVENTS:
    setattr(Events, event_name, _recorder(event_name))


@pytest.fixture
def make(tmp_path):
    """See `make_line_trainer`; by default with two batches per epoch."""

    def make(kind=Trainer, **settings):
        settings = {"per_device_train_batch_size": 10, **settings}
        return make_line_trainer(tmp_path / "out", kind, **settings)

    return make


# ---- order of events ----

STEP = ["on_step_begin", "on_step_end"]
EVALUATION = [*["on_prediction_step"] * 3, "on_log", "on_evaluate"]
END = ["on_log", "on_train_end"]


def epoch(*events):
    return ["on_epoch_begin", *events, "on_epoch_end"]


@pytest.mark.parametrize(
    ("settings", "events"),
    [
        ({}, [*epoch(*STEP, *STEP)] * 2),
        ({"logging_steps": 2}, [*epoch(*STEP, *STEP, "on_log")] * 2),
        (
            {"evaluation_strategy": "steps", "eval_steps": 3},
            [*epoch(*STEP, *STEP), *epoch(*STEP, *EVALUATION, *STEP)],
        ),
        ({"evaluation_strategy": "epoch"}, [*epoch(*STEP, *STEP), *EVALUATION] * 2),
        (
            {"save_strategy": "epoch", "logging_strategy": "epoch"},
            [*epoch(*STEP, *STEP), "on_log", "on_save"] * 2,
        ),
        (
            {"logging_steps": 1, "save_strategy": "steps", "save_steps": 3, "max_steps": 3},
            [*epoch(*STEP, "on_log", *STEP, "on_log"), *epoch(*STEP, "on_log", "on_save")],
        ),
        (
            {"gradient_accumulation_steps": 2},
            [*epoch("on_step_begin", "on_substep_end", "on_step_end")] * 2,
        ),
    ],
)
def test_events_of_a_run(make, settings, events):
    recorded = Events()
    make(callbacks=[recorded], **settings).train()
    assert recorded.names == ["on_init_end", "on_train_begin", *events, *END]
    assert recorded.epochs[:3] == [None, 0, 0]
    assert recorded.epochs[1:] == sorted(recorded.epochs[1:])


def test_events_of_an_evaluation_and_a_prediction(make):
    recorded = Events()
    trainer = make(callbacks=[recorded])
    trainer.evaluate()
    assert recorded.names[1:] == EVALUATION
    recorded.names.clear()
    trainer.predict(trainer.eval_dataset)
    assert recorded.names == ["on_prediction_step"] * 3 + ["on_predict"]


# ---- arguments ----


def test_arguments_of_the_events(make):
    recorded = Events()
    trainer = make(callbacks=[recorded], evaluation_strategy="epoch", logging_steps=1)
    trainer.train()
    everywhere = {"model", "tokenizer", "optimizer", "lr_scheduler"}
    everywhere |= {"train_dataloader", "eval_dataloader"}
    own = {"on_log": {"logs"}, "on_evaluate": {"metrics"}, "on_prediction_step": {"description"}}
    for name, given in recorded.given.items():
        assert given.keys() == everywhere | own.get(name, set()), name
        assert given["model"] is trainer.model
    assert recorded.given["on_init_end"]["optimizer"] is None
    at_step = recorded.given["on_step_end"]
    assert at_step["optimizer"] is trainer.optimizer
    assert at_step["lr_scheduler"] is trainer.lr_scheduler
    assert len(at_step["train_dataloader"]) == 2
    assert at_step["eval_dataloader"] is None
    trainer.predict(trainer.eval_dataset)
    for name in ("on_prediction_step", "on_evaluate", "on_predict"):
        assert len(recorded.given[name]["eval_dataloader"]) == 3, name
    for name in ("on_evaluate", "on_predict"):
        assert "eval_loss" in recorded.given[name]["metrics"], name
    assert "train_loss" in recorded.given["on_log"]["logs"]


def test_callbacks_are_given_a_model_that_replaces_the_first_one(make):
    recorded = Events()
    trainer = make(callbacks=[recorded])
    trainer.model = other = Line()
    trainer.train()
    trainer.evaluate()
    for name in ("on_train_begin", "on_step_end", "on_evaluate"):
        assert recorded.given[name]["model"] is other


# ---- requests ----


def asking(event, request):
    """Makes a callback class that makes a request at an event."""

    def ask(self, args, state, control, **given):
        setattr(control, request, True)

    return type("Asking", (TrainerCallback,), {event: ask})


@pytest.mark.parametrize(
    ("event", "request_name", "steps"),
    [
        ("on_step_begin", "should_training_stop", 1),
        ("on_substep_end", "should_training_stop", 0),
        ("on_step_end", "should_training_stop", 1),
        ("on_epoch_begin", "should_training_stop", 1),
        ("on_epoch_end", "should_training_stop", 2),
        ("on_train_begin", "should_training_stop", 0),
        ("on_step_end", "should_epoch_stop", 3),
        ("on_epoch_end", "should_epoch_stop", 6),
    ],
)
def test_callbacks_can_stop_a_run_or_an_epoch(make, event, request_name, steps):
    settings = {"num_train_epochs": 3}
    if event == "on_substep_end":
        settings["gradient_accumulation_steps"] = 2
    trainer = make(callbacks=[asking(event, request_name)], **settings)
    result = trainer.train()
    assert result.global_step == steps
    assert math.isfinite(result.training_loss)


class Endless(IterableDataset):
    """An iterable dataset of points without an end."""

    def __iter__(self):
        return itertools.cycle(make_points(20))


@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
@pytest.mark.parametrize("saves", ["epoch", "steps"])
@pytest.mark.parametrize("step", [1, 2])
def test_resuming_after_a_stopped_epoch_begins_with_the_next_one(
    make, tmp_path, step, saves, event
):
    settings = {"callbacks": [asking(event, "should_epoch_stop")], "num_train_epochs": 3}
    settings |= {"logging_steps": 1}
    whole = make(save_strategy=saves, save_steps=1, **settings)
    whole.train()
    epochs = [record["epoch"] for record in whole.state.log_history if "loss" in record]
    assert epochs == [0.5, 1.5, 2.5]
    resumed = make(**settings)
    assert resumed.train(str(tmp_path / "out" / f"checkpoint-{step}")).global_step == 3
    assert resumed.model.a.item() == whole.model.a.item()


def test_resuming_after_a_stopped_epoch_of_an_endless_stream(make, tmp_path):
    settings = {"callbacks": [asking("on_step_end", "should_epoch_stop")], "max_steps": 2}
    settings |= {"train_dataset": Endless()}
    whole = make(save_strategy="steps", save_steps=1, **settings)
    whole.train()
    resumed = make(**settings)
    resumed.train(str(tmp_path / "out" / "checkpoint-1"))
    assert resumed.model.a.item() == whole.model.a.item()


def test_a_callback_may_return_another_control(make):
    class Returning(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            return TrainerControl(should_training_stop=state.global_step == 3)

    assert make(callbacks=[Returning], num_train_epochs=9).train().global_step == 3


def test_requests_are_reset_by_their_events(make):
    handler = make().callback_handler
    control = TrainerControl(True, True, True, True, True)
    state = TrainerState(max_steps=5)
    args = make().args
    handler.on_log(args, state, control, {})
    assert not control.should_log
    handler.on_evaluate(args, state, control, {})
    assert not control.should_evaluate
    handler.on_save(args, state, control)
    assert not control.should_save
    control.should_log = control.should_evaluate = control.should_save = True
    handler.on_epoch_begin(args, state, control)
    assert not control.should_epoch_stop
    handler.on_step_begin(args, state, control)
    assert control == TrainerControl(should_training_stop=True)
    assert handler.on_train_begin(args, state, control) is control
    assert not control.should_training_stop


# ---- adding and removing ----


def kinds(trainer):
    return [type(callback) for callback in trainer.callback_handler.callbacks]


def test_default_callbacks(make):
    assert kinds(make()) == [DefaultFlowCallback, PrinterCallback]
    assert kinds(make(disable_tqdm=False)) == [DefaultFlowCallback, ProgressCallback]
    assert kinds(make(callbacks=[Events()])) == [DefaultFlowCallback, Events, PrinterCallback]


def test_a_callback_may_remove_itself_when_it_is_called(make):
    """The callback after it is called nevertheless."""

    class Once(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **given):
            trainer.remove_callback(self)

    recorded = Events()
    trainer = make(callbacks=[Once, recorded])
    trainer.train()
    assert recorded.names.count("on_epoch_begin") == 2


@pytest.mark.parametrize("by_class", [True, False])
def test_callbacks_can_be_added_and_removed(make, by_class):
    trainer = make()
    flow = trainer.callback_handler.callbacks[0]
    taken = trainer.pop_callback(DefaultFlowCallback if by_class else flow)
    assert taken is flow
    assert kinds(trainer) == [PrinterCallback]
    assert trainer.pop_callback(DefaultFlowCallback) is None
    trainer.add_callback(DefaultFlowCallback if by_class else flow)
    assert kinds(trainer) == [PrinterCallback, DefaultFlowCallback]
    trainer.remove_callback(DefaultFlowCallback if by_class else flow)
    trainer.remove_callback(PrinterCallback)
    assert kinds(trainer) == []


def test_a_callback_is_removed_by_the_name_of_its_base_class(make):
    """Such as a printer of one's own in place of the default one."""

    class Silent(PrinterCallback):
        def on_log(self, *given, **more):
            pass

    trainer = make(callbacks=[Silent])
    trainer.remove_callback(PrinterCallback)
    assert kinds(trainer) == [DefaultFlowCallback, PrinterCallback]
    assert trainer.pop_callback(TrainerCallback) is not None
    assert kinds(trainer) == [PrinterCallback]


def test_a_run_without_default_callbacks_still_runs(make):
    """Nothing requests a log or the end; the run ends with its data."""
    trainer = make()
    trainer.remove_callback(DefaultFlowCallback)
    assert trainer.train().global_step == 4


def test_two_callbacks_of_a_class_give_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        CallbackHandler([Events, Events()])
    assert "Events'> among the callbacks already" in caplog.text
