"""The Trainer: schedules, the order of the data, gradients and updates."""

import copy
import math

import numpy as np
import pytest
import torch
from compare import assert_same_bits, rounding
from datasets import Dataset
from encoder_options import ENCODER_TERMS
from small_trainers import Line, make_line_trainer
from trainer_runs import Recorder, collate, largest_difference, make_data, trained

import transformers
from loralib.training import watch
from loralib.training.optimizer import decay_groups
from transformers import (
    Trainer,
    TrainingArguments,
    TrainingError,
    get_scheduler,
)
from transformers import trainer as trainer_module
from transformers.optimization import Adafactor
from transformers.trainer_data import EvaluationBatches, TrainingBatches


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
def test_schedules_follow_upstream_s_definitions(name, warmup):
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
def test_a_schedule_without_its_numbers_of_steps_is_an_error(name, numbers, lacks):
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
    an_epoch = len(trainer.get_train_dataloader())
    assert recorder.batches == trainer.args.batches_of(updates, an_epoch)
    assert recorder.rates[-1] == 0
    # By default, an epoch has five batches of four.
    if not settings:
        assert recorder.epochs == pytest.approx([step / 5 for step in range(1, 11)])


@pytest.mark.parametrize(
    ("settings", "warmup"),
    [
        ({"warmup_steps": 4, "warmup_ratio": 0.9}, 4),
        ({"warmup_steps": 1, "warmup_ratio": 0.9}, 1),
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


@pytest.mark.parametrize(("flag", "found"), [(None, False), (False, False), (True, True)])
def test_ddp_looks_for_unused_parameters_if_asked_to(tmp_path, monkeypatch, flag, found):
    given = []
    monkeypatch.setattr(
        trainer_module, "wrap_ddp", lambda model, *_, **settings: given.append(settings) or model
    )
    make_line_trainer(tmp_path, ddp_find_unused_parameters=flag, max_steps=1).train()
    assert given == [{"find_unused_parameters": found}]


def test_each_batch_tells_the_watch_that_the_process_goes_on(tmp_path, monkeypatch):
    beats = []
    monkeypatch.setattr(watch, "beat", lambda: beats.append(1))
    trainer = make_line_trainer(tmp_path, max_steps=4)
    trainer.train()
    assert len(beats) == 4
    trainer.evaluate()  # three batches
    assert len(beats) == 7


@pytest.mark.parametrize(
    ("flags", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16)]
)
def test_training_and_evaluation_compute_in_the_flag_s_dtype(tmp_path, flags, dtype):
    found, one = [], torch.ones(1, 1)

    class Recording(Line):
        def forward(self, x, labels=None):
            found.append((self.training, (one @ one).dtype))
            return super().forward(x, labels)

    trainer = make_line_trainer(tmp_path, model=Recording(), max_steps=1, **flags)
    trainer.train()
    trainer.evaluate()
    assert set(found) == {(True, dtype), (False, dtype)}


# ---- the order of the data ----


@pytest.mark.parametrize("lengths", [None, list(range(23))])
@pytest.mark.parametrize("drop_last", [False, True])
def test_processes_together_compute_one_process_s_steps(lengths, drop_last):
    alone = TrainingBatches(23, 8, seed=5, drop_last=drop_last, lengths=lengths)
    shares = [TrainingBatches(23, 2, 5, 4, rank, drop_last, lengths) for rank in range(4)]
    for step, (whole, *parts) in enumerate(zip(alone, *shares, strict=True)):
        weights = [share.weight(step) for share in shares]
        real = [part for part, weight in zip(parts, weights, strict=True) if weight]
        assert sorted(i for part in real for i in part) == sorted(whole)
        # The mean over processes of their weighted mean losses is the mean over examples.
        losses = [np.mean(part) * weight for part, weight in zip(parts, weights, strict=True)]
        assert np.mean(losses) == pytest.approx(np.mean(whole))
    for share in shares:
        assert share.examples == sum(map(len, share))


def test_a_process_without_an_example_in_the_last_step_has_weight_0():
    batches = TrainingBatches(9, 2, seed=0, world_size=4, rank=3)
    last = list(batches)[-1]
    assert len(last) == 1
    assert batches.weight(1) == 0


@pytest.mark.parametrize("lengths", [None, [n % 7 for n in range(50)]])
def test_order_depends_on_epoch_and_seed_and_can_start_in_its_middle(lengths):
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


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 2)])
def test_an_epoch_s_order_equals_that_of_pytorch_s_sampler(seed, epoch):
    batches = TrainingBatches(50, 4, seed)
    batches.epoch = epoch
    sampler = torch.utils.data.DistributedSampler(range(50), 1, 0, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    assert [i for batch in batches for i in batch] == list(sampler)


def test_group_by_length_batches_similar_lengths(make_trainer):
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


@pytest.mark.parametrize(("steps", "together"), [(9, 2), (40, 10), (400, 50)])
def test_examples_are_sorted_by_length_within_groups_of_steps(steps, together):
    """The groups are a quarter of the steps, at most 50; beyond them, the order is random."""

    def is_sorted(size):
        return all(
            sorted(order[start : start + size], reverse=True) == order[start : start + size]
            for start in range(0, len(order), size)
        )

    lengths = list(range(2 * steps))
    order = [i for batch in TrainingBatches(len(lengths), 2, 0, lengths=lengths) for i in batch]
    assert is_sorted(2 * together)
    assert not is_sorted(2 * (together + 1))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_evaluation_batches_have_each_example_once(world_size):
    shares = [EvaluationBatches(13, 4, world_size, rank) for rank in range(world_size)]
    seen = [i for share in shares for batch in share for i in batch]
    assert sorted(seen) == list(range(13))
    assert [len(share) for share in shares] == [len(list(share)) for share in shares]


@pytest.mark.parametrize(("count", "reason"), [(0, "is empty"), (3, "drop_last")])
def test_a_set_without_a_whole_batch_is_an_error(count, reason):
    with pytest.raises(ValueError, match=reason):
        TrainingBatches(count, 4, seed=0, drop_last=True)


# ---- gradients and updates ----


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_dropout_and_autocast_in_training_and_evaluation(tmp_path, bf16):
    """Training has gradients and dropout, after an evaluation as well; bf16 uses autocast."""
    seen = []

    class Recording(Line):
        def forward(self, *given, **more):
            modes = torch.is_grad_enabled(), self.training, torch.is_autocast_enabled("cpu")
            seen.append(modes)
            return super().forward(*given, **more)

    settings = {"max_steps": 3, "evaluation_strategy": "steps", "eval_steps": 1}
    make_line_trainer(tmp_path, model=Recording().eval(), bf16=bf16, **settings).train()
    assert seen == 3 * [(True, True, bf16), *3 * [(False, False, bf16)]]


def test_training_step_can_be_called_from_another_loop(tmp_path):
    trainer = make_line_trainer(tmp_path)
    batch = {"x": torch.tensor([1.0, 2.0]), "labels": torch.tensor([3.0, 5.0])}
    assert trainer.training_step(trainer.model, batch) == (3**2 + 5**2) / 2
    assert trainer.model.b.grad == -(3 + 5)


def test_accumulation_equals_the_larger_batch(make_trainer):
    models = []
    for settings in (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4},
    ):
        # With a small epsilon, AdamW would amplify the rounding of gradients near zero.
        trainer = make_trainer(learning_rate=1e-3, adam_epsilon=1e-3, logging_steps=1, **settings)
        trainer.train()
        models.append((trained(trainer.model), trainer.state.log_history))
    (first, first_log), (second, second_log) = models
    assert largest_difference(first, second) < rounding(1.0, 2 * ENCODER_TERMS)
    losses = [
        [record["loss"] for record in log if "loss" in record] for log in (first_log, second_log)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1.01e-4, rel=0)  # logs have four decimals


