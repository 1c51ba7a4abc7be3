"""The Trainer: evaluation, records, half precision, and errors."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_bits
from small_trainers import MeanOfTargets
from trainer_runs import Recorder, collate, make_data

from loralib.adapters.formats import read_adapter
from loralib.adapters.loading import load_into
from loralib.io.tensors import read_tensors
from loralib.training import product_choices
from loralib.training.product_choices import frozen_weights
from transformers import (
    Trainer,
    TrainingArguments,
    TrainingError,
    trainer_checkpoint,
)
from transformers import trainer as trainer_module
from transformers.utils.cli import run_script

pytestmark = pytest.mark.slow

# ---- evaluation ----


def test_eval_loss_is_the_mean_over_examples(make_trainer, make_model):
    trainer = make_trainer(make_model(), per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    model = trainer.model.eval()
    inputs = collate(make_data(9))
    with torch.no_grad():
        logits = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")})["logits"]
    expected = F.cross_entropy(logits, inputs["labels"])
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_numpy_values_in_metrics_become_python_numbers(make_trainer):
    trainer = make_trainer(compute_metrics=lambda p: {"half": np.float32(0.5), "rows": np.int64(3)})
    metrics = trainer.evaluate()
    assert json.dumps([metrics["eval_half"], metrics["eval_rows"]]) == "[0.5, 3]"


@pytest.mark.parametrize("of_none", [0.0, math.nan], ids=["zero", "nan, as PyTorch's loss"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_without_targets_do_not_count_in_the_loss(tmp_path, size, of_none):
    rows = [{"input_ids": [1, 2], "labels": [-100, 3 if n % 4 == 3 else -100]} for n in range(8)]
    for data, expected in ((rows, 3.0), (rows[:3], math.nan)):
        settings = {"per_device_eval_batch_size": size, "report_to": ["none"]}
        args = TrainingArguments(str(tmp_path), disable_tqdm=True, **settings)
        loss = Trainer(MeanOfTargets(of_none), args).evaluate(data)["eval_loss"]
        assert loss == pytest.approx(expected, nan_ok=True)


def test_evaluation_uses_the_linear_methods_of_training(make_trainer, monkeypatch):
    """Without training, it chooses them; after training, it keeps that choice, even if none."""
    chosen = []
    for module in (product_choices, trainer_module):
        monkeypatch.setattr(
            module, "choose_products", lambda *given, **how: chosen.append((given, how))
        )
    trainer = make_trainer(evaluation_strategy="epoch", num_train_epochs=2)
    for _ in range(2):
        trainer.evaluate()
        ((weights, dtype, world_size), how) = chosen.pop()
        assert (dtype, world_size, how) == (torch.float32, 1, {"backward": False})
        assert len(weights) == len(frozen_weights(trainer.model))
    trainer.train()
    ((_, how),) = chosen
    assert how == {}
    trainer.evaluate()
    assert len(chosen) == 1


@pytest.mark.parametrize("settings", [{}, {"eval_accumulation_steps": 2}])
def test_predictions_are_in_order_and_need_no_labels(make_trainer, settings):
    trainer = make_trainer(
        compute_metrics=lambda p: {"rows": len(p.predictions)},
        per_device_eval_batch_size=2,
        **settings,
    )
    labeled = trainer.predict(make_data(9), metric_key_prefix="test")
    assert labeled.predictions.shape == (9, 2)
    assert labeled.label_ids.tolist() == [row["label"] for row in make_data(9)]
    assert labeled.metrics["test_rows"] == 9
    assert "test_loss" in labeled.metrics
    bare = [{n: v for n, v in row.items() if n != "label"} for row in make_data(9)]
    unlabeled = trainer.predict(bare)
    assert unlabeled.label_ids is None
    assert not {"eval_loss", "eval_rows"} & unlabeled.metrics.keys()
    np.testing.assert_array_equal(unlabeled.predictions, labeled.predictions)


def test_prediction_loss_only_returns_no_predictions(make_trainer):
    trainer = make_trainer(prediction_loss_only=True, compute_metrics=lambda p: 1 / 0)
    output = trainer.predict(make_data(5))
    assert output.predictions is None
    assert "eval_loss" in output.metrics


def test_regression(make_trainer, make_model):
    data = make_data(40, scores=True)
    trainer = make_trainer(make_model(num_labels=1), train=data, evaluated=data, num_train_epochs=8)
    before = trainer.evaluate()["eval_loss"]
    output = trainer.predict(data)
    expected = np.mean((output.predictions[:, 0] - output.label_ids) ** 2)
    assert before == pytest.approx(float(expected), rel=1e-5)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2


def test_fp16_full_eval_restores_the_weights(make_trainer, make_model):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = make_trainer(model).predict(make_data(9)).predictions
    half = make_trainer(model, fp16_full_eval=True).predict(make_data(9)).predictions
    assert 0 < np.abs(exact - half).max() < 0.05
    assert_same_bits(before, model.state_dict())


@pytest.mark.parametrize("doing", ["evaluate", "train"])
def test_empty_sets_are_errors(make_trainer, doing):
    trainer = make_trainer(train=[], evaluated=[])
    with pytest.raises(ValueError, match="is empty"):
        getattr(trainer, doing)()


def test_missing_sets_are_errors(make_model, tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path), report_to=["none"], evaluation_strategy="steps"
    )
    trainer = Trainer(make_model(), args, collate)
    with pytest.raises(ValueError, match="evaluating needs"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="evaluation_strategy needs"):
        trainer.train()
    trainer.eval_dataset = make_data(3)
    with pytest.raises(ValueError, match="training needs"):
        trainer.train()


# ---- records ----


def test_log_records(make_trainer):
    losses = []

    class Recording(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            result = super().compute_loss(model, inputs, return_outputs)
            if model.training:
                losses.append(result.item())
            return result

    recorder = Recorder()
    trainer = make_trainer(
        kind=Recording,
        callbacks=[recorder],
        logging_steps=3,
        evaluation_strategy="steps",
        eval_steps=5,
        compute_metrics=lambda p: {"accuracy": 0.5, "eval_given": 1.0},
    )
    output = trainer.train()
    history = trainer.state.log_history
    assert [(r["step"], "loss" in r, "eval_loss" in r) for r in history] == [
        (3, True, False),
        (5, False, True),
        (6, True, False),
        (9, True, False),
        (10, False, True),
        (10, False, False),
    ]
    for record in (r for r in history if "loss" in r):
        step = record["step"]
        assert record == {
            "loss": round(np.mean(losses[step - 3 : step]), 4),
            "learning_rate": pytest.approx(1e-2 * (1 - step / 10)),
            "epoch": step / 5,
            "step": step,
        }
    evaluated = {"eval_loss", "eval_accuracy", "eval_given", "eval_runtime"}
    evaluated |= {"eval_samples_per_second", "epoch", "step"}
    assert history[1].keys() == evaluated
    assert output.training_loss == pytest.approx(np.mean(losses))
    assert history[-1]["train_loss"] == output.training_loss
    assert [{**log, "step": r["step"]} for log, r in zip(recorder.logs, history, strict=True)] == (
        history
    )


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"logging_steps": 4}, [4, 8]),
        ({"logging_steps": 4, "logging_first_step": True}, [1, 4, 8]),
        ({"logging_strategy": "epoch"}, [5, 10]),
        ({"logging_strategy": "no"}, []),
        ({"logging_strategy": "epoch", "max_steps": 7}, [5, 7]),
    ],
)
def test_when_losses_are_logged(make_trainer, settings, steps):
    trainer = make_trainer(**settings)
    trainer.train()
    assert [r["step"] for r in trainer.state.log_history if "loss" in r] == steps


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"evaluation_strategy": "epoch"}, [5, 10]),
        ({"evaluation_strategy": "steps", "eval_steps": 3}, [3, 6, 9]),
        ({"evaluation_strategy": "steps", "logging_steps": 4}, [4, 8]),
        ({"evaluation_strategy": "no"}, []),
    ],
)
def test_when_evaluations_happen(make_trainer, settings, steps):
    trainer = make_trainer(**settings)
    trainer.train()
    assert [r["step"] for r in trainer.state.log_history if "eval_loss" in r] == steps


def test_files_of_a_run(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", save_steps=5)
    metrics = trainer.train().metrics
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", metrics)
    trainer.save_metrics("eval", {"eval_loss": 1.5})
    out = tmp_path / "out"
    state = json.loads((out / "trainer_state.json").read_text())
    wanted = {"log_history", "global_step", "max_steps", "num_train_epochs", "epoch"}
    assert wanted | {"best_metric", "best_model_checkpoint"} <= state.keys()
    assert (state["global_step"], state["max_steps"], state["num_train_epochs"]) == (10, 10, 2)
    assert json.loads((out / "eval_results.json").read_text()) == {"eval_loss": 1.5}
    everything = json.loads((out / "all_results.json").read_text())
    assert everything == {**metrics, "eval_loss": 1.5}
    checkpoint = out / "checkpoint-5"
    names = {"pytorch_model.bin", "config.json", "optimizer.pt", "scheduler.pt"}
    names |= {"pytorch_model_lora.bin", "pytorch_model_lora.safetensors"}
    names |= {"trainer_state.json", "training_args.bin"}
    assert names <= {path.name for path in checkpoint.iterdir()}
    assert torch.load(checkpoint / "training_args.bin", weights_only=True)["learning_rate"] == 1e-2
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


def test_tensorboard(make_trainer, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = make_trainer(
        report_to=["tensorboard"],
        logging_dir=str(tmp_path / "board"),
        logging_steps=2,
        evaluation_strategy="epoch",
    )
    trainer.train()
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    logged = {r["step"]: r["loss"] for r in trainer.state.log_history if "loss" in r}
    assert written == pytest.approx(logged)
    assert [event.step for event in events.Scalars("eval/loss")] == [5, 10]


def test_wandb_that_is_not_installed_is_an_error_unless_all_are_requested(
    make_trainer, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="report_to wandb: it is not installed"):
        make_trainer(report_to=["wandb"])
    make_trainer(report_to=["all"])


def test_wandb_gets_the_records(make_trainer, monkeypatch):
    class Wandb:
        """Stands in for the package, which the tests do not install."""

        __spec__ = sys.__spec__

        def __init__(self):
            self.sent = []

        def init(self, name, config):
            self.name, self.config = name, config
            return self

        def log(self, values, step):
            self.sent.append((step, values))

    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    make_trainer(report_to=["wandb"], run_name="mine", logging_steps=5).train()
    assert wandb.name == "mine"
    assert wandb.config["lora_r"] == 4
    assert [step for step, _ in wandb.sent] == [5, 10, 10]
    assert wandb.sent[0][1].keys() == {"train/loss", "train/learning_rate", "train/epoch"}
    assert "train/train_loss" in wandb.sent[-1][1]


def test_bars_are_shown_and_closed(make_trainer, capsys):
    trainer = make_trainer(disable_tqdm=False, evaluation_strategy="epoch", logging_steps=5)
    trainer.train()
    captured = capsys.readouterr()
    assert "training: 100%" in captured.err
    assert "evaluating" in captured.err
    assert "'loss': " in captured.out


# ---- half precision ----


def test_bf16_casts_only_frozen_weights(make_trainer, make_model, tiny_base, tmp_path):
    trainer = make_trainer(make_model(), bf16=True, save_strategy="epoch")
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        wanted = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype is wanted, name
    state = trainer.optimizer.state_dict()["state"].values()
    averages = [s[name] for s in state for name in ("exp_avg", "exp_avg_sq")]
    assert {t.dtype for t in averages} == {torch.float32}
    base, _ = read_tensors(tiny_base / "pytorch_model.bin")
    saved, _ = read_tensors(tmp_path / "out" / "checkpoint-10" / "pytorch_model.bin")
    assert_same_bits(base, {name: saved[f"roberta.{name}"] for name in base})
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_bf16_losses_are_close_to_float32_s(make_trainer):
    losses = []
    for bf16 in (False, True):
        trainer = make_trainer(bf16=bf16, logging_steps=1, learning_rate=1e-3)
        trainer.train()
        losses.append([r["loss"] for r in trainer.state.log_history if "loss" in r])
    assert losses[0] == pytest.approx(losses[1], abs=0.05)


def test_fp16_needs_a_gpu(make_trainer):
    with pytest.raises(ValueError, match="fp16 needs a GPU: use bf16"):
        make_trainer(fp16=True, no_cuda=True)


# ---- errors ----


class Diverging(Trainer):
    """One of its batches, the fifth by default, has a loss of NaN."""

    bad, seen = 5, 0

    def compute_loss(self, model, inputs, return_outputs=False):
        loss = super().compute_loss(model, inputs, return_outputs)
        self.seen += 1
        return loss * float("nan") if self.seen == self.bad else loss


# An epoch has five batches. With two per update, the fifth is added to the next two.
@pytest.mark.parametrize(("accumulated", "step", "last", "seen"), [(1, 5, 4, 5), (2, 3, 2, 7)])
def test_a_loss_that_is_not_finite_stops_the_run(
    make_trainer, make_model, tmp_path, accumulated, step, last, seen
):
    trainer = make_trainer(
        kind=Diverging,
        gradient_accumulation_steps=accumulated,
        save_strategy="steps",
        save_steps=2,
    )
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    folder = tmp_path / "out" / f"checkpoint-{last}"
    message = f"the loss is not finite at step {step}; the last checkpoint is {folder};"
    assert str(caught.value).startswith(message)
    assert trainer.seen == seen  # a CPU's loss is checked after every update
    model = make_model()
    load_into(model, read_adapter(folder), model.base_fingerprint)
    resumed = make_trainer(gradient_accumulation_steps=accumulated)
    resumed.train(resume_from_checkpoint=str(folder))
    assert all(p.isfinite().all() for p in resumed.model.parameters())


def test_the_first_loss_may_be_the_one_that_is_not_finite(make_trainer):
    trainer = make_trainer(kind=Diverging)
    trainer.bad = 1
    message = "^the loss is not finite at step 1; no checkpoint was saved before; "
    with pytest.raises(TrainingError, match=message):
        trainer.train()
    assert trainer.seen == 1


@pytest.mark.parametrize(
    "settings", [{"save_strategy": "steps", "save_steps": 1}, {"max_steps": 1}]
)
def test_weights_that_are_not_finite_are_not_saved(make_trainer, tmp_path, settings):
    trainer = make_trainer(learning_rate=1e39, **settings)
    with pytest.raises(TrainingError, match="weights are not finite after step 1; no checkpoint"):
        trainer.train()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_checkpoint_is_written_whole_or_not_at_all(make_trainer, tmp_path, monkeypatch):
    settings = {"save_strategy": "steps", "save_steps": 2, "dropout": 0.1}
    whole = make_trainer(output_dir=str(tmp_path / "whole"), **settings)
    whole.train()

    write = trainer_checkpoint.write_torch

    def disk_full(path, value):
        if path.name == "optimizer.pt" and (tmp_path / "out" / "checkpoint-2").exists():
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(trainer_checkpoint, "write_torch", disk_full)
    with pytest.raises(OSError, match="the disk is full"):
        make_trainer(**settings).train()
    monkeypatch.undo()
    out = tmp_path / "out"
    assert [path.name for path in out.iterdir()] == ["checkpoint-2"]

    resumed = make_trainer(**settings)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert {path.name for path in out.iterdir()} == {f"checkpoint-{n}" for n in (2, 4, 6, 8, 10)}


def test_an_output_folder_that_cannot_be_created_is_an_error_at_once(make_trainer, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        make_trainer(output_dir=str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tpu_num_cores": 8}, "tpu_num_cores has no meaning here"),
        ({"sharded_ddp": "simple"}, "sharded_ddp has no meaning here"),
        ({"deepspeed": "ds.json"}, "deepspeed has no meaning here"),
        ({"debug": True}, "debug has no meaning here"),
        ({"past_index": 1}, "past_index has no meaning here"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"eval_steps": 0}, "eval_steps must be at least 1"),
        ({"save_total_limit": 0}, "save_total_limit must be at least 1"),
        ({"adam_beta2": 1.0, "do_train": True}, r"adam_beta2 must lie in \[0, 1\), not 1.0"),
        ({"adam_epsilon": math.inf, "do_train": True}, "adam_epsilon must be a number from 0 on"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers must be at least 0, not -1"),
        ({"warmup_ratio": 1.5}, r"warmup_ratio must lie in \[0, 1\]"),
        ({"label_smoothing_factor": -0.1}, "label_smoothing_factor must lie"),
        ({"fp16": True, "bf16": True}, "give one"),
        ({"report_to": ["mlflow"]}, "not mlflow"),
        ({"ddp_timeout": 0.0}, "--ddp_timeout must be above 0, not 0"),
        ({"ddp_timeout": math.nan}, "--ddp_timeout must be above 0, not nan"),
        ({"lr_scheduler_type": "square"}, "square"),
        ({"learning_rate": "5e-5"}, "--learning_rate must be a number, not the text '5e-5'"),
        ({"adam_epsilon": "1e-8"}, "--adam_epsilon must be a number, not the text '1e-8'"),
        ({"max_steps": "3"}, "--max_steps must be a number, not the text '3'"),
        ({"warmup_steps": 0.1}, "--warmup_steps must be a whole number, not 0.1"),
        ({"bf16": "False"}, "--bf16 must be True or False, not the text 'False'"),
        ({"do_eval": "no"}, "--do_eval must be True or False, not the text 'no'"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end needs evaluations to compare"),
    ],
)
def test_bad_settings_are_errors(settings, reason):
    with pytest.raises(ValueError, match=reason):
        TrainingArguments("out", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        *({"seed": seed} for seed in (-1, 2**32, 2**64)),
        *({"eval_accumulation_steps": steps} for steps in (-1, 0)),
        {"adam_beta2": 1.0, "adam_epsilon": -1.0},
        {"adam_beta1": 2.0, "adam_epsilon": -1.0, "do_train": True, "adafactor": True},
    ],
)
def test_any_seed_and_settings_without_effect_are_accepted(settings):
    """AdamW's settings have no effect without training or with Adafactor."""
    args = TrainingArguments("out", **settings)
    assert {name: getattr(args, name) for name in settings} == settings


def test_local_rank_without_a_launcher_is_an_error(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    args = TrainingArguments("out", local_rank=0, no_cuda=True)
    with pytest.raises(ValueError, match=r"no launcher has set RANK .* leave --local_rank"):
        _ = args.device


def test_defaults_that_depend_on_other_settings(monkeypatch):
    for name, value in {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    args = TrainingArguments("~/out", evaluation_strategy="epoch", logging_steps=7)
    assert args.local_rank == 3
    assert TrainingArguments("out", local_rank=1).local_rank == 1
    assert args.do_eval is True
    assert args.eval_steps == 7
    assert args.output_dir == args.run_name == str(Path.home() / "out")
    assert json.loads(args.to_json_string())["evaluation_strategy"] == "epoch"
    assert TrainingArguments("out", do_eval=False, evaluation_strategy="epoch").do_eval is False


# ---- scripts ----


def test_run_script_prints_an_error_as_one_line(monkeypatch, capsys):
    def main():
        raise TrainingError("first\n  second")

    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py", "--flag"])
    with pytest.raises(SystemExit) as ended:
        run_script(main)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "script.py: error: first second\n"
