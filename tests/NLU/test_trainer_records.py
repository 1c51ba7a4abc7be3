"""What a run records, logs and draws, and where it reports."""

import copy
import errno
import functools
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from small_trainers import Line, make_line_trainer
from trainer_runs import make_data, sequence, without_runtimes

from loralib.errors import DiskFullError
from loralib.training import curves
from loralib.training.curves import CURVES_NAME, HOW_TO_GET_IT, is_matplotlib_available
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import (
    CurvesCallback,
    TensorBoardCallback,
    WandbCallback,
    is_tensorboard_available,
    is_wandb_available,
)


def reporters(trainer) -> list[type]:
    kinds = (TensorBoardCallback, WandbCallback, CurvesCallback)
    return [type(c) for c in trainer.callback_handler.callbacks if isinstance(c, kinds)]


INSTALLED = [
    kind
    for kind, available in (
        (TensorBoardCallback, is_tensorboard_available()),
        (WandbCallback, is_wandb_available()),
        (CurvesCallback, is_matplotlib_available()),
    )
    if available
]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [([], []), (["none"], []), (None, INSTALLED), (["all"], INSTALLED)],
)
def test_report_to_chooses_the_reporting_callbacks(make_trainer, asked, expected):
    assert reporters(make_trainer(report_to=asked)) == expected


# ---- learning curves ----


@pytest.fixture
def drawn(monkeypatch):
    """Collects the values of each picture that is drawn, by panel and line."""
    pictures, draw = [], curves._draw

    def record(panels):
        pictures.append(panels)
        return draw(panels)

    monkeypatch.setattr(curves, "_draw", record)
    return pictures


PLOT = {"report_to": ["plot"], "logging_steps": 2, "evaluation_strategy": "epoch"}


def test_a_run_is_drawn_at_its_end(make_trainer, tmp_path, drawn):
    pytest.importorskip("matplotlib")
    trainer = make_trainer(**PLOT, compute_metrics=lambda p: {"spread": float(p.predictions.std())})
    trainer.train()
    (panels,) = drawn
    history = trainer.state.log_history
    by_step = {name: {r["step"]: r[name] for r in history if name in r} for name in NAMES}
    assert panels == {
        "loss": {"training": by_step["loss"], "evaluation": by_step["eval_loss"]},
        "learning rate": {"learning rate": by_step["learning_rate"]},
        "spread": {"spread": by_step["eval_spread"]},
    }
    assert list(by_step["loss"]) == [2, 4, 6, 8, 10]
    assert list(by_step["eval_loss"]) == [5, 10]
    assert (tmp_path / "out" / CURVES_NAME).read_bytes().startswith(b"\x89PNG")


NAMES = ("loss", "learning_rate", "eval_loss", "eval_spread")


def test_a_resumed_run_is_drawn_as_a_whole(make_trainer, drawn):
    pytest.importorskip("matplotlib")
    for resume, more in ((False, {}), (True, {"num_train_epochs": 3})):
        settings = {**PLOT, "save_strategy": "epoch", "num_train_epochs": 2, **more}
        make_trainer(**settings).train(resume_from_checkpoint=resume)
    first, whole = (panels["loss"] for panels in drawn)
    assert list(first["evaluation"]) == [5, 10]
    assert list(whole["evaluation"]) == [5, 10, 15]
    assert first["training"].items() <= whole["training"].items()


def test_an_evaluation_after_the_run_is_drawn_as_well(make_trainer, drawn):
    pytest.importorskip("matplotlib")
    trainer = make_trainer(**{**PLOT, "evaluation_strategy": "no"})
    trainer.evaluate()
    assert not drawn  # there is no run yet
    trainer.train()
    trainer.evaluate()
    assert [list(panels["loss"]) for panels in drawn] == [["training"], ["training", "evaluation"]]
    trainer.evaluate(make_data(3))  # another set, perhaps
    assert len(drawn) == 2


