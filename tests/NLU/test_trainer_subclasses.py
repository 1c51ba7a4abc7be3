"""Trainers with overridden methods, and models with outputs of several tensors and widths."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_trainers import (
    Line,
    line_of,
    make_line_trainer,
    make_points,
    make_span_trainer,
    make_spans,
)
from torch import nn

from transformers import Trainer, TrainingError
from transformers.trainer_checks import HOOKS_NOT_CALLED
from transformers.trainer_utils import EvalPrediction, PredictionOutput


@pytest.fixture
def make(tmp_path):
    """See `make_line_trainer`."""
    return lambda kind=Trainer, **settings: make_line_trainer(tmp_path / "out", kind, **settings)


def trained(trainer):
    trainer.train()
    return line_of(trainer), trainer.evaluate()["eval_loss"]


# ---- an overridden loss ----


class LabelPopping(Trainer):
    """Takes the labels out of the batch, and computes the loss from the model's outputs."""

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.mse_loss(outputs[0], labels)
        return (loss, outputs) if return_outputs else loss


class Doubling(Trainer):
    """Doubles the model's own loss."""

    def compute_loss(self, model, inputs, return_outputs=False):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (2 * loss, outputs) if return_outputs else 2 * loss


def test_compute_loss_may_pop_labels_from_the_batch(make):
    assert trained(make(LabelPopping)) == trained(make())
    trainer, plain = (make(kind, model=Line(1.0, 2.0)) for kind in (LabelPopping, Trainer))
    found, expected = (t.predict(t.eval_dataset) for t in (trainer, plain))
    assert found.predictions.tolist() == expected.predictions.tolist()
    assert found.label_ids.tolist() == expected.label_ids.tolist()


def test_compute_loss_may_change_the_model_s_loss(make):
    trainer, plain = (make(kind, model=Line(1.0, 2.0)) for kind in (Doubling, Trainer))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(2 * plain.evaluate()["eval_loss"])
    assert trainer.train().training_loss == pytest.approx(2 * plain.train().training_loss, rel=0.2)


# ---- overridden steps ----


class Stepping(Trainer):
    """4.4.2's training step, written out."""

    def training_step(self, model, inputs):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        if self.args.n_gpu > 1:
            loss = loss.mean()
        if self.args.gradient_accumulation_steps > 1 and not self.deepspeed:
            loss = loss / self.args.gradient_accumulation_steps
        if self.use_amp:
            self.scaler.scale(loss).backward()
        elif not (self.use_apex or self.deepspeed):
            loss.backward()
        return loss.detach()


class Saving(Trainer):
    """Writes a file next to each checkpoint; the arguments are 4.4.2's."""

    def _save_checkpoint(self, model, trial, metrics=None):
        super()._save_checkpoint(model, trial, metrics=metrics)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        loss = None if metrics is None else metrics["eval_loss"]
        Path(folder, "own.json").write_text(json.dumps([model.a.item(), loss, trial]))


