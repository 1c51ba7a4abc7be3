"""Random adapters of small models compute the same after they are saved, loaded and merged."""

import copy
import random

import pytest
import torch
from any_models import AnyModel, ids
from stacked_experts import build, tokens

import loralib as lora
from loralib.errors import CheckpointError
from loralib.lora_layer import lora_layers

# What can be adapted, and inputs.
MODELS = {
    "any": (AnyModel, ids, ["embed", "q_proj", "c_attn", "up", "self_attn"]),
    "experts": (lambda: build("bmm"), tokens, ["q", "gate_up_proj", "down_proj"]),
}


def random_settings(rng, targets, model):
    """Arguments of `add_lora`; some combinations are refused."""
    chosen = rng.sample(targets, rng.randint(1, len(targets)))
    settings = {
        "targets": chosen,
        "r": rng.choice([1, 2, 3, 4]),
        "lora_alpha": rng.choice([1, 2.5, 8]),
        "variant": rng.choice(["lora", "lora", "rslora", "dora", "rslora+dora"]),
        "initialization": rng.choice(["default", "orthogonal", "pissa", "olora"]),
        "freeze_A": rng.random() < 0.3,
        "bias": rng.choice(["none", "none", "all", "lora_only"]),
    }
    for name, values in (("rank_pattern", [1, 2]), ("alpha_pattern", [1, 3])):
        if rng.random() < 0.4:
            settings[name] = {rng.choice(chosen): rng.choice(values)}
    if "c_attn" in chosen and rng.random() < 0.5:
        settings["enable_lora"] = {"c_attn": [True, False, True]}
    if model == "any" and rng.random() < 0.3:
        settings["modules_to_train"] = ["head"]
    return settings


def changed(model, generator):
    """The model, with random values in all that is trained."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise, alpha=0.2)
    return model


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", MODELS)
def test_random_adapters_are_the_same_after_loading(tmp_path, kind):
    make, inputs, targets = MODELS[kind]
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    base = make().double().eval()
    x = inputs()
    x = x.double() if x.is_floating_point() else x
    loaded = {".safetensors": 0, "": 0}  # by suffix; a folder is in PEFT's format
    for number in range(40):
        model = copy.deepcopy(base)
        try:
            lora.add_lora(model, **random_settings(rng, targets, kind))
        except ValueError:  # settings that do not fit together
            assert not lora_layers(model)
            continue
        expected = changed(model, generator)(x)
        for suffix in loaded:
            path, other = tmp_path / f"{number}{suffix}", copy.deepcopy(base)
            try:
                lora.save_adapter(model, path)
            except CheckpointError:  # the format cannot express it
                assert not path.exists()
                continue
            assert set(lora.load_adapter(other, path)) == set(lora_layers(model))
            torch.testing.assert_close(other(x), expected)
            torch.testing.assert_close(lora.merge(other)(x), expected)
            loaded[suffix] += 1
    assert min(loaded.values()) > 5
