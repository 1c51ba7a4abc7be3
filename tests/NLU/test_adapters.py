"""Bottleneck adapters and BitFit: the formulas, and which parameters are trained."""

import pickle

import pytest
import torch
from adapted_encoders import ADAPTED, CROSS, FAMILIES, close
from compare import assert_same_bits
from deberta_cases import XXLARGE
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from half_products import choose_processor, step_and_evaluate

from loralib.training.precision import Precision, cast_frozen
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.modeling_encoder import Intermediate, SubLayerOutput

# ---- the formulas ----


def plain_output(layer, adapter, drop):
    """The formula of a sub-layer's output, with its weights: (computed, residual) -> hidden."""

    def norm(x):
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + eps).sqrt()
        return x * layer.LayerNorm.weight + layer.LayerNorm.bias

    def bottleneck(x, activation):
        inner = activation(x @ adapter.adapter_A.weight.T + adapter.adapter_A.bias)
        return inner @ adapter.adapter_B.weight.T + adapter.adapter_B.bias

    def compute(computed, residual):
        h = drop(computed @ layer.dense.weight.T + layer.dense.bias)
        if adapter is None:
            return norm(h + residual)
        if not adapter.sees_residual:
            return norm(h + bottleneck(h, lambda x: x * x.sigmoid()) + residual)
        y = bottleneck(norm(h + residual), lambda x: x.clamp(min=0)) + h
        return norm(y + residual)

    eps = layer.LayerNorm.eps
    return compute


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["houlsby", "pfeiffer"])
def test_logits_and_gradients_are_the_plain_formulas(
    build_adapted, batch, family, name, monkeypatch
):
    model, plain = (build_adapted(family, [name], **NO_DROPOUT).train() for _ in "12")
    adapters = 0
    for layer in plain.base_model.encoder.layer:
        for part in (layer.attention.output, layer.output):
            adapters += part.adapter is not None
            formula = plain_output(part, part.adapter, lambda x: x)
            monkeypatch.setattr(part, "forward", formula)
    assert adapters == (4 if name == "houlsby" else 2)
    outputs = [each(**batch) for each in (model, plain)]
    for output in outputs:
        output.loss.backward()
    close(outputs[0].logits, outputs[1].logits)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None)
        if parameter.grad is not None:
            close(parameter.grad, expected.grad, 2 * ENCODER_TERMS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["houlsby", "pfeiffer"])
def test_an_adapter_comes_after_the_dropout(build_adapted, family, name, drawn_masks):
    layer = build_adapted(family, [name]).train().base_model.encoder.layer[1].output
    computed, residual = torch.randn(6, 48), torch.randn(6, 32)
    ours = layer(computed, residual)
    (mask,) = drawn_masks
    assert 0 < (mask == 0).double().mean() < 0.5
    close(ours, plain_output(layer, layer.adapter, lambda x: x * mask)(computed, residual))


def initialized(family, **settings):
    """A model with the weights that its class initializes."""
    torch.manual_seed(3)
    shape = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    classes = {
        "roberta": (RobertaConfig, RobertaForSequenceClassification),
        "deberta": (DebertaV2Config, DebertaV2ForSequenceClassification),
    }
    config_type, model_type = classes[family]
    return model_type(config_type(**shape, intermediate_size=48, num_labels=3, **settings)).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["houlsby", "pfeiffer"])
def test_a_fresh_adapter_is_the_identity(family, name, batch, tmp_path):
    base = initialized(family)
    base.base_model.save_pretrained(tmp_path)
    # Adapters are initialized with the whole model, or because the model's file lacks them.
    new = initialized(family, **ADAPTED[name])
    read = type(base).from_pretrained(tmp_path, num_labels=3, **ADAPTED[name])
    for model in (new, read):
        downs = [p for n, p in model.named_parameters() if "adapter.adapter_A.weight" in n]
        assert len(downs) == (4 if name == "houlsby" else 2)
        assert all(0.015 < down.std() < 0.025 for down in downs)
        missing = model.load_state_dict(base.state_dict(), strict=False).missing_keys
        assert missing
        assert all(".adapter." in key for key in missing)
        close(model(**batch).logits, base(**batch).logits)


# ---- what trains ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", CROSS, ids="+".join)
def test_the_head_and_the_adapted_parts_are_trained(build_adapted, batch, family, names):
    """In the backbone, parameters with lora, adapter or bias in their names; all get gradients."""
    model = build_adapted(family, names).train()
    parts = {"lora": "lora", "bitfit": "bias", "houlsby": "adapter", "pfeiffer": "adapter"}
    wanted = [parts[name] for name in names]
    expected = {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(f"{family}.") or any(part in name for part in wanted)
    }
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == expected
    head = {name for name in trained if not name.startswith(f"{family}.")}
    assert len(head) == 4
    assert len(trained) > len(head)
    model(**batch).loss.backward()
    # DDP needs a gradient for each of them.
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == trained


