"""Compares the layers with PyPI's loralib 0.1.2, as recorded by make_loralib_fixture.py."""

import json

import pytest
import torch
from compare import assert_close_to_rounding
from paths import FIXTURES
from safetensors import safe_open

import loralib as lora

FIXTURE = FIXTURES / "loralib_0_1_2.safetensors"

with safe_open(FIXTURE, framework="pt") as file:
    # Sorted, because the order of the file's metadata is arbitrary.
    LAYERS = {name: json.loads(text) for name, text in sorted(file.metadata().items())}
    TENSORS = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

# The terms of a sum over 4 channels of 3 · 3, and of a gradient's over 2 · 6 · 6 positions.
TERMS = 4 * 9 + 2 * 6 * 6


def recorded(name, what):
    prefix = f"{name}/{what}"
    return {key[len(prefix) :]: value for key, value in TENSORS.items() if key.startswith(prefix)}


def build(name):
    kind, args, kwargs = LAYERS[name]
    return getattr(lora, kind)(*args, **kwargs)


def close(actual, expected):
    """Compares two tensors, or two dicts of tensors."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, tensor in expected.items():
            close(actual[key], tensor)
    else:
        assert_close_to_rounding(actual, expected, TERMS)


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


def test_state_dict_has_the_same_names_shapes_and_dtypes_in_both_modes(name):
    layer = build(name)
    theirs = {key: (value.shape, value.dtype) for key, value in recorded(name, "state/").items()}
    for mode in (True, False):
        layer.train(mode)
        ours = {key: (value.shape, value.dtype) for key, value in layer.state_dict().items()}
        assert ours == theirs


def test_a_seed_gives_the_same_initial_weights(name):
    torch.manual_seed(0)
    close(build(name).state_dict(), recorded(name, "init/"))


def test_outputs_and_gradients_with_a_state_dict_of_0_1_2(name):
    layer = build(name)
    layer.load_state_dict(recorded(name, "state/"), strict=True)
    x = TENSORS[f"{name}/x"].clone()
    x.requires_grad = x.is_floating_point()
    out = layer(x)
    close(out, TENSORS[f"{name}/train"])

    out.backward(TENSORS[f"{name}/out"])
    trained = {"x": x, **dict(layer.named_parameters())}
    gradients = {key: t.grad for key, t in trained.items() if t.grad is not None}
    close(gradients, recorded(name, "grad/"))

    layer.eval()
    close(layer(x), TENSORS[f"{name}/eval"])
    with torch.no_grad():
        close(layer(x), TENSORS[f"{name}/eval"])
    assert layer.merged == (LAYERS[name][2].get("merge_weights", True))