class Predicting(Trainer):
    """Its prediction step returns the negatives of the predictions."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, predictions, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        return loss, None if predictions is None else -predictions, labels


@pytest.mark.parametrize("accumulated", [1, 2])
def test_training_step_can_be_overridden(make, accumulated):
    first, second = (
        make(kind, gradient_accumulation_steps=accumulated) for kind in (Stepping, Trainer)
    )
    assert trained(first) == trained(second)


@pytest.mark.parametrize("evaluated", ["no", "epoch"])
def test_save_checkpoint_can_be_overridden(make, tmp_path, evaluated):
    trainer = make(Saving, save_strategy="epoch", evaluation_strategy=evaluated)
    trainer.train()
    assert (tmp_path / "out" / "checkpoint-5" / "own.json").is_file()
    written = json.loads((tmp_path / "out" / "checkpoint-10" / "own.json").read_text())
    loss = None if evaluated == "no" else trainer.evaluate()["eval_loss"]
    assert written == [trainer.model.a.item(), loss, None]


def test_prediction_step_can_be_overridden(make):
    trainer, plain = (make(kind, model=Line(1.0, 2.0)) for kind in (Predicting, Trainer))
    found, expected = (t.predict(t.eval_dataset) for t in (trainer, plain))
    assert (-found.predictions).tolist() == expected.predictions.tolist()
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


@pytest.mark.parametrize("returned", [[[torch.zeros(4)]], {"logits": torch.zeros(4)}, [1.0]])
def test_a_prediction_step_that_returns_other_types_is_an_error(make, returned):
    class Odd(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            return None, returned, None

    with pytest.raises(TrainingError, match="prediction_step has to return the loss"):
        make(Odd).predict(make_points(4))


def test_create_optimizer_and_create_scheduler_can_be_overridden(make):
    class Own(Trainer):
        def create_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

        def create_scheduler(self, num_training_steps):
            super().create_scheduler(num_training_steps)
            self.steps = num_training_steps

    trainer = make(Own)
    trainer.train()
    assert trainer.steps == 10
    assert isinstance(trainer.optimizer, torch.optim.SGD)


# ---- an overridden evaluation, as for question answering ----


class Answering(Trainer):
    """Evaluates in two steps: the model's predictions, then metrics that are computed from them."""

    def evaluate(self, eval_dataset=None, ignore_keys=None):
        loader = self.get_eval_dataloader(eval_dataset)
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.prediction_loop(loader, description="Evaluation", ignore_keys=ignore_keys)
        finally:
            self.compute_metrics = compute_metrics
        metrics = self.compute_metrics(EvalPrediction(output.predictions, output.label_ids))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def test_evaluate_can_be_overridden(make, capsys):
    seen = []
    trainer = make(
        Answering,
        model=Line(twice=True),
        compute_metrics=lambda p: seen.append(p) or {"eval_first": float(p.predictions[0][0])},
        evaluation_strategy="epoch",
        disable_tqdm=False,
    )
    trainer.train()
    assert len(seen) == 2
    assert isinstance(seen[0].predictions, tuple)
    assert seen[0].label_ids.tolist() == pytest.approx([p["labels"] for p in make_points(9, 5)])
    assert "eval_first" in trainer.state.log_history[0]
    assert "Evaluation" in capsys.readouterr().err


def test_log_may_add_to_the_metrics_of_an_evaluation(make):
    class Logging(Trainer):
        def log(self, logs):
            if "eval_loss" in logs:
                logs["eval_rmse"] = logs["eval_loss"] ** 0.5
            super().log(logs)

    every = {"evaluation_strategy": "epoch", "save_strategy": "epoch"}
    trainer = make(Logging, metric_for_best_model="rmse", **every)
    trainer.train()
    logged = [each["eval_rmse"] for each in trainer.state.log_history if "eval_rmse" in each]
    assert trainer.state.best_metric == min(logged)


def test_prediction_loop_leaves_out_the_last_batch_with_drop_last(make):
    trainer = make(model=Line(1.0, 2.0), dataloader_drop_last=True)
    whole = trainer.predict(trainer.eval_dataset).predictions.tolist()
    output = trainer.prediction_loop(trainer.get_eval_dataloader(), "kept alone")
    assert output.predictions.tolist() == whole[:8]
    errors = (output.predictions - output.label_ids) ** 2
    assert output.metrics["eval_loss"] == pytest.approx(float(errors.mean()), rel=1e-6)


def test_a_model_without_outputs_is_measured_by_its_loss_alone(make):
    class Silent(Line):
        def forward(self, x, labels):
            return super().forward(x, labels)[:1]

    metrics = make(model=Silent(), compute_metrics=lambda p: {"rows": len(p[0])}).evaluate()
    assert "eval_loss" in metrics
    assert "eval_rows" not in metrics


# ---- several outputs of different widths ----


@pytest.fixture
def make_spans_trainer(tmp_path):
    """See `make_span_trainer`."""
    return lambda **settings: make_span_trainer(tmp_path / "out", **settings)