def test_a_run_that_evaluated_its_last_weights_is_drawn_once(make_trainer, drawn):
    pytest.importorskip("matplotlib")
    trainer = make_trainer(**PLOT)
    trainer.train()
    trainer.evaluate()
    assert len(drawn) == 1


def test_an_evaluation_after_a_search_is_not_drawn(make_trainer, drawn):
    pytest.importorskip("matplotlib")
    trainer = make_trainer(**{**PLOT, "evaluation_strategy": "no"})
    trainer.train()
    trainer.state.is_hyper_param_search = True
    trainer.evaluate()
    assert len(drawn) == 1


def test_the_last_step_s_evaluation_is_drawn_once_after_earlier_ones(make_trainer, drawn):
    trainer = make_trainer(**PLOT)
    state = TrainerState(max_steps=4, global_step=4)
    state.log_history = [{"eval_loss": 0.5, "step": step} for step in (2, 4)]
    CurvesCallback().on_evaluate(trainer.args, state, None)
    assert len(drawn) == 1
    state.log_history *= 2  # evaluated once more
    CurvesCallback().on_evaluate(trainer.args, state, None)
    assert len(drawn) == 1


def test_an_evaluation_of_the_best_model_is_not_drawn_as_the_last_step_s(make_trainer, drawn):
    pytest.importorskip("matplotlib")
    trainer = make_trainer(**PLOT, load_best_model_at_end=True)
    trainer.train()
    trainer.evaluate()
    assert len(drawn) == 1


def test_other_processes_draw_nothing(make_trainer, drawn):
    trainer = make_trainer(**PLOT)
    callback = CurvesCallback()
    state = trainer.state
    state.log_history = [{"loss": 0.5, "step": 1}]
    state.is_world_process_zero = False
    callback.on_train_end(trainer.args, state, None)
    assert not drawn
    assert callback.path is None


@pytest.mark.parametrize(
    ("asked", "levels"), [(["plot"], ["WARNING"]), (["all"], ["INFO"]), (["none"], []), ([], [])]
)
def test_without_matplotlib_a_run_reports_it_once(
    make_trainer, monkeypatch, tmp_path, caplog, asked, levels
):
    for name in ("matplotlib", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    settings = {**PLOT, "report_to": asked, "do_train": True, "log_level": "info"}
    make_trainer(**settings).train()
    found = [r.levelname for r in caplog.records if r.getMessage() == HOW_TO_GET_IT]
    assert found == levels
    assert not (tmp_path / "out" / CURVES_NAME).exists()


# ---- logs ----


def test_tables_of_a_run_s_settings_and_results_are_logged(
    make_trainer, tmp_path, caplog, tiny_base
):
    settings = {**PLOT, "report_to": ["none"], "log_level": "info", "save_strategy": "epoch"}
    trainer = make_trainer(**settings)
    trainer.train()
    trainer.log_end()
    rows = logged(caplog, "training")
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in trainer.model.parameters())
    assert rows == {
        "model": f"RobertaForSequenceClassification, {tiny_base}",
        "adapted by": "LoRA of rank 4, alpha 8, in 4 modules: query, value",
        "trained": f"{trained:,} of {total:,} ({100 * trained / total:.2f} %) parameters",
        "precision": "float32",
        "devices": "cpu",
        "training set": "20 examples",
        "evaluated on": "9 examples",
        "steps": "10 of 4 examples each, 2 epochs",
        "learning rate": f"{trainer.args.learning_rate:g}",
        "output": str(tmp_path / "out"),
    }
    rows = logged(caplog, "finished")
    losses = {r["eval_loss"]: r["step"] for r in trainer.state.log_history if "eval_loss" in r}
    step = losses[min(losses)]  # an epoch has five
    best = f"step {step}, epoch {step // 5}: loss {min(losses):.4g} (by loss)"
    assert rows["best"] == best
    assert "; 10 steps in " in rows["trained"]
    assert rows["files"] == str(tmp_path / "out")

    caplog.clear()
    again = make_trainer(**{**settings, "num_train_epochs": 3})
    again.train(resume_from_checkpoint=True)
    folder = tmp_path / "out" / "checkpoint-10"
    assert logged(caplog, "training")["resuming from"] == f"{folder}, step 10"
    again.log_end()
    assert "; 15 steps, the last 5 in " in logged(caplog, "finished")["trained"]

    caplog.clear()
    again.train(resume_from_checkpoint=True)
    again.log_end()
    assert logged(caplog, "finished")["trained"].endswith("; 15 steps, all before this start")