@pytest.mark.parametrize("family", FAMILIES)
def test_bitfit_trains_only_biases_of_the_backbone(build_adapted, family):
    model = build_adapted(family, ["bitfit"])
    inside = {n for n, p in model.base_model.named_parameters() if p.requires_grad}
    assert "embeddings.LayerNorm.bias" in inside
    assert "encoder.layer.1.intermediate.dense.bias" in inside
    assert inside == {n for n, _ in model.base_model.named_parameters() if n.endswith("bias")}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_switch_everything_trains(build_adapted, batch, family):
    model = build_adapted(family).train()
    assert model.adapted_by == ()
    model(**batch).loss.backward()
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())


LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "shape", "settings", "expected", "published"),
    [
        ("roberta", {}, {"lora_r": 8, "lora_alpha": 16}, 294_912, "0.3M"),
        ("roberta", LARGE, {"lora_r": 8, "lora_alpha": 16}, 786_432, "0.8M"),
        ("deberta", XXLARGE, {"lora_r": 16, "lora_alpha": 32}, 4_718_592, "4.7M"),
        # The recipes: two adapters of 2 · 1024 · 8 + 8 + 1024 values per layer, and one of 16 wide.
        ("roberta", LARGE, {"adapter_type": "houlsby", "adapter_size": 8}, 835_968, "0.8M"),
        ("roberta", LARGE, {"adapter_type": "pfeiffer", "adapter_size": 16}, 811_392, "0.8M"),
        # RoBERTa-base: nine biases per layer, of 768 but for one of 3072, and the embeddings' norm.
        ("roberta", {}, {"apply_bitfit": True}, 12 * (8 * 768 - 768 + 3072) + 768, "0.1M"),
    ],
)
def test_parameter_counts_are_the_published_ones(model_type, shape, settings, expected, published):
    switch = {"lora_r": "apply_lora", "adapter_size": "apply_adapter"}
    settings = {**settings, **{switch[name]: True for name in settings if name in switch}}
    with torch.device("meta"):
        if model_type == "roberta":
            model = RobertaForSequenceClassification(RobertaConfig(**shape, **settings))
        else:
            model = DebertaV2ForSequenceClassification(DebertaV2Config(**shape, **settings))
    model.train_only(kind.part for kind in model.adapted_by)
    count = sum(p.numel() for p in model.base_model.parameters() if p.requires_grad)
    assert count == expected
    assert f"{count / 1e6:.1f}M" == published


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("names", [("lora",), ("pfeiffer", "lora"), ("bitfit",), ()])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_without_bfloat16_multiplies_in_float32(
    build_adapted, batch, family, names, large, monkeypatch
):
    """In training and evaluation, with results rounded to bfloat16 as on other processors."""
    model, found = build_adapted(family, names, **NO_DROPOUT), []
    cast_frozen(model, torch.bfloat16)
    for is_emulated in (False, True):
        choose_processor(monkeypatch, has_bfloat16=not is_emulated, large=large)
        halves, results = step_and_evaluate(
            model, lambda: model(**batch).loss, lambda: model(**batch).logits
        )
        assert bool(halves.seen) != is_emulated, halves.seen
        assert halves.others or not is_emulated
        found.append(results)
    theirs, ours = found
    for name, expected in theirs.items():
        # Each of some 50 successive products rounds by up to 2^-9, up or down: about 2% in all.
        error = (ours[name] - expected).norm() / expected.norm()
        assert error < 0.1, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [("houlsby",), ("pfeiffer", "lora"), ("bitfit", "houlsby")])
def test_frozen_weights_in_bfloat16(build_adapted, batch, family, names):
    model = build_adapted(family, names, **NO_DROPOUT).train()
    expected = model(**batch)
    cast_frozen(model, torch.bfloat16)
    precision = Precision(torch.bfloat16, "cpu")
    with precision.autocast():
        output = model(**batch)
    error = (output.logits - expected.logits).abs().max()
    assert 0 < error < 0.15
    precision.backward(output.loss)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.dtype == torch.float32


# ---- files of older versions ----


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_an_older_version_pickled_is_loaded(build_adapted, family, monkeypatch):
    model = build_adapted(family, ["lora"])
    for kind in (Intermediate, SubLayerOutput):
        monkeypatch.setattr(kind, "__module__", "transformers.adapters")
    content = pickle.dumps(model)
    assert b"transformers.adapters" in content
    assert_same_bits(pickle.loads(content).state_dict(), model.state_dict())