def test_leftover_batches_of_an_epoch_are_accumulated_into_the_next_update(
    make_trainer, make_model
):
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
    # An epoch has five batches: the fifth is added to the second epoch's first two.
    for update in (order[0:2], order[2:4], order[4:7]):
        for batch in update:
            inputs = collate([trainer.train_dataset[i] for i in batch])
            (expected(**inputs)["loss"] / 2).backward()
        for parameter in parameters:
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    allowed = rounding(1.0, 3 * 2 * ENCODER_TERMS)
    assert largest_difference(trained(model), trained(expected)) < allowed


@pytest.mark.parametrize("limit", [0.01, 0, None])
def test_gradients_are_clipped_to_max_grad_norm(make_trainer, make_model, limit):
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
    # As in the release, evaluations report the smoothed loss.
    smoothed = trainer.evaluate()["eval_loss"]
    assert smoothed != pytest.approx(make_trainer().evaluate()["eval_loss"], abs=1e-3)


def test_label_smoothing_needs_classes(make_trainer, make_model):
    trainer = make_trainer(
        make_model(num_labels=1), train=make_data(8, scores=True), label_smoothing_factor=0.1
    )
    with pytest.raises(TrainingError, match="label smoothing needs class labels"):
        trainer.train()


@pytest.mark.parametrize("lora", [True, False])
def test_weight_decay_excludes_biases_and_norms_and_the_optimizer_frozen_weights(
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


def test_adamw_equals_the_formula(make_trainer, make_model):
    model = make_model()
    grads: list[dict] = []

    class RecordGradients(Trainer):
        def _update(self):
            grads.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
            )
            super()._update()

    start = trained(model)
    settings = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-3, "weight_decay": 0.1}
    trainer = make_trainer(
        model,
        RecordGradients,
        max_steps=4,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        **settings,
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
            # Epsilon is as large as many gradients: adding it to a corrected √v would show.
            c = math.sqrt(1 - 0.95**t) / (1 - 0.8**t)
            w = w - 1e-2 * c * m / (v.sqrt() + 1e-3)
            w = w - 1e-2 * (0.1 if id(parameter) in decayed else 0.0) * w
        torch.testing.assert_close(parameter.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_adafactor_changes_every_parameter_by_the_learning_rate(make_trainer):
    """This includes LoRA's B, although it starts at zero."""
    trainer = make_trainer(adafactor=True, max_steps=1, lr_scheduler_type="constant")
    before = trained(trainer.model)
    trainer.train()
    assert isinstance(trainer.optimizer, Adafactor)
    moved = {n: (t - before[n]).square().mean().sqrt() for n, t in trained(trainer.model).items()}
    for name, distance in moved.items():
        # A has no gradient while B is zero.
        assert distance == (0 if name.endswith("lora_A") else pytest.approx(1e-2, rel=0.1)), name


def test_adafactor_factors_each_matrix_of_a_convolution():
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.zeros(2, 4, 3))
    matrices = [torch.nn.Parameter(matrix.clone()) for matrix in whole.detach()]
    settings = {"lr": 0.1, "relative_step": False, "scale_parameter": False}
    # No clipping, because it would use the norm of all matrices together.
    optimizer = Adafactor([whole, *matrices], clip_threshold=math.inf, **settings)
    for _ in range(3):
        whole.grad = torch.randn(2, 4, 3)
        for matrix, grad in zip(matrices, whole.grad, strict=True):
            matrix.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(whole.detach(), torch.stack([m.detach() for m in matrices]))


@pytest.mark.parametrize("warmup_init", [False, True])
@pytest.mark.parametrize("step", [1, 100, 9_000, 12_000, 40_000])
def test_adafactor_s_relative_step(warmup_init, step):
    """The update of one number is its gradient's sign times the rate."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Adafactor([parameter], scale_parameter=False, warmup_init=warmup_init)
    optimizer.state[parameter]["step"] = step - 1
    parameter.grad = torch.ones(1)
    optimizer.step()
    expected = min(1e-6 * step if warmup_init else 0.01, 1 / math.sqrt(step))
    assert parameter.item() == pytest.approx(-expected, rel=1e-5)


def test_adafactor_takes_a_closure():
    parameter = torch.nn.Parameter(torch.full((2, 3), 2.0))
    optimizer = Adafactor([parameter], lr=0.1, relative_step=False, scale_parameter=False)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert [optimizer.step(closure).item() for _ in range(2)] == pytest.approx([24, 6 * 1.9**2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_resumes_with_the_same_bits(dtype):
    """Its means are float32 also for parameters in bfloat16."""

    def run(resumed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(4, 3, dtype=dtype)) for _ in range(2)]
        settings = {"lr": 0.01, "relative_step": False, "beta1": 0.9}
        optimizer = Adafactor(parameters, **settings)
        for step in range(4):
            if resumed and step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = Adafactor(parameters, **settings)
                optimizer.load_state_dict(state)
            parameters[0].grad = torch.randn_like(parameters[0])  # the other is never trained
            optimizer.step()
        return parameters

    for whole, again in zip(run(False), run(True), strict=True):
        assert torch.equal(whole, again)


def test_adafactor_equals_the_paper_s_algorithm():
    """For a matrix and a vector; the algorithm is written out."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5))]
    plain = [p.detach().double() for p in parameters]
    settings = {"scale_parameter": False, "relative_step": False}
    optimizer = Adafactor(parameters, lr=0.1, weight_decay=0.01, **settings)
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
def test_tf32_and_determinism_are_set(make_trainer, device_settings, asked):
    device_settings.write(not asked, not asked, True, False)
    make_trainer(tf32=asked, use_deterministic_algorithms=asked)
    device_settings.expect(tf32=asked, deterministic=asked)


def test_a_user_s_deterministic_mode_stays_on(make_trainer):
    torch.use_deterministic_algorithms(True)
    make_trainer()
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", -1.0), ("learning_rate", float("inf")), ("weight_decay", -0.1),
     ("num_train_epochs", 0.0), ("num_train_epochs", -2.0), ("warmup_steps", -1)],
)  # fmt: skip
def test_settings_out_of_range_are_errors(name, value):
    with pytest.raises(ValueError, match=f"--{name} must be"):
        TrainingArguments(output_dir="out", **{name: value})


@pytest.mark.parametrize(("rate", "is_warned"), [(0.0, True), (1e-3, False)])
def test_a_learning_rate_of_0_gives_a_warning(make_trainer, caplog, rate, is_warned):
    """The 0 at the start of a warmup gives none."""
    make_trainer(max_steps=1, learning_rate=rate, warmup_steps=1).train()
    assert ("the learning rate is 0, so nothing is trained" in caplog.text) is is_warned


def test_a_model_without_trainable_parameters_is_an_error(make_trainer, make_model):
    model = make_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        make_trainer(model).train()


@pytest.mark.slow
def test_training_learns_and_leaves_frozen_weights_alone(make_trainer, make_model):
    model, data = make_model(0.1), make_data(16)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainer = make_trainer(model, train=data, num_train_epochs=30)
    before = trainer.evaluate(data)["eval_loss"]
    trainer.train()
    # Evaluation has no dropout, so there is little randomness.
    assert trainer.evaluate(data)["eval_loss"] < before / 2
    assert_same_bits(frozen, {n: p for n, p in model.named_parameters() if not p.requires_grad})
