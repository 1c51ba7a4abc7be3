"""Tests of LoRA on stacks of matrices whose module returns something that computes later."""

import gc
import warnings

import pytest
from stacked_experts import EXPERTS, Experts, R, close, randomised, tokens

import loralib as lora


def generator(self, x):
    for weight in self.gate_up_proj:
        yield x @ weight.mT


async def coroutine(self, x):
    return x @ self.gate_up_proj[0].mT


async def async_generator(self, x):
    yield x @ self.gate_up_proj[0].mT


class Outputs:
    """A model's own iterator."""

    def __init__(self, steps):
        self.steps = steps

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.steps)


LATER = {
    "generator": generator,
    "map": lambda self, x: map(lambda e: x @ self.gate_up_proj[e].mT, range(EXPERTS)),
    "Outputs": lambda self, x: Outputs(generator(self, x)),
    "coroutine": coroutine,
    "async_generator": async_generator,
}


def returning(forward) -> Experts:
    layer = type("Later", (Experts,), {"forward": forward})()
    lora.add_lora(layer, "gate_up_proj", r=R)
    return randomised(layer)


@pytest.mark.parametrize("kind", LATER)
def test_what_would_compute_without_updates_is_an_error(kind):
    layer = returning(LATER[kind])
    message = rf"the forward of Later returns what would compute later, without LoRA \({kind}\): "
    # Recorded, because an error about a coroutine that was never awaited would only be printed.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match=message):
            layer(tokens())
        gc.collect()
    assert not warned
    close(layer.gate_up_proj, layer._parameters["gate_up_proj"])  # the frozen one after it


def test_a_list_of_what_is_computed_has_the_updates():
    layer = returning(lambda self, x: list(generator(self, x)))
    outs = layer(tokens())
    for ours, expected in zip(outs, lora.merge(layer)(tokens()), strict=True):
        close(ours, expected)
