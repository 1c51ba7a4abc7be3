"""LoRA and bottleneck adapters compute what the release's formulas give in upstream's models.

make_release_fixture.py recorded logits, gradients, and the losses of a few steps of AdamW.
"""

import make_release_fixture as maker
import pytest
import torch
from safetensors.torch import load_file

from transformers import (
    AdamW,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

RELEASE = load_file(maker.FIXTURE)
MODELS = {
    "roberta": (RobertaConfig, RobertaForSequenceClassification),
    "deberta": (DebertaV2Config, DebertaV2ForSequenceClassification),
}
# Everything is in float64, except the loss of our models and the scale of upstream's DeBERTa, which
# are in float32. This is its relative rounding, 6e-8, grown through a few layers.
FLOAT32_TOLERANCE = 1e-6


def build(case, **settings):
    """Makes this project's model, in training mode; it trains only what the release trains."""
    family, kind, _ = maker.CASES[case]
    config_class, model_class = MODELS[family]
    if kind == "lora":
        settings |= {"apply_lora": True, "lora_r": maker.RANK, "lora_alpha": maker.ALPHA}
    else:
        settings |= {"apply_adapter": True, "adapter_type": kind, "adapter_size": maker.SIZE}
    config = config_class(**{**maker.SHAPE, **maker.FAMILIES[family], **settings})
    model = model_class(config).double()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(maker.draw(name, parameter.shape))
    model.train_only([kind_.part for kind_ in model.adapted_by])
    return model.train()


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def train(model):
    """Trains the fixture's steps and returns their losses."""
    parameters = trained(model)
    biases = [p for name, p in parameters.items() if name.endswith("bias")]
    others = [p for name, p in parameters.items() if not name.endswith("bias")]
    optimizer = AdamW(
        [
            {"params": others, "weight_decay": maker.DECAY},
            {"params": biases, "weight_decay": 0.0},
        ],
        lr=maker.RATE,
        betas=maker.BETAS,
        eps=maker.EPSILON,
    )
    losses = []
    for _ in range(maker.STEPS):
        loss = model(**maker.draw_inputs()).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("case", maker.CASES)
def test_logits_equal_the_release_s(case):
    model, expected = build(case), RELEASE[f"{case}/logits"]
    for mode in (True, False):
        ours = model.train(mode)(**maker.draw_inputs()).logits
        torch.testing.assert_close(ours, expected, rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("case", maker.CASES)
def test_gradients_equal_the_release_s(case):
    model = build(case)
    model(**maker.draw_inputs()).loss.backward()
    theirs = {n.removeprefix(f"{case}/grad/"): t for n, t in RELEASE.items() if "/grad/" in n}
    theirs = {name: t for name, t in theirs.items() if not name.startswith(tuple(maker.CASES))}
    assert trained(model).keys() == theirs.keys()
    for name, parameter in trained(model).items():
        atol = FLOAT32_TOLERANCE * theirs[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("case", maker.CASES)
def test_losses_of_training_equal_the_release_s(case):
    expected = RELEASE[f"{case}/losses"].tolist()
    assert train(build(case)) == pytest.approx(expected, rel=10 * FLOAT32_TOLERANCE)
    assert expected[-1] < 0.6 * expected[0]


def test_lora_on_positions_differs_from_the_release():
    """PEFT also adapts DeBERTa's positions, which gives other logits and losses."""
    expected = RELEASE["deberta_lora/logits"]
    model = build("deberta_lora", lora_positions=True)
    ours = model(**maker.draw_inputs()).logits
    assert (ours - expected).abs().max() > 1e-2
    losses = RELEASE["deberta_lora/losses"].tolist()
    assert train(model) != pytest.approx(losses, rel=1e-3)


def test_pytorch_s_adamw_differs_from_the_release(monkeypatch):
    """It adds epsilon to the corrected moment, and decays weights first."""
    monkeypatch.setitem(globals(), "AdamW", torch.optim.AdamW)
    losses = RELEASE["roberta_lora/losses"].tolist()
    assert train(build("roberta_lora")) != pytest.approx(losses, rel=10 * FLOAT32_TOLERANCE)
