"""load_best_model_at_end saves at every evaluation, and loads the best model in the end."""

import math
import shutil
from pathlib import Path

import pytest
from compare import assert_same_bits
from trainer_runs import largest_difference, sequence, trained

from loralib.adapters.formats import read_adapter
from loralib.errors import CheckpointError
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.trainer_utils import list_checkpoints

pytestmark = pytest.mark.slow

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "score", "save_strategy": "steps"}
# Of ten updates: when to evaluate, the scores, and the step of the best model.
RUNS = {
    "default saving": ({"evaluation_strategy": "steps", "eval_steps": 4}, (2, 1), 4),
    "save_steps does not divide": (
        {"evaluation_strategy": "steps", "eval_steps": 3, "save_steps": 5},
        (1, 3, 2),
        6,
    ),
    "save_steps is larger": (
        {"evaluation_strategy": "steps", "eval_steps": 3, "save_steps": 6},
        (3, 2, 1),
        3,
    ),
    "eval_steps from logging_steps": (
        {"evaluation_strategy": "steps", "logging_steps": 5},
        (1, 0),
        5,
    ),
    "another strategy": ({"evaluation_strategy": "epoch"}, (2, 1), 5),
    "no saving": ({"evaluation_strategy": "epoch", "save_strategy": "no"}, (2, 1), 5),
    "lower is better": (
        {"evaluation_strategy": "steps", "eval_steps": 2, "greater_is_better": False},
        (3, 2, 1, 4, 5),
        6,
    ),
    "not a number at first": (
        {"evaluation_strategy": "steps", "eval_steps": 3},
        (math.nan, 1, math.nan),
        6,
    ),
}


@pytest.mark.parametrize(("settings", "scores", "best"), RUNS.values(), ids=RUNS)
def test_a_run_ends_with_its_best_model(make_trainer, tmp_path, settings, scores, best):
    trainer = make_trainer(compute_metrics=sequence(*scores), **{**BEST, **settings})
    trainer.train()
    folder = tmp_path / "out" / f"checkpoint-{best}"
    assert trainer.state.best_model_checkpoint == str(folder)
    assert_same_bits(trained(trainer.model), read_adapter(folder).tensors)
    last = read_adapter(list_checkpoints(tmp_path / "out")[-1]).tensors
    assert largest_difference(trained(trainer.model), last) > 1e-4
    steps = [r["step"] for r in trainer.state.log_history if "eval_score" in r]
    saved = [int(path.rpartition("-")[2]) for path in list_checkpoints(tmp_path / "out")]
    assert saved == steps


