"""The Trainer on variants of LoRA: what it updates, at what rates, and what it resumes."""

import json

import pytest
import torch
from compare import assert_same_bits
from lora_variants import VARIANTS
from trainer_runs import Recorder, trained, without_runtimes

from loralib.adapters.formats import read_adapter
from loralib.errors import CheckpointError
from transformers import TrainerCallback

pytestmark = pytest.mark.slow


@pytest.fixture
def make(make_trainer, make_model):
    """Makes a Trainer of a model with a variant; keyword arguments are its settings."""

    def trainer(name="lora", dropout=0.1, model=None, **settings):
        built = make_model(dropout, **VARIANTS[name], **(model or {}))
        return make_trainer(built, **settings)

    return trainer


# ---- resuming ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora_only"),
    [*((name, False) for name in VARIANTS), ("lora", True), ("pissa, dora", True)],
)
def test_a_resumed_run_ends_with_the_same_bits(make, tmp_path, name, lora_only):
    settings = {"save_strategy": "steps", "save_steps": 3, "save_lora_only": lora_only}
    settings |= {"lora_plus_ratio": 4.0, "logging_steps": 1}
    whole = make(name, **settings)
    whole.train()
    resumed = make(name, output_dir=str(tmp_path / "second"), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    histories = [without_runtimes(each.state.log_history) for each in (resumed, whole)]
    assert histories[0] == histories[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "pissa, dora", "frozen A"])
def test_in_bfloat16_an_adapter_stays_in_float32(make, tmp_path, name):
    trainer = make(name, bf16=True, save_strategy="steps", save_steps=3)
    trainer.train()
    state = trainer.model.state_dict()
    of_lora = {n: tensor for n, tensor in state.items() if "lora_" in n}
    assert {tensor.dtype for tensor in of_lora.values()} == {torch.float32}
    assert torch.bfloat16 in {tensor.dtype for tensor in state.values()}
    adapter = read_adapter(tmp_path / "out" / "checkpoint-9")
    resumed = make(name, bf16=True, output_dir=str(tmp_path / "second"))
    resumed.train(str(tmp_path / "out" / "checkpoint-9"))
    assert_same_bits(resumed.model.state_dict(), state)
    assert set(adapter.tensors) >= of_lora.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "model", "settings", "message"),
    [
        ("dora", {}, {}, "with --lora_variant dora, but this run has lora"),
        ("pissa", {}, {}, "with --lora_init pissa, but this run has default"),
        ("frozen A", {}, {}, "with --lora_freeze_A True, but this run has False"),
        ("lora", {"lora_freeze_A": True}, {}, "with --lora_freeze_A False, but this run has True"),
        ("lora", {"lora_rank_pattern": {"layer.0.*value": 2}}, {}, "--lora_rank_pattern none, but"),
        ("lora", {"lora_alpha_pattern": {"query": 1}}, {}, "--lora_alpha_pattern none, but"),
        ("lora", {"lora_layers": [1]}, {}, "lora"),
        ("lora", {}, {"lora_plus_ratio": 2.0}, "with --lora_plus_ratio 1.0, but this run has 2.0"),
    ],
)
def test_resuming_with_other_settings_is_refused(make, tmp_path, before, model, settings, message):
    make(before, save_strategy="steps", save_steps=5).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-5")
    other = make(model=model, output_dir=str(tmp_path / "second"), **settings)
    with pytest.raises(CheckpointError, match=message) as caught:
        other.train(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_checkpoint_from_before_variants_is_resumed(make, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 5}
    whole = make(**settings)
    whole.train()
    folder = tmp_path / "out" / "checkpoint-5"
    values = json.loads((folder / "config.json").read_text())
    new = [name for name in values if name.startswith(("lora_layers", "lora_variant", "lora_init"))]
    new += ["lora_freeze_A", "lora_rank_pattern", "lora_alpha_pattern"]
    assert len(new) == 6
    old_values = {name: value for name, value in values.items() if name not in new}
    (folder / "config.json").write_text(json.dumps(old_values))
    resumed = make(output_dir=str(tmp_path / "second"), **settings)
    resumed.train(str(folder))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())


# ---- LoRA+ ----


class Rates(TrainerCallback):
    """Records the learning rate of every group at each step."""

    def __init__(self):
        self.rates = []

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append([group["lr"] for group in optimizer.param_groups])


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("linear", {}),
        ("cosine", {"adafactor": True}),
        ("polynomial", {"weight_decay": 0.1}),
        ("constant", {}),
    ],
)
def test_lora_plus_keeps_its_ratio_at_every_step(make, schedule, settings):
    callback, recorder = Rates(), Recorder()
    trainer = make(
        lora_plus_ratio=8.0,
        lr_scheduler_type=schedule,
        warmup_steps=2,
        callbacks=[callback, recorder],
        **settings,
    )
    trainer.train()
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    is_B = [{names[p].endswith("lora_B") for p in group["params"]} for group in groups]
    assert all(len(kinds) == 1 for kinds in is_B)
    assert {True} in is_B
    assert {False} in is_B
    assert len(callback.rates) == 10
    for rates in callback.rates:
        usual = rates[is_B.index({False})]
        for rate, (faster,) in zip(rates, is_B, strict=True):
            assert rate == pytest.approx(8 * usual if faster else usual)
    for group, kinds in zip(groups, is_B, strict=True):
        assert group["weight_decay"] in (0.0, settings.get("weight_decay", 0.0))
        if kinds == {True}:
            assert group["weight_decay"] == settings.get("weight_decay", 0.0)
    # The rate that is logged is that of --learning_rate.
    assert recorder.rates == [rates[is_B.index({False})] for rates in callback.rates]


def test_lora_plus_multiplies_only_the_update_of_b(make):
    """In one step, B moves `ratio` times as far, and everything else as far as without."""
    runs = {}
    for ratio in (1.0, 4.0):
        trainer = make(
            dropout=0.0,
            lora_plus_ratio=ratio,
            max_steps=1,
            lr_scheduler_type="constant",
            max_grad_norm=0,  # the norm would be summed in another order
        )
        before = trained(trainer.model)
        trainer.train()
        after = trained(trainer.model)
        runs[ratio] = {name: after[name] - before[name] for name in after}
    for name, step in runs[1.0].items():
        if name.endswith("lora_B"):
            # B starts as zero: its step is exact.
            torch.testing.assert_close(runs[4.0][name], 4 * step, rtol=1e-6, atol=0)
            assert step.abs().max() > 0
        else:
            assert torch.equal(runs[4.0][name], step), name


def test_a_ratio_of_one_is_plain_training(make):
    states = []
    for settings in ({}, {"lora_plus_ratio": 1.0}):
        trainer = make(**settings)
        trainer.train()
        states.append(trainer.model.state_dict())
        assert len(trainer.optimizer.param_groups) == 2  # with decay, and without
    assert_same_bits(*states)


@pytest.mark.parametrize("ratio", [0.0, -2.0, float("inf"), float("nan")])
def test_an_invalid_ratio_is_refused(make, ratio):
    rule = "finite" if ratio == float("inf") else "above 0"
    with pytest.raises(ValueError, match=f"--lora_plus_ratio must be {rule}, not"):
        make(lora_plus_ratio=ratio)


def test_lora_plus_needs_lora(make_trainer, make_model):
    with pytest.raises(ValueError, match="--lora_plus_ratio needs a model with LoRA"):
        make_trainer(make_model(lora=False), lora_plus_ratio=2.0)
