"""Tests that public functions refuse arguments of a wrong type or in the wrong order."""

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import loralib as lora
from loralib.adapters.saving import adapter_of
from loralib.errors import CheckpointError

MODEL = nn.Sequential(nn.Linear(4, 4))

# Public functions that take a model first.
MODEL_FUNCTIONS = {
    "add_lora": lambda model: lora.add_lora(model, "0"),
    "load_adapter": lambda model: lora.load_adapter(model, "a.safetensors"),
    "save_adapter": lambda model: lora.save_adapter(model, "a.safetensors"),
    "remove_lora": lora.remove_lora,
    "merge": lora.merge,
    "mark_only_lora_as_trainable": lora.mark_only_lora_as_trainable,
    "lora_state_dict": lora.lora_state_dict,
    "start_from_weights": lora.start_from_weights,
    "parameter_groups": lambda model: lora.parameter_groups(model, 1e-3),
    "AdapterBank": lora.AdapterBank,
}


@pytest.mark.parametrize("call", MODEL_FUNCTIONS.values(), ids=MODEL_FUNCTIONS)
@pytest.mark.parametrize("given", [[MODEL], MODEL.state_dict(), None])
def test_an_argument_that_is_not_a_model_is_refused(call, given):
    kind = type(given).__name__
    with pytest.raises(
        TypeError, match=rf"^the model has to be a torch\.nn\.Module, got a {kind}$"
    ):
        call(given)


@pytest.mark.parametrize("call", [lora.add_lora, lora.save_adapter, lora.load_adapter])
def test_a_model_as_second_argument_is_refused(call):
    with pytest.raises(TypeError, match=r"^the model comes first, got a str and then a Seq"):
        call("a.safetensors", MODEL)


PATH_FUNCTIONS = {
    "load_adapter": lambda path: lora.load_adapter(MODEL, path),
    "save_adapter": lambda path: lora.save_adapter(adapted(), path),
    "read_adapter": lora.read_adapter,
    "write_adapter": lambda path: lora.write_adapter(path, adapter_of(adapted())),
}


def adapted():
    model = nn.Sequential(nn.Linear(4, 4))
    lora.add_lora(model, "0", r=2)
    return model


@pytest.mark.parametrize("call", PATH_FUNCTIONS.values(), ids=PATH_FUNCTIONS)
@pytest.mark.parametrize("given", [None, {"a": 1}, b"a"])
def test_an_argument_that_is_not_a_path_is_refused(call, given):
    with pytest.raises(TypeError, match=r"has to be a path, got (None|\{'a': 1\}|b'a')$"):
        call(given)


@pytest.mark.parametrize("call", PATH_FUNCTIONS.values(), ids=PATH_FUNCTIONS)
def test_an_empty_path_is_refused(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"is empty: give a path$"):
        call("")
    assert not any(Path().iterdir())


@pytest.mark.parametrize("name", ["~/a", "~/a.safetensors", Path("~/a")])
def test_a_tilde_stands_for_the_home_folder(name, tmp_path, monkeypatch):
    """A shell expands it, but Python does not."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))  # on Windows
    monkeypatch.chdir(tmp_path)
    model = adapted()
    with pytest.raises(CheckpointError, match=r"home.a.*: no such checkpoint file$"):
        lora.load_adapter(model, name)
    lora.save_adapter(model, name)
    assert [each.name for each in tmp_path.iterdir()] == ["home"]
    assert (tmp_path / "home" / Path(name).name).exists()
    assert lora.load_adapter(model, name) == ("0",)


def test_an_argument_that_is_not_an_adapter_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"what lora\.read_adapter\(path\) returns, got Sequential"):
        lora.write_adapter(tmp_path / "a.safetensors", adapted())


@pytest.mark.parametrize(
    "labels", ["no", [0, 1], 2, {"no", "yes"}, frozenset({"no"}), {"no": 0, "yes": 1}]
)
def test_labels_that_are_not_a_list_of_names_are_refused(tmp_path, labels):
    with pytest.raises(ValueError, match=r"labels has to be a list of names such as .*, got "):
        lora.save_adapter(adapted(), tmp_path / "a.safetensors", labels=labels)
    in_order = {"no": 0, "yes": 1}.keys()
    lora.save_adapter(adapted(), tmp_path / "a.safetensors", labels=in_order)
    assert lora.read_adapter(tmp_path / "a.safetensors").lora.labels == ("no", "yes")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "1e-3"}, r"lr has to be a number above 0, got '1e-3'"),
        ({"lr": None}, r"lr has to be a number above 0, got None"),
        ({"lr": torch.tensor(-1.0)}, r"lr has to be a number above 0, got tensor\(-1"),
        ({"lr": torch.tensor(float("nan"))}, r"lr has to be a number above 0, got tensor\(nan"),
        ({"lr": torch.tensor([1.0, 2.0])}, r"lr has to be a number above 0, got tensor\(\[1"),
        ({"lr": torch.ones((), device="meta")}, r"lr has to be a number above 0, got tensor"),
        ({"lr": numpy.array([1e-3])}, r"lr has to be a number above 0, got array"),
        ({"lr": 1e-3, "lora_plus_ratio": "16"}, r"lora_plus_ratio has to be a number above 0, got"),
        (
            {"lr": 1e-3, "weight_decay": "0.1"},
            r"weight_decay has to be a number of at least 0, got",
        ),
        (
            {"lr": 1e-3, "weight_decay": -1},
            r"weight_decay has to be a number .* got -1",
        ),
    ],
)
def test_rates_that_are_not_valid_numbers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        lora.parameter_groups(adapted(), **settings)


def test_rates_may_be_tensors_or_arrays():
    rate = torch.tensor(1e-3)
    assert lora.parameter_groups(adapted(), rate)[0]["lr"] is rate
    for one in (numpy.array, torch.tensor):
        group = lora.parameter_groups(adapted(), numpy.array(1e-3), weight_decay=one(0.5))[0]
        assert (group["lr"], group["weight_decay"]) == (1e-3, 0.5)
        assert {type(group["lr"]), type(group["weight_decay"])} == {float}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base": 3}, r"^base has to be a name, such as 'roberta-base', got 3$"),
        ({"base": nn.Linear(8, 8)}, r"^base has to be a name, .*got Linear"),
        ({"task": ["mnli"]}, r"^task has to be a name, such as 'mnli', got \['mnli'\]$"),
    ],
)
def test_a_base_or_task_that_is_not_text_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        lora.save_adapter(adapted(), tmp_path / "a.safetensors", **settings)
    assert not list(tmp_path.iterdir())


def test_a_base_may_be_a_path_and_a_task_empty(tmp_path):
    path = tmp_path / "a.safetensors"
    lora.save_adapter(adapted(), path, base=Path("my", "base"), task="")
    metadata = lora.read_adapter(path).metadata
    assert (metadata.base, metadata.task) == (str(Path("my", "base")), None)
