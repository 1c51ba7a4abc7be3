"""The Trainer on a model of two layers: numbers, records, checkpoints, resuming."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_bits, rounding
from datasets import Dataset
from encoder_options import ENCODER_TERMS
from trainer_runs import collate, largest_difference, make_data, trained

import transformers
from loralib.adapters.formats import read_adapter
from loralib.adapters.loading import load_into
from loralib.io.tensors import read_tensors
from loralib.training.optimizer import decay_groups
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    TrainingError,
    get_scheduler,
    trainer_checkpoint,
)
from transformers.optimization import Adafactor
from transformers.trainer_pt_utils import EvaluationBatches, TrainingBatches
from transformers.trainer_utils import list_checkpoints
from transformers.utils.cli import run


class Recorder(TrainerCallback):
    """Notes what it is told of."""

    def __init__(self):
        self.rates, self.epochs, self.logs = [], [], []

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr()[0])
        self.epochs.append(state.epoch)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


def sgd(model, rate: float = 1.0):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


# ---- schedules and numbers of steps ----

PEAK, TOTAL, END = 0.5, 10, 1e-7


def upstream_rate(name: str, step: int, warmup: int) -> float:
    """The rate after `step` updates, as upstream defines it."""
    if name != "constant" and step < warmup:
        return PEAK * step / warmup
    progress = (step - warmup) / (TOTAL - warmup)
    return {
        "linear": PEAK * max(0, 1 - progress),
        "cosine": PEAK * max(0, 0.5 * (1 + math.cos(math.pi * progress))),
        "cosine_with_restarts": PEAK * 0.5 * (1 + math.cos(math.pi * progress))
        if progress < 1
        else 0.0,
        "polynomial": (PEAK - END) * (1 - progress) + END if step <= TOTAL else END,
        "constant": PEAK,
        "constant_with_warmup": PEAK,
    }[name]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", [kind.value for kind in transformers.SchedulerType])
def test_schedules(name, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = get_scheduler(name, optimizer, warmup, TOTAL)
    for step in range(TOTAL + 3):
        assert schedule.get_last_lr()[0] == pytest.approx(upstream_rate(name, step, warmup))
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("name", "numbers", "lacks"),
    [("linear", (0, None), "num_training_steps"), ("cosine", (None, 9), "num_warmup_steps")],
)
def test_schedule_without_its_numbers(name, numbers, lacks):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    with pytest.raises(ValueError, match=lacks):
        get_scheduler(name, optimizer, *numbers)


@pytest.mark.parametrize(
    ("settings", "updates", "epochs"),
    [
        ({}, 10, 2),
        ({"num_train_epochs": 0.5}, 3, 1),
        ({"num_train_epochs": 1.5}, 8, 2),
        ({"max_steps": 7}, 7, 2),
        ({"max_steps": 7, "num_train_epochs": 9}, 7, 2),
        ({"gradient_accumulation_steps": 2}, 4, 2),
        ({"gradient_accumulation_steps": 8}, 2, 2),
        ({"per_device_train_batch_size": 8}, 6, 2),
        ({"per_device_train_batch_size": 8, "dataloader_drop_last": True}, 4, 2),
        ({"per_gpu_train_batch_size": 10}, 4, 2),
    ],
)
def test_number_of_updates(make_trainer, settings, updates, epochs):
    recorder = Recorder()
    trainer = make_trainer(callbacks=[recorder], **settings)
    output = trainer.train()
    assert output.global_step == len(recorder.rates) == trainer.state.max_steps == updates
    assert trainer.state.num_train_epochs == epochs
    assert recorder.rates[-1] == 0
    # Five batches of four an epoch, where nothing else is said.
    if not settings:
        assert recorder.epochs == pytest.approx([step / 5 for step in range(1, 11)])


@pytest.mark.parametrize(
    ("settings", "warmup"),
    [
        ({"warmup_steps": 4, "warmup_ratio": 0.9}, 4),
        ({"warmup_ratio": 0.25}, 3),
        ({"warmup_ratio": 0.2}, 2),
        ({}, 0),
    ],
)
def test_warmup_steps_win_over_a_ratio_that_is_rounded_up(make_trainer, settings, warmup):
    recorder = Recorder()
    make_trainer(callbacks=[recorder], learning_rate=PEAK, **settings).train()
    assert recorder.rates == pytest.approx(
        [upstream_rate("linear", step, warmup) for step in range(1, 11)]
    )


# ---- the order of the data ----


@pytest.mark.parametrize("lengths", [None, list(range(23))])
@pytest.mark.parametrize("drop_last", [False, True])
def test_processes_share_one_process_s_steps(lengths, drop_last):
    alone = TrainingBatches(23, 8, seed=5, drop_last=drop_last, lengths=lengths)
    shares = [TrainingBatches(23, 2, 5, 4, rank, drop_last, lengths) for rank in range(4)]
    for step, (whole, *parts) in enumerate(zip(alone, *shares, strict=True)):
        weights = [share.weight(step) for share in shares]
        real = [part for part, weight in zip(parts, weights, strict=True) if weight]
        assert sorted(i for part in real for i in part) == sorted(whole)
        # The mean over processes of their weighted mean losses is the mean over examples.
        losses = [np.mean(part) * weight for part, weight in zip(parts, weights, strict=True)]
        assert np.mean(losses) == pytest.approx(np.mean(whole))


def test_a_process_without_an_example_in_the_last_step():
    batches = TrainingBatches(9, 2, seed=0, world_size=4, rank=3)
    last = list(batches)[-1]
    assert len(last) == 1
    assert batches.weight(1) == 0


@pytest.mark.parametrize("lengths", [None, [n % 7 for n in range(50)]])
def test_order_changes_by_epoch_and_seed_and_can_be_entered_in_its_middle(lengths):
    def order(epoch, seed, skip=0):
        batches = TrainingBatches(50, 4, seed, lengths=lengths)
        batches.epoch, batches.skip = epoch, skip
        return list(batches)

    first = order(0, 1)
    assert sorted(i for batch in first for i in batch) == list(range(50))
    assert first == order(0, 1)
    assert first[5:] == order(0, 1, skip=5)
    assert first != order(1, 1)
    assert first != order(0, 2)


def test_group_by_length(make_trainer):
    data = make_data(203)
    settings = {"per_device_train_batch_size": 4, "group_by_length": True}
    for rows in (data, Dataset.from_list(data)):
        batches = make_trainer(train=rows, **settings)._training_batches()
        order = list(batches)
        assert sorted(i for batch in order for i in batch) == list(range(203))
        spread = [
            np.ptp([len(data[i]["input_ids"]) for i in batch]) for batch in order if len(batch) > 1
        ]
        assert np.mean(spread) < 4
    unsorted = list(make_trainer(train=data)._training_batches())
    spread = [np.ptp([len(data[i]["input_ids"]) for i in batch]) for batch in unsorted]
    assert np.mean(spread) > 8


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_evaluation_batches_hold_each_example_once(world_size):
    shares = [EvaluationBatches(13, 4, world_size, rank) for rank in range(world_size)]
    seen = [i for share in shares for batch in share for i in batch]
    assert sorted(seen) == list(range(13))
    assert [len(share) for share in shares] == [len(list(share)) for share in shares]


@pytest.mark.parametrize(("count", "reason"), [(0, "is empty"), (3, "drop_last")])
def test_no_training_batch(count, reason):
    with pytest.raises(ValueError, match=reason):
        TrainingBatches(count, 4, seed=0, drop_last=True)


# ---- gradients and updates ----


def test_accumulation_equals_the_larger_batch(make_trainer):
    models = []
    for settings in (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4},
    ):
        # With a small epsilon, AdamW makes much of the rounding of a gradient that is near zero.
        trainer = make_trainer(learning_rate=1e-3, adam_epsilon=1e-3, logging_steps=1, **settings)
        trainer.train()
        models.append((trained(trainer.model), trainer.state.log_history))
    (first, first_log), (second, second_log) = models
    assert largest_difference(first, second) < rounding(1.0, 2 * ENCODER_TERMS)
    losses = [
        [record["loss"] for record in log if "loss" in record] for log in (first_log, second_log)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1.01e-4, rel=0)  # in four decimals


def test_what_an_accumulation_leaves_over_goes_into_the_next_update(make_trainer, make_model):
    model = make_model()
    expected = make_model()
    trainer = make_trainer(
        model,
        optimizers=sgd(model, 0.1),
        gradient_accumulation_steps=2,
        max_grad_norm=0,
        max_steps=3,
    )
    batches = trainer._training_batches()
    order = []
    for epoch in range(2):
        batches.epoch = epoch
        order += batches
    trainer.train()

    parameters = [p for p in expected.parameters() if p.requires_grad]
    expected.train()
    # Five batches an epoch: the fifth waits for the second epoch's first two.
    for update in (order[0:2], order[2:4], order[4:7]):
        for batch in update:
            inputs = collate([trainer.train_dataset[i] for i in batch])
            (expected(**inputs)["loss"] / 2).backward()
        for parameter in parameters:
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    allowed = rounding(1.0, 3 * 2 * ENCODER_TERMS)
    assert largest_difference(trained(model), trained(expected)) < allowed


@pytest.mark.parametrize("limit", [0.01, 0])
def test_clipping(make_trainer, make_model, limit):
    model = make_model()
    before = trained(model)
    trainer = make_trainer(model, optimizers=sgd(model), max_steps=1, max_grad_norm=limit)
    trainer.train()
    after = trained(model)
    step = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
    if limit:
        assert step == pytest.approx(limit, rel=1e-3)
    else:
        assert step > 0.1


def test_label_smoothing(make_trainer):
    trainer = make_trainer(label_smoothing_factor=0.1)
    inputs = collate(make_data(6))
    loss, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    log_p = outputs["logits"].log_softmax(dim=-1)
    right = -log_p[range(6), inputs["labels"]]
    torch.testing.assert_close(loss, (0.9 * right + 0.1 * -log_p.mean(1)).mean())
    # As in the release, evaluations show what is trained on.
    smoothed = trainer.evaluate()["eval_loss"]
    assert smoothed != pytest.approx(make_trainer().evaluate()["eval_loss"], abs=1e-3)


def test_label_smoothing_needs_classes(make_trainer, make_model):
    trainer = make_trainer(
        make_model(num_labels=1), train=make_data(8, scores=True), label_smoothing_factor=0.1
    )
    with pytest.raises(TrainingError, match="label_smoothing_factor needs class labels"):
        trainer.train()


@pytest.mark.parametrize("lora", [True, False])
def test_decay_spares_biases_and_norms_and_the_optimizer_has_no_frozen_weight(
    make_trainer, make_model, lora
):
    model = make_model(lora=lora)
    trainer = make_trainer(model, weight_decay=0.25)
    trainer.create_optimizer_and_scheduler(10)
    decayed, spared = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.25, 0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_decayed, of_spared = ({names[id(p)] for p in g["params"]} for g in (decayed, spared))
    assert of_decayed | of_spared == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("LayerNorm" in name or name.endswith(".bias") for name in of_spared)
    assert not any("LayerNorm" in name or name.endswith("bias") for name in of_decayed)
    assert any("LayerNorm.weight" in name for name in of_spared) != lora
    assert any("lora_A" in name for name in of_decayed) == lora


def test_adamw_is_the_plain_formula(make_trainer, make_model):
    model = make_model()
    grads: list[dict] = []

    class Keep(Trainer):
        def _update(self):
            grads.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
            )
            super()._update()

    start = trained(model)
    settings = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-3, "weight_decay": 0.1}
    trainer = make_trainer(
        model, Keep, max_steps=4, max_grad_norm=0, lr_scheduler_type="constant", **settings
    )
    trainer.train()
    decayed = {id(parameter) for parameter in decay_groups(model, 0.1)[0]["params"]}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        w = start[name].double()
        m = v = torch.zeros_like(w)
        for t, grad in enumerate((g[name].double() for g in grads), start=1):
            m = 0.8 * m + 0.2 * grad
            v = 0.95 * v + 0.05 * grad**2
            # Epsilon is as large as many gradients: it shows that it is added to a plain √v.
            c = math.sqrt(1 - 0.95**t) / (1 - 0.8**t)
            w = w - 1e-2 * c * m / (v.sqrt() + 1e-3)
            w = w - 1e-2 * (0.1 if id(parameter) in decayed else 0.0) * w
        torch.testing.assert_close(parameter.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_adafactor_moves_every_parameter_by_the_rate(make_trainer):
    """LoRA's B, too, although it starts at zero."""
    trainer = make_trainer(adafactor=True, max_steps=1, lr_scheduler_type="constant")
    before = trained(trainer.model)
    trainer.train()
    moved = {n: (t - before[n]).square().mean().sqrt() for n, t in trained(trainer.model).items()}
    for name, distance in moved.items():
        # A has no gradient as long as B is zero.
        assert distance == (0 if name.endswith("lora_A") else pytest.approx(1e-2, rel=0.1)), name


