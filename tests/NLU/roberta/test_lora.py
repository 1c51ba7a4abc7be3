"""RoBERTa with LoRA: losses, gradients, what is trained, half precision."""

import copy

import pytest
import torch
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from roberta_cases import KINDS, LABELS, LORA, close

import loralib as lora
from loralib.training.precision import Precision, all_in_half, cast_frozen
from transformers import RobertaConfig, RobertaForSequenceClassification


def close_gradients(ours, theirs, magnitude):
    """Allows for rounding forward and backward; `magnitude` is that of the largest gradient."""
    assert_close_to_rounding(ours, theirs, 2 * ENCODER_TERMS, magnitude=magnitude)


# ---- LoRA ----


def merged(model, build, kind):
    """A model without LoRA, whose weights have the deltas merged in."""
    plain = build(kind, **NO_DROPOUT)
    state = {name: t for name, t in model.state_dict().items() if "lora_" not in name}
    plain.load_state_dict(state)
    for name, layer in model.named_modules():
        if isinstance(layer, lora.Linear):
            weight = plain.get_submodule(name).weight
            weight.data += layer.scaling * layer.lora_B.data @ layer.lora_A.data
    return plain


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_merged_weights(upstream, build, arguments, kind, mode):
    model = build(kind, **LORA, **NO_DROPOUT)
    plain = merged(model, build, kind).train(mode)
    model.train_only(("lora",))
    model.train(mode)
    bare = arguments("holes")
    assert not torch.allclose(build(kind)(**bare).logits, model(**bare).logits, atol=0.01)

    given = {**bare, "labels": upstream[f"inputs/{LABELS[kind]}"]}
    loss, reference = model(**given).loss, plain(**given).loss
    close(loss, reference)
    loss.backward()
    reference.backward()
    largest = max(float(p.grad.abs().max()) for p in plain.parameters())
    checked = 0
    for name, layer in model.named_modules():
        if isinstance(layer, lora.Linear):
            of_weight = plain.get_submodule(name).weight.grad * layer.scaling
            close_gradients(layer.lora_A.grad, layer.lora_B.data.t() @ of_weight, largest)
            close_gradients(layer.lora_B.grad, of_weight @ layer.lora_A.data.t(), largest)
            assert layer.lora_A.grad.abs().max() > 1e-4
            checked += 1
    assert checked == 4
    for name, parameter in model.named_parameters():
        if not name.startswith("roberta."):
            close_gradients(parameter.grad, plain.get_parameter(name).grad, largest)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_lora_and_head_alone(upstream, build, arguments, kind):
    model = build(kind, **LORA)
    model.train_only(("lora",))
    model.train()
    before = copy.deepcopy(model.state_dict())
    model(**arguments("padded"), labels=upstream[f"inputs/{LABELS[kind]}"]).loss.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    expected = {
        name
        for name, _ in model.named_parameters()
        if "lora_" in name or not name.startswith("roberta.")
    }
    assert with_gradient == expected
    assert sum("lora_" in name for name in expected) == 8
    assert model.num_parameters(only_trainable=True) == sum(
        model.get_parameter(name).numel() for name in expected
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_train_only_works_on_a_bare_backbone(build):
    model = build("backbone", **LORA)
    model.train_only(("lora",))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    model.train_only(("bias",))
    assert model.get_parameter("embeddings.LayerNorm.bias").requires_grad
    assert not model.get_parameter("encoder.layer.0.attention.self.query.lora_A").requires_grad
    with pytest.raises(
        ValueError, match=r"parts has to be a list of parts of names .*, got 'lora_"
    ):
        model.train_only("lora_")
    with pytest.raises(
        ValueError, match="no parameter of the model has 'lora_' in its name: build"
    ):
        build("backbone").train_only(["lora_"])


def test_key_has_no_lora_and_sizes_are_the_releases():
    config = RobertaConfig(vocab_size=10, max_position_embeddings=4, **{**LORA, "lora_r": 8})
    with torch.device("meta"):
        model = RobertaForSequenceClassification(config)
    model.train_only(("lora",))
    names = {name.rsplit(".", 2)[1] for name, _ in model.named_parameters() if "lora_" in name}
    assert names == {"query", "value"}
    lora_size = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert lora_size == 294_912
    assert model.num_parameters(only_trainable=True) == 294_912 + 590_592 + 1_538


# ---- precision ----


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_frozen_weights_in_bfloat16(upstream, build, arguments, mode, autocast):
    model = build("classifier", **LORA, **NO_DROPOUT)
    model.train_only(("lora",))
    model.train(mode)
    given = {**arguments("padded"), "labels": upstream["inputs/classes"]}
    expected = model(**given)
    cast_frozen(model, torch.bfloat16)
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    precision = Precision(torch.bfloat16 if autocast else torch.float32, "cpu")
    with precision.autocast():
        output = model(**given)
    assert output.logits.dtype == output.loss.dtype == torch.float32
    error = (output.logits - expected.logits).abs().max()
    assert 0 < error < 0.1
    precision.backward(output.loss)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.dtype == torch.float32


def test_biases_can_be_trained_with_frozen_weights_in_half_precision(upstream, build, arguments):
    model = build("classifier", **LORA)
    model.train_only(("lora", "bias"))
    model.train()
    cast_frozen(model, torch.bfloat16)
    with Precision(torch.bfloat16, "cpu").autocast():
        loss = model(**arguments("padded"), labels=upstream["inputs/classes"]).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.grad.dtype == torch.float32


def test_all_in_half_restores_every_bit(build, arguments):
    model = build("classifier", **LORA)
    given = arguments("padded")
    before, logits = copy.deepcopy(model.state_dict()), model(**given).logits
    with all_in_half(model):
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        assert model(**given).logits.dtype == torch.float16
    assert torch.equal(model(**given).logits, logits)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_a_step_clips_and_leaves_the_base_alone(upstream, build, arguments):
    model = build("classifier", **LORA)
    model.train_only(("lora",))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD(trained, lr=1.0)
    precision = Precision(torch.float32, "cpu")
    loss = model(**arguments("padded"), labels=upstream["inputs/classes"]).loss
    precision.backward(loss * 1000)
    before = [p.detach().clone() for p in trained]
    assert precision.step(optimizer, max_norm=0.5)
    moved = torch.cat([(p - b).flatten() for p, b in zip(trained, before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-3)
    assert precision.state_dict().keys() == {"products"}
    for name, tensor in frozen.items():
        assert torch.equal(model.get_parameter(name), tensor)