class EvaluateAt(TrainerCallback):
    """Requests evaluations at the given steps."""

    def __init__(self, *steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate |= state.global_step in self.steps


def test_an_evaluation_requested_by_a_callback_is_saved(make_trainer):
    trainer = make_trainer(
        compute_metrics=sequence(1, 9, 2),
        callbacks=[EvaluateAt(7)],
        evaluation_strategy="epoch",
        **BEST,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-7")


@pytest.mark.parametrize(
    ("settings", "scores"),
    [({"eval_steps": 50}, ()), ({"eval_steps": 5}, (math.nan, math.nan))],
    ids=["shorter than eval_steps", "not numbers"],
)
def test_a_run_without_a_best_model_warns(make_trainer, caplog, settings, scores):
    trainer = make_trainer(
        compute_metrics=sequence(*scores), evaluation_strategy="steps", **BEST, **settings
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is None
    message = "no evaluation found a best model in 10 steps, so the run ends with its last"
    assert caplog.text.count(message) == 1


def test_a_run_with_a_best_model_does_not_warn(make_trainer, caplog):
    trainer = make_trainer(compute_metrics=sequence(1, 2), evaluation_strategy="epoch", **BEST)
    trainer.train()
    assert "no evaluation found" not in caplog.text


def test_a_best_checkpoint_that_was_deleted_is_an_error(make_trainer, tmp_path):
    class Delete(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            state.best_model_checkpoint = str(tmp_path / "out" / "checkpoint-5")

        def on_epoch_begin(self, args, state, control, **kwargs):
            shutil.rmtree(tmp_path / "out" / "checkpoint-5", ignore_errors=True)

    trainer = make_trainer(
        compute_metrics=sequence(2, 1), callbacks=[Delete()], evaluation_strategy="epoch", **BEST
    )
    with pytest.raises(CheckpointError, match="checkpoint-5"):
        trainer.train()


STEPS = {"evaluation_strategy": "steps", "eval_steps": 2, "save_steps": 2, **BEST}


def resumed(make_trainer, tmp_path, *scores, folder="out", **settings):
    """Resumes a run of ten steps at the sixth; the remaining evaluations have these scores."""
    shutil.rmtree(tmp_path / folder / "checkpoint-8", ignore_errors=True)
    shutil.rmtree(tmp_path / folder / "checkpoint-10", ignore_errors=True)
    trainer = make_trainer(
        compute_metrics=sequence(*scores),
        **{**STEPS, "output_dir": str(tmp_path / folder), **settings},
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-6"))
    return trainer


def best_of(trainer, tmp_path):
    return Path(trainer.state.best_model_checkpoint).relative_to(tmp_path).as_posix()


def test_a_copied_run_loads_the_best_model_of_the_copy(make_trainer, tmp_path):
    make_trainer(compute_metrics=sequence(1, 4, 2, 3, 0), **STEPS).train()
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert best_of(resumed(make_trainer, tmp_path, 3, 0, folder="copy"), tmp_path) == (
        "copy/checkpoint-4"
    )


def test_a_missing_best_checkpoint_is_replaced_by_the_best_remaining_one(
    make_trainer, tmp_path, caplog
):
    make_trainer(compute_metrics=sequence(1, 4, 2, 3, 0), **STEPS).train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    assert best_of(resumed(make_trainer, tmp_path, 1, 0), tmp_path) == "out/checkpoint-6"
    warning = "out/checkpoint-4; the best of the remaining checkpoints is "
    assert warning in caplog.text


def test_resuming_with_another_metric_compares_all_evaluations(make_trainer, tmp_path):
    make_trainer(compute_metrics=sequence(1, 4, 2, 3, 0), **STEPS).train()
    trainer = resumed(make_trainer, tmp_path, 9, 9, metric_for_best_model="loss")
    losses = {r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r}
    assert trainer.state.best_metric == min(losses.values())
    assert best_of(trainer, tmp_path) == f"out/checkpoint-{min(losses, key=losses.get)}"
    trainer = resumed(make_trainer, tmp_path, 3, 0, greater_is_better=False)
    assert best_of(trainer, tmp_path) == "out/checkpoint-10"


def test_early_stopping_counts_gains_below_the_threshold_and_nan(make_trainer):
    """As in 4.4.2, a gain up to the threshold sets a new best without resetting the counter."""
    stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.1)
    scores = (0.5, 0.56, 0.62, 0.68, 0.74)
    trainer = make_trainer(compute_metrics=sequence(*scores), callbacks=[stop], **STEPS)
    assert trainer.train().global_step == 6
    # NaN is no gain, not even as the first score.
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    scores = (math.nan, math.nan, 0.5, 0.6, 0.7)
    trainer = make_trainer(compute_metrics=sequence(*scores), callbacks=[stop], **STEPS)
    assert trainer.train().global_step == 4


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_the_save_strategy_follows_the_evaluation_strategy(strategy):
    args = TrainingArguments(
        "out",
        load_best_model_at_end=True,
        evaluation_strategy=strategy,
        eval_steps=7,
        save_strategy="no",
    )
    assert args.save_strategy is args.evaluation_strategy
    assert args.save_steps == (7 if strategy == "steps" else 500)
    alone = TrainingArguments("out", evaluation_strategy=strategy, eval_steps=7)
    assert (alone.save_strategy.value, alone.save_steps) == ("steps", 500)


@pytest.mark.parametrize(
    ("scores", "best", "last"),
    [((math.nan, 3, 1, 2), 4, 8), ((5, math.nan, math.nan), 2, 6)],
    ids=["at first", "later"],
)
def test_early_stopping_counts_nan_as_no_gain(make_trainer, scores, best, last):
    trainer = make_trainer(
        compute_metrics=sequence(*scores),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        evaluation_strategy="steps",
        eval_steps=2,
        **BEST,
    )
    assert trainer.train().global_step == last
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