def test_rows_with_some_of_the_labels_have_no_loss(make_spans_trainer):
    rows = [{name: row[name] for name in ("ids", "start_positions")} for row in make_spans(8)]
    trainer = make_spans_trainer()
    found, whole = (trainer.predict(data) for data in (rows, make_spans(8)))
    assert "eval_loss" in whole.metrics
    assert "eval_loss" not in found.metrics
    assert found.label_ids is None
    for ours, theirs in zip(found.predictions, whole.predictions, strict=True):
        assert (ours == theirs).all()


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_predictions_of_several_tensors_and_widths(make_spans_trainer, steps):
    seen = []
    trainer = make_spans_trainer(
        eval_accumulation_steps=steps, compute_metrics=lambda p: seen.append(p) or {"n": 1}
    )
    assert trainer.label_names == ["start_positions", "end_positions"]
    rows, losses = make_spans(8), []
    metrics = trainer.evaluate()
    start, end = seen[0].predictions
    assert start.shape == end.shape == (8, 6)
    for index, row in enumerate(rows):
        scores = trainer.model.scores.weight[row["ids"]].detach()
        length = len(row["ids"])
        assert start[index, :length].tolist() == scores[:, 0].tolist()
        assert end[index, :length].tolist() == scores[:, 1].tolist()
        assert (start[index, length:] == -100).all()
        targets = torch.tensor([row["start_positions"], row["end_positions"]])
        losses.append(F.cross_entropy(scores.T, targets).item())
    assert metrics["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert [part.tolist() for part in seen[0].label_ids] == [
        [row["start_positions"] for row in rows],
        [row["end_positions"] for row in rows],
    ]


def test_ignore_keys_leaves_outputs_out(make_spans_trainer):
    trainer = make_spans_trainer()
    rows = make_spans(8)
    both = trainer.predict(rows)
    assert isinstance(both, PredictionOutput)
    only = trainer.predict(rows, ignore_keys=["start_logits"])
    assert only.predictions.tolist() == both.predictions[1].tolist()
    assert only.metrics["eval_loss"] == both.metrics["eval_loss"]
    bare = [{"ids": row["ids"]} for row in rows]
    assert trainer.predict(bare, ["start_logits"], "test").predictions.shape == (8, 6)
    trainer.model.config = type("Config", (), {"keys_to_ignore_at_inference": ["end_logits"]})
    assert trainer.predict(rows).predictions.tolist() == both.predictions[0].tolist()
    assert len(trainer.predict(rows, ignore_keys=[]).predictions) == 2


def test_training_with_several_labels(make_spans_trainer):
    trainer = make_spans_trainer(num_train_epochs=20)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2


# ---- label smoothing ----


def test_the_label_smoother_exists_only_if_requested(make):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(1, 3)

        def forward(self, x, labels=None):
            return (self.layer(x[:, None]),)

    rows = [{"x": point["x"], "labels": index % 3} for index, point in enumerate(make_points(8))]
    trainer = make(model=Classifier(), eval_dataset=rows, label_smoothing_factor=0.2)
    assert trainer.label_smoother.epsilon == 0.2
    assert make().label_smoother is None
    output = trainer.predict(rows)
    logits, labels = (torch.from_numpy(part) for part in output[:2])
    expected = F.cross_entropy(logits, labels, label_smoothing=0.2).item()
    assert output.metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)


# ---- hooks that are not called ----


class Hooked(Trainer):
    def _save(self, output_dir=None):
        raise AssertionError("the Trainer does not call this")


def test_a_hook_that_is_not_called_gives_a_warning(make, caplog):
    make()
    assert "does not call" not in caplog.text
    make(Hooked)
    assert "Hooked has _save, which this Trainer does not call: override" in caplog.text


@pytest.mark.parametrize("name", HOOKS_NOT_CALLED)
def test_the_trainer_has_no_such_hook(name):
    assert not hasattr(Trainer, name)
