"""The Trainer on a simulated GPU: no waits in a step, few launches, and the CPU's results."""

import math

import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits, rounding
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from simulated_gpu import GPUS, SimulatedGpu, on_cpu, to_cpu
from trainer_runs import trained

from loralib.errors import TrainingError
from loralib.training.precision import Precision, cast_frozen
from transformers import (
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaTokenizerFast,
    Trainer,
    TrainerCallback,
    pipeline,
)
from transformers.data.data_collator import PackedCollator
from transformers.models.deberta_v2 import attention_deberta_v2

FAMILIES = ("roberta", "deberta")
CONSISTENCY = {
    "R-Drop": {"reg_loss_wgt": 1.0},
    "Cutoff": {"masking_prob": 0.5, "unk_token_id": 3, "special_token_ids": [0, 1, 2, 3, 4]},
}
# The most kernels of an update: two layers, forward and backward, with casts and the optimizer.
LAUNCHES = {"roberta": 160, "deberta": 220}


class Steps(TrainerCallback):
    """Records each update's waits and launches, counted from the end of the update before."""

    def __init__(self, gpu):
        self.gpu, self.waits, self.launches = gpu, [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self._start_over()

    def on_step_end(self, args, state, control, **kwargs):
        self.waits.append(list(self.gpu.waits))
        self.launches.append(self.gpu.launches.total())
        self._start_over()

    def _start_over(self):
        self.gpu.waits.clear()
        self.gpu.launches.clear()


@pytest.fixture
def gpu():
    with SimulatedGpu() as gpu:
        yield gpu


def loss_of(gpu, model, batch, dtype):
    """Computes the loss of a batch on the device, as the Trainer does."""
    if dtype is not torch.float32:
        cast_frozen(model, dtype)
    model.to("cuda:0")
    gpu.waits.clear()
    gpu.launches.clear()
    packed = PackedCollator(lambda _: batch)([])
    inputs = {name: x.pin_memory().to("cuda:0", non_blocking=True) for name, x in packed.items()}
    with Precision(dtype, "cuda").autocast():
        return model(**inputs).loss


# ---- waits and launches ----


@pytest.mark.parametrize("family", FAMILIES)
def test_no_update_waits_on_the_simulated_gpu(make_trainer, lora_classifier, gpu, family):
    steps = Steps(gpu)
    make_trainer(lora_classifier(family), callbacks=[steps], bf16=True, max_grad_norm=1.0).train()
    assert len(steps.waits) == 10
    assert not any(steps.waits)
    assert max(steps.launches[1:]) <= LAUNCHES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_weights_are_cast_before_they_are_moved(make_trainer, lora_classifier, gpu, family):
    model = make_trainer(lora_classifier(family), bf16=True).model
    assert {p.dtype for p in model.base_model.embeddings.parameters()} == {torch.bfloat16}
    assert {parameter.is_cuda for parameter in model.parameters()} == {True}
    assert gpu.launches["_to_copy"] == 0


def test_a_checkpoint_compares_the_base_on_the_device(make_trainer, gpu):
    """A frozen weight that did not change is saved as the tensor that was read from the file."""
    model = make_trainer(bf16=True).model
    names = [n for n, p in model.named_parameters() if not p.requires_grad and "lora_" not in n]
    changed = model.get_parameter(names[-1])
    changed.data.add_(1)
    gpu.waits.clear()
    saved = model.full_state_dict()
    assert not any("copy to the CPU" in wait for wait in gpu.waits)
    assert torch.equal(saved.pop(names.pop()), changed)
    assert all(torch.equal(saved[name], model.tensors_read[name]) for name in names)


class NoWaits(TrainerCallback):
    """Makes a wait for a real GPU an error, from the first update to the last."""

    def on_step_end(self, args, state, control, **kwargs):
        is_last = state.global_step == state.max_steps
        torch.cuda.set_sync_debug_mode("default" if is_last else "error")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_no_update_waits_on_a_gpu(make_trainer, lora_classifier, family):
    half = torch.cuda.is_bf16_supported(including_emulation=False)
    trainer = make_trainer(
        lora_classifier(family), callbacks=[NoWaits()], bf16=half, max_grad_norm=1.0
    )
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_one_kernel_in_each_direction(lora_classifier, gpu, batch, family):
    model = lora_classifier(family, num_labels=3).train()
    loss_of(gpu, model, batch, torch.bfloat16).backward()
    name = {"roberta": "flash_attention", "deberta": "scaled_dot_product_efficient_attention"}
    forward = {"roberta": "_forward", "deberta": ""}
    assert gpu.launches[f"_{name[family]}{forward[family]}"] == 2  # layers
    assert gpu.launches[f"_{name[family]}_backward"] == 2
    padded = {"index_copy_", "masked_fill", "_softmax", "baddbmm"} & gpu.launches.keys()
    assert family == "deberta" or not padded


def test_products_with_relative_positions_are_aligned(lora_classifier, gpu, batch, monkeypatch):
    """Aligned in memory to 16 bytes: the number of distances is a multiple of 8."""
    widths, multiply = [], attention_deberta_v2._products

    def record(content, distances):
        widths.append(len(distances))
        return multiply(content, distances)

    monkeypatch.setattr(attention_deberta_v2, "_products", record)
    loss_of(gpu, lora_classifier("deberta", num_labels=3), batch, torch.bfloat16)
    # Rows have 16 columns; the second of two layers has one query per row.
    assert widths == [32, 32, 16, 16]


def test_no_layer_pads_its_scores(lora_classifier, gpu, batch):
    """DeBERTa's rows, of 11 tokens, are padded to 16 columns once per batch instead."""
    model = lora_classifier("deberta", num_labels=3)
    loss_of(gpu, model, batch, torch.float32)
    assert gpu.launches["constant_pad_nd"] == 1


@pytest.mark.parametrize("terms", ["c2p", "p2c", "p2c|c2p"])
@pytest.mark.parametrize("length", [16, 11])
def test_attention_is_one_kernel_for_rows_of_one_length(lora_classifier, gpu, terms, length):
    """With rows of one length, no mask makes a new tensor of the scores."""
    model = lora_classifier("deberta", pos_att_type=terms).train()
    ids = torch.arange(2, 2 + length).expand(3, -1)
    rows = {"input_ids": ids, "labels": torch.zeros(3, dtype=torch.long)}
    loss_of(gpu, model, rows, torch.float16).backward()
    assert gpu.launches["_scaled_dot_product_efficient_attention"] == 2  # layers
    assert gpu.launches["constant_pad_nd"] <= 1  # once per batch


@pytest.mark.parametrize("family", FAMILIES)
def test_float16_waits_only_for_the_scaler(make_trainer, lora_classifier, gpu, family):
    steps = Steps(gpu)
    make_trainer(lora_classifier(family), callbacks=[steps], fp16=True, max_grad_norm=1.0).train()
    for waits in steps.waits:
        assert len(waits) == 1
        assert waits[0].startswith("_local_scalar_dense in ")
        assert "precision.py" in waits[0]


@pytest.mark.slow
def test_accumulation_and_adafactor_do_not_wait(make_trainer, lora_classifier, gpu):
    steps = Steps(gpu)
    more = {"gradient_accumulation_steps": 2, "adafactor": True, "label_smoothing_factor": 0.1}
    make_trainer(lora_classifier("roberta"), callbacks=[steps], bf16=True, **more).train()
    assert steps.waits == [[]] * len(steps.waits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONSISTENCY)
def test_consistency_training_does_not_wait(make_trainer, lora_classifier, gpu, kind):
    steps = Steps(gpu)
    model = lora_classifier("roberta", **CONSISTENCY[kind])
    make_trainer(model, callbacks=[steps], bf16=True).train()
    assert steps.waits == [[]] * len(steps.waits)


def test_a_masked_language_model_does_not_wait(gpu, batch):
    config = RobertaConfig(60, 32, 2, 4, 48, max_position_embeddings=40, type_vocab_size=1)
    model = RobertaForMaskedLM(config).train()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss_of(gpu, model, {**batch, "labels": labels}, torch.bfloat16).backward()
    assert gpu.waits == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_waits_of_an_evaluation_do_not_grow_with_its_batches(
    make_trainer, lora_classifier, gpu, family
):
    waits = []
    for size in (9, 4, 1):
        trainer = make_trainer(
            lora_classifier(family),
            bf16=True,
            per_device_eval_batch_size=size,
            compute_metrics=lambda prediction: {},
        )
        trainer.evaluate()
        gpu.waits.clear()
        trainer.evaluate()
        waits.append(len(gpu.waits))
    assert waits == [waits[0]] * 3


# ---- results ----


# bfloat16 rounds activations about eight times per layer, forward and backward.
@pytest.mark.parametrize(("dtype", "terms"), [(torch.float32, ENCODER_TERMS), (torch.bfloat16, 16)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", GPUS)
def test_losses_and_gradients_equal_the_cpu_s(lora_classifier, batch, kind, family, dtype, terms):
    settings = {"num_labels": 3, **NO_DROPOUT}
    expected = lora_classifier(family, **settings).train()
    if dtype is not torch.float32:
        cast_frozen(expected, dtype)
    with Precision(dtype, "cpu").autocast():
        loss = expected(**batch).loss
    loss.backward()
    model = lora_classifier(family, **settings).train()
    with kind() as gpu:
        ours = loss_of(gpu, model, batch, dtype)
        ours.backward()
    assert_close_to_rounding(to_cpu(ours), loss, terms, dtype)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    theirs = {n: p.grad for n, p in expected.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        assert gradient.is_cuda
        expected = theirs[name].norm()
        assert (to_cpu(gradient) - theirs[name]).norm() <= rounding(0, terms, dtype, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_work_with_the_gpu_as_default_device(lora_classifier, gpu, batch, family):
    """With a GPU as PyTorch's default device, as in a pipeline's `device_placement`."""
    model = lora_classifier(family, num_labels=3).eval().to("cuda:0")
    on_device = {name: x.to("cuda:0") for name, x in batch.items()}
    with torch.no_grad():
        expected = model(**on_device).logits
        with torch.device("cuda:0"):
            assert torch.equal(on_cpu(model(**on_device).logits), on_cpu(expected))


def test_a_pipeline_works_within_device_placement(lora_classifier, gpu, tiny_base):
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny_base)
    model = lora_classifier("roberta", vocab_size=len(tokenizer))
    classify = pipeline("text-classification", model, tokenizer=tokenizer, device=0)
    expected = classify(["a film", "a longer film"])
    with classify.device_placement():
        assert classify(["a film", "a longer film"]) == expected


# ---- losses that are read later ----


class Diverging(Trainer):
    """Its fifth batch has a loss of NaN."""

    seen = 0

    def compute_loss(self, model, inputs, return_outputs=False):
        self.seen += 1
        loss = super().compute_loss(model, inputs, return_outputs)
        return loss * math.nan if self.seen == 5 else loss


@pytest.mark.slow
@pytest.mark.parametrize("last", [5, 7, 10])
def test_a_loss_that_is_not_finite_ends_the_run(make_trainer, lora_classifier, gpu, tmp_path, last):
    trainer = make_trainer(lora_classifier("roberta"), kind=Diverging, bf16=True, max_steps=last)
    with pytest.raises(TrainingError, match="the loss is not finite at step 5; no checkpoint"):
        trainer.train()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_logged_losses_equal_the_cpu_s(make_trainer, lora_classifier):
    def losses(device=None):
        trainer = make_trainer(
            lora_classifier("roberta", **NO_DROPOUT), logging_steps=3, learning_rate=1e-4
        )
        assert (trainer.args.device.type == "cuda") == (device is not None)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    expected = losses()
    with SimulatedGpu() as gpu:
        ours = losses(gpu)
    assert ours == pytest.approx(expected, abs=1e-3)
    assert len(ours) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"fp16": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_resumed_on_a_gpu_ends_bit_exact(
    make_trainer, lora_classifier, tmp_path, family, settings, graphs
):
    """With CUDA graphs, the resumed run records them in other steps."""
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    settings = {"use_deterministic_algorithms": True, "cuda_graphs": graphs, **settings}
    ends = []
    for resumed in (None, str(tmp_path / "out" / "checkpoint-4")):
        trainer = make_trainer(
            lora_classifier(family, **dropout), save_strategy="steps", save_steps=4, **settings
        )
        trainer.train(resumed)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        ends.append((trained(trainer.model), losses))
    assert_same_bits(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
