"""Tests of LoRA on stacks of matrices whose module returns an iterator, which computes later."""

import copy
import gc
import itertools
import warnings

import pytest
import torch
from stacked_experts import EXPERTS, Experts, R, close, randomised, tokens

import loralib as lora


def generator(self, x):
    for weight in self.gate_up_proj:
        yield x @ weight.mT


async def coroutine(self, x):
    return x @ self.gate_up_proj[0].mT


async def async_generator(self, x):
    yield x @ self.gate_up_proj[0].mT


def each(self, x):
    return lambda e: x @ self.gate_up_proj[e].mT


class Items:
    """A sequence with only `__getitem__` and `__len__`."""

    def __init__(self, item):
        self.item = item

    def __len__(self):
        return EXPERTS

    def __getitem__(self, index):
        if index >= EXPERTS:
            raise IndexError
        return self.item(index)


def called_until_none(self, x):
    steps = generator(self, x)
    return iter(lambda: next(steps, None), None)


ITERATORS = {
    "generator": generator,
    "generator expression": lambda self, x: (each(self, x)(e) for e in range(EXPERTS)),
    "of what is there": lambda self, x: (out for out in list(generator(self, x))),
    "map": lambda self, x: map(each(self, x), range(EXPERTS)),
    "chain": lambda self, x: itertools.chain(map(each(self, x), range(EXPERTS))),
    "islice": lambda self, x: itertools.islice(map(each(self, x), range(EXPERTS)), EXPERTS),
    "filter": lambda self, x: filter(torch.is_tensor, generator(self, x)),
    "called until None": called_until_none,
    "of items": lambda self, x: iter(Items(each(self, x))),
    "reversed": lambda self, x: reversed(Items(each(self, x))),
    "list": lambda self, x: list(generator(self, x)),
}


def returning(forward) -> Experts:
    layer = type("Later", (Experts,), {"forward": forward})()
    lora.add_lora(layer, "gate_up_proj", r=R)
    return randomised(layer)


@pytest.mark.parametrize("what", ITERATORS)
def test_each_step_of_a_returned_iterator_has_the_updates(what):
    layer = returning(ITERATORS[what])
    outs, steps = layer(tokens()), layer(tokens())
    first = next(iter(steps))
    close(layer.gate_up_proj, layer._parameters["gate_up_proj"])  # the frozen one between steps
    merged = list(copy.deepcopy(lora.merge(layer))(tokens()))
    close(first, merged[0])
    for ours, expected in zip(outs, merged, strict=True):
        close(ours, expected)


@pytest.mark.parametrize("pairs", [zip, lambda indices, steps: enumerate(steps)])
def test_each_step_of_zip_and_enumerate_has_the_updates(pairs):
    layer = returning(lambda self, x: pairs(range(EXPERTS), generator(self, x)))
    outs = dict(layer(tokens()))
    for e, expected in dict(lora.merge(layer)(tokens())).items():
        close(outs[e], expected)


class Outputs:
    """A model's own iterator over outputs that are already computed."""

    def __init__(self, steps):
        self.all, self.left = steps, list(steps)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class OwnMap(map):
    """A model's class that is derived from one of Python's iterators."""


def test_other_iterators_are_returned_as_they_are():
    layer = returning(lambda self, x: Outputs(list(generator(self, x))))
    outs, expected = layer(tokens()), lora.merge(copy.deepcopy(layer))(tokens())
    assert type(outs) is Outputs
    for ours, merged in zip(outs.all, expected, strict=True):
        close(ours, merged)
    iterators = [iter([]), reversed([]), OwnMap(len, [])]
    for each in iterators:
        assert returning(lambda self, x, each=each: each)(tokens()) is each


def test_a_generator_gets_what_is_sent_and_its_return_value_is_returned():
    def forward(self, x):
        e = yield x @ self.gate_up_proj[0].mT
        yield x @ self.gate_up_proj[e].mT
        return "done"

    layer = returning(forward)
    steps = layer(tokens())
    next(steps)
    second = steps.send(2)
    with pytest.raises(StopIteration, match="done"):
        next(steps)
    close(second, tokens() @ lora.merge(layer).gate_up_proj[2].mT)


@pytest.mark.parametrize("forward", [coroutine, async_generator])
def test_a_returned_coroutine_or_async_generator_is_an_error(forward):
    """It would compute after the forward, without updates. A refused coroutine is closed."""
    layer = returning(forward)
    message = (
        rf"the forward of Later returns a coroutine or async generator \({forward.__name__}\), "
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a coroutine was never awaited
        with pytest.raises(RuntimeError, match=message):
            layer(tokens())
        gc.collect()