@pytest.mark.parametrize(
    ("scores", "settings", "best"),
    [
        ((1, 5, 3), {}, "step 10, epoch 2: score 5 (by score); the model is from step 15"),
        ((1, 5, 3), {"load_best_model_at_end": True}, "step 10, epoch 2: score 5 (by score)"),
        ((1, 3, 5), {}, "step 15, epoch 3: score 5 (by score)"),
        ((5, 4, 3), {"greater_is_better": False}, "step 15, epoch 3: score 3 (by score)"),
        ((math.nan, 1, 5), {}, "step 15, epoch 3: score 5 (by score)"),
    ],
)
def test_the_best_evaluation_is_in_the_last_table(make_trainer, caplog, scores, settings, best):
    """With the metrics that are numbers."""
    values = sequence(*scores)
    trainer = make_trainer(
        compute_metrics=lambda predictions: {**values(predictions), "report": "no number"},
        **{"metric_for_best_model": "score", "log_level": "info", "num_train_epochs": 3},
        **{"evaluation_strategy": "epoch", "save_strategy": "epoch", **settings},
    )
    trainer.train()
    trainer.log_end()
    assert logged(caplog, "finished")["best"] == best


def test_the_best_evaluation_may_be_before_the_first_step(make_trainer, caplog):
    class Before(TrainerCallback):
        def on_train_begin(self, args, state, control, **given):
            trainer.evaluate()

    trainer = make_trainer(
        compute_metrics=sequence(5, 1),
        callbacks=[Before()],
        **{"metric_for_best_model": "score", "log_level": "info", "num_train_epochs": 1},
    )
    trainer.train()
    trainer.log_end()
    best = logged(caplog, "finished")["best"]
    assert best == "step 0, epoch 0: score 5 (by score); the model is from step 5"


def logged(caplog, heading: str) -> dict[str, str]:
    """Returns the rows of the table that is logged under a heading, by name."""
    (table,) = (text for text in caplog.messages if text.startswith(f"{heading}\n"))
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in table.splitlines()[1:])


def test_one_step_and_one_epoch_are_in_the_singular(make_trainer, caplog):
    """An epoch shorter than an accumulation makes a step of all its examples."""
    settings = {"log_level": "info", "num_train_epochs": 1, "per_device_train_batch_size": 8}
    trainer = make_trainer(**settings, gradient_accumulation_steps=5)
    trainer.train()
    trainer.log_end()
    assert logged(caplog, "training")["steps"] == "1 of 20 examples, 1 epoch"
    assert "; 1 step in " in logged(caplog, "finished")["trained"]


def test_a_loss_logged_within_the_first_step_has_a_line(make_trainer, caplog):
    class Logs(Trainer):
        """It logs the loss before the step is done."""

        def compute_loss(self, model, inputs, return_outputs=False):
            loss = super().compute_loss(model, inputs)
            self.log({"loss": 0.5})
            return loss

    make_trainer(kind=Logs, log_level="info", max_steps=2).train()
    first, second = (line for line in caplog.messages if line.startswith("step "))
    assert re.fullmatch(r"step 0 of 2: loss 0\.5(, epoch \S+)?", first)
    assert re.fullmatch(r"step 1 of 2: loss 0\.5, epoch [\d.]+; .+ left", second)


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_logs_the_tables(make_trainer, caplog, monkeypatch, main):
    monkeypatch.setattr(TrainingArguments, "is_main_process", main)
    trainer = make_trainer()
    caplog.set_level("INFO")
    trainer.train()
    trainer.log_end()
    trainer.log_metrics("eval", {"eval_loss": 0.25})
    tables = [text.partition("\n")[0] for text in caplog.messages if "\n" in text]
    assert tables == ["training", "finished", "***** eval metrics *****"] * main


