"""Tests the loading of GPT-2's weights: what files hold or lack, and files of other models."""

import pytest
import torch

from loralib.errors import CheckpointError
from model import MODEL_CARDS, GPT2Config, GPT2LMModel, config_of
from weights import canonical_names, load_base


def plain_config(gpt2_fixture, **lora_fields):
    """Returns the configuration of the fixture's plain shape."""
    n, layers, heads, vocabulary, positions, _ = gpt2_fixture.SHAPES["plain"]
    return GPT2Config(n, layers, heads, vocabulary, positions, **lora_fields)


def test_lora_that_a_file_lacks_is_initialized(gpt2_fixture):
    config = plain_config(gpt2_fixture, lora_attn_dim=2, lora_attn_alpha=6)
    weights = canonical_names(gpt2_fixture.draw_weights("plain"), "a file")
    torch.manual_seed(0)
    model = load_base(config, weights, "a file")
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta
        if name.endswith("lora_A"):
            assert 0.08 < parameter.std() < 0.12
            assert parameter.abs().max() <= 32**-0.5
        elif name.endswith("lora_B"):
            assert not parameter.any()
        else:
            assert torch.equal(parameter, weights[name])
    ids = torch.randint(0, 53, (2, 9))
    plain = load_base(plain_config(gpt2_fixture), weights, "a file")
    assert torch.equal(model(ids), plain(ids))


def test_weights_of_a_float16_file_are_converted_to_float32(gpt2_fixture):
    weights = canonical_names(gpt2_fixture.draw_weights("plain"), "a file")
    halves = {name: tensor.half() for name, tensor in weights.items()}
    model = load_base(plain_config(gpt2_fixture), halves, "a file")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.transformer.wpe.weight, halves["transformer.wpe.weight"].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lora_of_a_file_in_half_precision_is_trained_in_float32(gpt2_fixture, dtype):
    """The base stays in half precision if `held_in` says so."""
    config = plain_config(gpt2_fixture, lora_attn_dim=2, lora_attn_alpha=6)
    weights = canonical_names(gpt2_fixture.draw_weights("plain"), "a file")
    halves = load_base(config, weights, "a file").to(dtype)
    tensors = dict(halves.named_parameters())
    model = load_base(config, tensors, "a file", held_in=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else dtype), name
        assert torch.equal(parameter, tensors[name].to(parameter.dtype))


@pytest.mark.parametrize("card", MODEL_CARDS)
def test_another_size_names_the_card_that_fits(card):
    """A model of another card is built from each card's tensors, which take no memory here."""
    names = list(MODEL_CARDS)
    other = names[names.index(card) - 1]
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT2LMModel(config_of(card)).named_parameters()}
    tensors = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    with pytest.raises(CheckpointError) as caught:
        load_base(config_of(other), tensors, "base.bin")
    assert str(caught.value) == f"base.bin: holds a {card}; give --model_card {card}"


def test_a_shape_that_no_card_has():
    """An example is distilgpt2."""
    with torch.device("meta"):
        small = GPT2LMModel(config_of("gpt2.sm").with_layers(6))
    shapes = {name: p.shape for name, p in small.named_parameters()}
    tensors = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    with pytest.raises(CheckpointError) as caught:
        load_base(config_of("gpt2.sm"), tensors, "base.bin")
    assert str(caught.value) == (
        "base.bin: holds a GPT-2 of width 768 with 6 blocks, which matches none of the model cards "
        "(gpt2.xs 128 and 4, gpt2.sm 768 and 12, gpt2.md 1024 and 24, gpt2.lg 1280 and 36): give a "
        "base of one of these shapes"
    )
