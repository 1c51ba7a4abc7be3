"""Tests that work on a model grows in proportion to the number of its modules.

A mixture of experts has tens of thousands of linear layers. Work is counted in calls of functions,
so that no test depends on time.
"""

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import loralib as lora

FEW, MANY = 16, 64


def blocks(number: int) -> nn.Module:
    """Returns a model with two linear layers in each of its blocks, and a head."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(number))
    return nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 2)})


def adapted(number: int) -> nn.Module:
    model = blocks(number)
    lora.add_lora(model, "all-linear", r=1)
    return model


def linear_names(number: int) -> list[str]:
    """Returns the names of the linear layers in the blocks."""
    return [f"layers.{index}.{part}" for index in range(number) for part in (0, 1)]


def second_names(number: int) -> list[str]:
    return [f"layers.{index}.1" for index in range(number)]


def adding(number: int, **settings) -> Callable[[], object]:
    model = blocks(number)
    return lambda: lora.add_lora(model, r=1, **settings)


def to_adapted(function: Callable[[nn.Module], object], number: int) -> Callable[[], object]:
    model = adapted(number)
    return lambda: function(model)


def first_steps(number: int) -> Callable[[], object]:
    """Makes an optimizer's first ten steps, after which it checks what got gradients."""
    optimizer = torch.optim.SGD(lora.parameter_groups(adapted(number), lr=0.1))
    return lambda: [optimizer.step() for _ in range(10)]


def loading(file: Path, number: int) -> Callable[[], object]:
    lora.save_adapter(adapted(number), file)
    base = blocks(number)
    return lambda: lora.load_adapter(base, file)


def serving(file: Path, number: int) -> Callable[[], object]:
    lora.save_adapter(adapted(number), file)
    bank, adapter = lora.AdapterBank(blocks(number)), lora.read_adapter(file)
    return lambda: bank.add("served", adapter)


def switching(file: Path, number: int) -> Callable[[], object]:
    bank = lora.AdapterBank(blocks(number))
    lora.save_adapter(adapted(number), file)
    bank.add("a", lora.read_adapter(file))
    bank.add("b", lora.read_adapter(file))

    def switch() -> None:
        with bank.use(["a", "b"]):
            pass

    return switch


# For a number of blocks and a folder, each returns the function whose calls are counted.
WORK: dict[str, Callable[[int, Path], Callable[[], object]]] = {
    "add_lora": lambda n, _: adding(n, targets="all-linear"),
    "targets by name": lambda n, _: adding(n, targets=linear_names(n)),
    "exclusions by name": lambda n, _: adding(n, targets="all-linear", exclude=linear_names(n)[1:]),
    "exclusions of others": lambda n, _: adding(
        n, targets=re.compile(r".*\d\.0|head"), exclude=second_names(n)
    ),
    "ranks by name": lambda n, _: adding(
        n, targets="all-linear", rank_pattern=dict.fromkeys(linear_names(n), 1)
    ),
    "a glob": lambda n, _: adding(n, targets="layers.*.1", modules_to_train="head"),
    "parameter_groups": lambda n, _: to_adapted(lambda m: lora.parameter_groups(m, lr=0.1), n),
    "first steps": lambda n, _: first_steps(n),
    "eval": lambda n, _: to_adapted(nn.Module.eval, n),
    "repr": lambda n, _: to_adapted(repr, n),
    "lora_state_dict": lambda n, _: to_adapted(lora.lora_state_dict, n),
    "save": lambda n, path: to_adapted(lambda m: lora.save_adapter(m, path / "a.safetensors"), n),
    "save for PEFT": lambda n, path: to_adapted(lambda m: lora.save_adapter(m, path / "a"), n),
    "load": lambda n, path: loading(path / "a.safetensors", n),
    "load from PEFT": lambda n, path: loading(path / "a", n),
    "merge": lambda n, _: to_adapted(lora.merge, n),
    "remove_lora": lambda n, _: to_adapted(lora.remove_lora, n),
    "add to a bank": lambda n, path: serving(path / "a", n),
    "switch": lambda n, path: switching(path / "a", n),
}


def calls(function: Callable[[], object]) -> int:
    """Returns how many functions are called, including those written in C."""
    count = 0

    def on_event(_frame: object, event: str, _function: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # which may call what other tests left
    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("work", WORK)
def test_work_grows_in_proportion_to_the_number_of_modules(tmp_path, work):
    counted = []
    for number in (1, FEW, MANY):  # the first also imports what is imported when it is needed
        path = tmp_path / str(number)
        path.mkdir()
        counted.append(calls(WORK[work](number, path)))
    _, of_few, of_many = counted
    assert of_many <= MANY / FEW * of_few