def test_any_module_is_named_by_its_class(tmp_path, caplog):
    """And a user's own optimizer has its own rates."""
    model = Line()
    groups = [{"params": [model.a], "lr": 0.02}, {"params": [model.b]}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    settings = {"log_level": "info", "optimizers": (optimizer, None)}
    make_line_trainer(tmp_path, model=model, warmup_steps=2, **settings).train()
    rows = logged(caplog, "training")
    assert (rows["model"], rows["adapted by"]) == ("Line", "nothing")
    assert rows["learning rate"] == "0.02, 0.01"


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_writes_results(make_trainer, tmp_path, monkeypatch, main):
    monkeypatch.setattr(TrainingArguments, "is_main_process", main)
    trainer = make_trainer(output_dir=str(tmp_path))
    trainer.save_state()
    trainer.save_metrics("eval", {"eval_loss": 0.5})
    names = {"trainer_state.json", "eval_results.json", "all_results.json"}
    assert {path.name for path in tmp_path.glob("*.json")} == (names if main else set())


def test_a_run_without_a_log_level_prints_only_records(make_trainer, caplog, capsys):
    trainer = make_trainer(logging_steps=5)
    trainer.train()
    trainer.log_end()
    assert not caplog.messages
    assert capsys.readouterr().out.count("'loss': ") == 2  # printed, as in 4.4


LOGS = {"loss": 0.5, "eval_loss": 0.25, "eval_note": "no number", "epoch": 1}
NAMED = {"train/loss": 0.5, "eval/loss": 0.25, "train/epoch": 1.0}
# The trials of two runs, a search, and another run.
SEARCH = (None, None, "run-0", "run-1", None)


@pytest.mark.parametrize("main", [True, False])
def test_tensorboard_is_given_numbers_by_step(tmp_path, monkeypatch, main):
    """Only by the main process; each trial of a search has its own folder.

    A writer has a thread, which ends when it is closed.
    """
    opened, scalars, closed = [], [], []

    def writer(log_dir):
        opened.append(log_dir)
        return SimpleNamespace(
            add_text=lambda *_: None,
            add_scalar=lambda *scalar: scalars.append(scalar),
            flush=lambda: None,
            close=lambda: closed.append(log_dir),
        )

    module = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    args = TrainingArguments(str(tmp_path), logging_dir="logs")
    state = TrainerState(global_step=3, is_world_process_zero=main)
    callback = TensorBoardCallback()
    for state.trial_name in SEARCH:
        state.is_hyper_param_search = state.trial_name is not None
        callback.on_train_begin(args, state, None)
        for _ in range(2):
            callback.on_log(args, state, None, logs=LOGS)
    folders = [os.path.join("logs", name) for name in ("", "run-0", "run-1", "")]
    assert (opened, closed) == ((folders, folders[:-1]) if main else ([], []))
    assert scalars == [(name, value, 3) for name, value in NAMED.items()] * (10 if main else 0)
    del callback
    assert {*closed} == ({*folders} if main else set())


def test_a_full_disk_of_tensorboard_s_is_named(tmp_path, monkeypatch):
    """The system's error has no name once the file is open."""

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module = SimpleNamespace(SummaryWriter=refuse)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    args = TrainingArguments(str(tmp_path), logging_dir=str(tmp_path))
    state = TrainerState(is_world_process_zero=True)
    message = re.escape(f"{tmp_path / 'events.out.tfevents'}: the disk is full")
    with pytest.raises(DiskFullError, match=f"^{message}"):
        TensorBoardCallback().on_log(args, state, None, logs=LOGS)


@pytest.mark.parametrize("main", [True, False])
def test_wandb_is_given_numbers_by_step(tmp_path, monkeypatch, main):
    begun, logged = [], []

    def init(name, config):
        begun.append((name, config["learning_rate"]))
        return SimpleNamespace(log=lambda values, step: logged.append((values, step)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    args = TrainingArguments(str(tmp_path), run_name="mine", learning_rate=0.5)
    state = TrainerState(global_step=3, is_world_process_zero=main)
    callback = WandbCallback()
    for logs in (LOGS, None):
        callback.on_log(args, state, None, logs=logs)
    assert begun == ([("mine", 0.5)] if main else [])
    assert logged == ([(NAMED, 3), ({}, 3)] if main else [])


def test_each_trial_of_a_search_is_a_run_in_wandb(tmp_path, monkeypatch):
    """Within a run, wandb leaves out records of steps that are lower than the last one."""
    begun, ended = [], []

    def init(config, **names):
        begun.append(names)
        finish = functools.partial(ended.append, names)
        return SimpleNamespace(log=lambda values, step: None, finish=finish)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    args = TrainingArguments(str(tmp_path), run_name="mine")
    callback = WandbCallback()
    for name in SEARCH:
        state = TrainerState(is_hyper_param_search=name is not None, trial_name=name)
        callback.on_train_begin(args, state, None)
        callback.on_log(args, state, None, logs=LOGS)
    trials = [{"name": name, "group": "mine"} for name in ("run-0", "run-1")]
    assert begun == [{"name": "mine"}, *trials, {"name": "mine"}]
    assert ended == begun[:-1]


# ---- records ----


def test_two_runs_have_the_same_records(make_trainer, tmp_path):
    runs = []
    for name in ("first", "second"):
        trainer = make_trainer(
            dropout=0.1,
            output_dir=str(tmp_path / name),
            logging_steps=2,
            evaluation_strategy="epoch",
            compute_metrics=lambda p: {"spread": float(p.predictions.std())},
        )
        trainer.train()
        runs.append(trainer.state.log_history)
        # This raises the process's peak of memory for the second run.
        ballast = bytearray(64 * 2**20)
        ballast[:: 2**12] = b"\1" * len(ballast[:: 2**12])
    assert without_runtimes(runs[0]) == without_runtimes(runs[1])
    assert not any("_mem_" in name for run in runs for record in run for name in record)


@pytest.mark.parametrize("skip", [False, True])
def test_memory_metrics_are_in_the_results(make_trainer, skip):
    seen = []
    trainer = make_trainer(skip_memory_metrics=skip)
    trainer.callback_handler.callbacks[0].on_evaluate = lambda *args, metrics, **about: seen.append(
        dict(metrics)
    )
    results = [
        (trainer.train().metrics, "train"),
        (trainer.evaluate(), "eval"),
        (trainer.predict(make_data(3), metric_key_prefix="test").metrics, "test"),
    ]
    for metrics, split in results:
        assert (f"{split}_mem_cpu_peak" in metrics) is not skip
        assert skip or metrics[f"{split}_mem_cpu_peak"] > 10 * 2**20
    assert seen == [results[1][0]]


def test_store_flos_updates_the_state(make_trainer):
    """Subclasses of 4.4's Trainer call it before they save."""
    trainer = make_trainer()
    trainer.train()
    before = trainer.state.total_flos
    trainer._progress.flos = 12
    for _ in range(2):
        trainer.store_flos()
        assert trainer.state.total_flos == before + 12


def test_operations_are_counted_for_the_current_model(make_trainer):
    """Each trial of a search has another model."""
    trainer, inputs = make_trainer(), {"input_ids": torch.ones(2, 3)}
    model = trainer.model
    for weights in (5, 7):
        other = copy.copy(model)
        other.num_parameters = lambda exclude_embeddings, w=weights: w * exclude_embeddings
        trainer.model = other
        assert [trainer.floating_point_ops(inputs) for _ in range(2)] == [6 * 6 * weights] * 2


@pytest.mark.parametrize("inputs", [{}, {"input_ids": [[1, 2]]}, {"inputs_embeds": torch.ones(1)}])
def test_operations_of_a_batch_without_ids_are_not_counted(make_trainer, inputs):
    assert make_trainer().floating_point_ops(inputs) == 0