def test_adafactor_on_a_matrix_and_a_vector():
    """Against the paper's algorithm, written out."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5))]
    plain = [p.detach().double() for p in parameters]
    optimizer = Adafactor(parameters, lr=0.1, weight_decay=0.01)
    moments = [None, None]
    for step in range(1, 5):
        decay = 1 - step**-0.8
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            gradient = parameter.grad.double()
            square = gradient**2 + 1e-30
            if gradient.dim() == 2:
                square = torch.stack([square.mean(1), square.mean(0)[[0, 1, 2, 2]]])
            moments[i] = square if step == 1 else decay * moments[i] + (1 - decay) * square
            v = moments[i]
            if gradient.dim() == 2:
                v = torch.outer(v[0], v[1][:3]) / v[0].mean()
            update = gradient / v.sqrt()
            update = update / max(1.0, update.square().mean().sqrt().item())
            plain[i] = plain[i] * (1 - 0.1 * 0.01) - 0.1 * update
        optimizer.step()
    for parameter, expected in zip(parameters, plain, strict=True):
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", [True, False])
def test_settings_of_the_device(make_trainer, device_settings, asked):
    device_settings.write(not asked, not asked, True, False)
    make_trainer(tf32=asked, use_deterministic_algorithms=asked)
    device_settings.expect(tf32=asked, deterministic=asked)


def test_a_user_s_deterministic_mode_stays_on(make_trainer):
    torch.use_deterministic_algorithms(True)
    try:
        make_trainer()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", -1.0), ("learning_rate", float("inf")), ("weight_decay", -0.1),
     ("num_train_epochs", 0.0), ("num_train_epochs", -2.0), ("warmup_steps", -1)],
)  # fmt: skip
def test_settings_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"--{name} must be"):
        TrainingArguments(output_dir="out", **{name: value})


def test_a_model_without_trainable_parameters(make_trainer, make_model):
    model = make_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        make_trainer(model).train()


def test_training_learns_and_leaves_frozen_weights_alone(make_trainer, make_model):
    model = make_model(0.1)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainer = make_trainer(
        model, train=make_data(64), num_train_epochs=12, logging_strategy="epoch"
    )
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < losses[0] / 2
    assert_same_bits(frozen, {n: p for n, p in model.named_parameters() if not p.requires_grad})


# ---- evaluation ----


def test_evaluation_counts_examples_not_batches(make_trainer, make_model):
    trainer = make_trainer(make_model(), per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    model = trainer.model.eval()
    inputs = collate(make_data(9))
    with torch.no_grad():
        logits = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")})["logits"]
    expected = F.cross_entropy(logits, inputs["labels"])
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"eval_accumulation_steps": 2}])
def test_predictions_come_in_the_set_s_order_and_need_no_labels(make_trainer, settings):
    trainer = make_trainer(
        compute_metrics=lambda p: {"rows": len(p.predictions)},
        per_device_eval_batch_size=2,
        **settings,
    )
    labelled = trainer.predict(make_data(9), metric_key_prefix="test")
    assert labelled.predictions.shape == (9, 2)
    assert labelled.label_ids.tolist() == [row["label"] for row in make_data(9)]
    assert labelled.metrics["test_rows"] == 9
    assert "test_loss" in labelled.metrics
    bare = [{n: v for n, v in row.items() if n != "label"} for row in make_data(9)]
    unlabelled = trainer.predict(bare)
    assert unlabelled.label_ids is None
    assert not {"eval_loss", "eval_rows"} & unlabelled.metrics.keys()
    np.testing.assert_array_equal(unlabelled.predictions, labelled.predictions)


def test_prediction_loss_only(make_trainer):
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


def test_full_eval_in_half_precision_gives_the_weights_back(make_trainer, make_model):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = make_trainer(model).predict(make_data(9)).predictions
    half = make_trainer(model, fp16_full_eval=True).predict(make_data(9)).predictions
    assert 0 < np.abs(exact - half).max() < 0.05
    assert_same_bits(before, model.state_dict())


@pytest.mark.parametrize(
    ("rows", "doing", "reason"),
    [([], "evaluate", "is empty"), ([], "train", "is empty")],
)
def test_empty_sets(make_trainer, rows, doing, reason):
    trainer = make_trainer(train=rows, evaluated=rows)
    with pytest.raises(ValueError, match=reason):
        getattr(trainer, doing)()


def test_sets_that_are_not_there(make_model, tmp_path):
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

    class Noting(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            result = super().compute_loss(model, inputs, return_outputs)
            if model.training:
                losses.append(result.item())
            return result

    recorder = Recorder()
    trainer = make_trainer(
        kind=Noting,
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
def test_when_it_evaluates(make_trainer, settings, steps):
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


def test_wandb_that_is_not_installed(make_trainer, monkeypatch):
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


def test_bf16_holds_frozen_weights_in_it_and_the_rest_in_float32(
    make_trainer, make_model, tiny_base, tmp_path
):
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


def test_bf16_trains_as_float32_does(make_trainer):
    losses = []
    for bf16 in (False, True):
        trainer = make_trainer(bf16=bf16, logging_steps=1, learning_rate=1e-3)
        trainer.train()
        losses.append([r["loss"] for r in trainer.state.log_history if "loss" in r])
    assert losses[0] == pytest.approx(losses[1], abs=0.05)


def test_fp16_needs_a_gpu(make_trainer):
    with pytest.raises(ValueError, match="--fp16 needs a GPU: use --bf16"):
        make_trainer(fp16=True, no_cuda=True)


def test_apex_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    args = TrainingArguments("out", fp16=True, fp16_backend="apex")
    with pytest.raises(ValueError, match="use --fp16_backend amp"):
        _ = args.use_apex
    assert not TrainingArguments("out", fp16=True).use_apex
    assert not TrainingArguments("out", fp16_backend="apex").use_apex


# ---- what goes wrong ----


class Diverging(Trainer):
    """A run whose loss is not a number at its fifth batch."""

    seen = 0

    def compute_loss(self, model, inputs, return_outputs=False):
        loss = super().compute_loss(model, inputs, return_outputs)
        self.seen += 1
        return loss * float("nan") if self.seen == 5 else loss


@pytest.mark.parametrize(("accumulated", "step", "last"), [(1, 5, 4), (2, 3, 2)])
def test_a_loss_that_is_not_finite_stops_the_run(
    make_trainer, make_model, tmp_path, accumulated, step, last
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
    model = make_model()
    load_into(model, read_adapter(folder), model.base_fingerprint)
    resumed = make_trainer(gradient_accumulation_steps=accumulated)
    resumed.train(resume_from_checkpoint=str(folder))
    assert all(p.isfinite().all() for p in resumed.model.parameters())


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
    with pytest.raises(OSError, match="No space left"):
        make_trainer(**settings).train()
    monkeypatch.undo()
    out = tmp_path / "out"
    assert [Path(path).name for path in list_checkpoints(out)] == ["checkpoint-2"]
    assert len(list(out.iterdir())) == 2

    resumed = make_trainer(**settings)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert {path.name for path in out.iterdir()} == {f"checkpoint-{n}" for n in (2, 4, 6, 8, 10)}


def test_an_output_folder_that_cannot_be_made_is_found_at_once(make_trainer, tmp_path):
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
        ({"warmup_ratio": 1.5}, r"warmup_ratio must lie in \[0, 1\]"),
        ({"label_smoothing_factor": -0.1}, "label_smoothing_factor must lie"),
        ({"fp16": True, "bf16": True}, "give one"),
        ({"report_to": ["mlflow"]}, "not mlflow"),
        ({"ddp_timeout": 0.0}, "--ddp_timeout must be positive, not 0"),
        ({"ddp_timeout": math.nan}, "--ddp_timeout must be positive, not nan"),
        ({"lr_scheduler_type": "square"}, "square"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end needs evaluations to compare"),
    ],
)
def test_settings_that_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        TrainingArguments("out", **settings)


def test_a_rank_without_a_launcher_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    args = TrainingArguments("out", local_rank=0, no_cuda=True)
    with pytest.raises(
        ValueError, match=r"no launcher has set RANK .* leave --local_rank"
    ):
        _ = args.device


def test_defaults_that_follow_from_others(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    args = TrainingArguments("~/out", evaluation_strategy="epoch", logging_steps=7)
    assert args.local_rank == 3
    assert TrainingArguments("out", local_rank=1).local_rank == 1
    assert args.do_eval is True
    assert args.eval_steps == 7
    assert args.output_dir == args.run_name == str(Path.home() / "out")
    assert json.loads(args.to_json_string())["evaluation_strategy"] == "epoch"
    assert TrainingArguments("out", do_eval=False, evaluation_strategy="epoch").do_eval is False


# ---- scripts ----


def test_a_script_s_error_is_one_line(monkeypatch, capsys):
    def main():
        raise TrainingError("first\n  second")

    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py", "--flag"])
    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "script.py: error: first second\n"
