"""Tests of `add_lora`'s arguments: wrong types, iterators, other libraries' names, large ranks."""

import inspect
import re

import numpy
import pytest
import torch
from any_models import AnyModel, names_of
from paths import ROOT
from torch import nn

import loralib as lora
from loralib.errors import CheckpointError
from loralib.inject import _OTHER_LIBRARIES_NAMES


def test_the_error_for_a_rank_that_is_too_large_suggests_one_pattern_for_all_layers():
    def blocks(*gates):
        return nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    nn.ModuleDict({"up": nn.Linear(8, 8), "gate": nn.Linear(8, size)})
                    for size in gates
                )
            }
        )

    with pytest.raises(ValueError, match=r"layers\.0\.gate, .* 1; .*rank_pattern=\{'gate': 1\}$"):
        lora.add_lora(blocks(1, 1, 1), "all-linear", r=4)
    model = blocks(1, 1, 1)
    lora.add_lora(model, "all-linear", r=4, rank_pattern={"gate": 1})
    assert [model.get_submodule(name).r for name in names_of(model)] == [4, 1] * 3
    with pytest.raises(ValueError, match=r"rank_pattern=\{'0\.gate': 1\}$"):
        lora.add_lora(blocks(1, 2, 1), "all-linear", r=4)
    deep = nn.ModuleDict({"a": blocks(2, 2), "b": blocks(1, 2)})
    with pytest.raises(
        ValueError, match=r"a\.layers\.0\.gate, .* 2; .*\{'a\.layers\.0\.gate': 2\}$"
    ):
        lora.add_lora(deep, "all-linear", r=4)
    deep = nn.ModuleDict(
        {"gate": nn.Linear(8, 2), "inner": nn.ModuleDict({"gate": nn.Linear(8, 1)})}
    )
    with pytest.raises(ValueError, match=r"rank_pattern=\{re\.compile\(r'gate'\): 2\}$"):
        lora.add_lora(deep, "gate", r=4)
    with pytest.raises(ValueError, match=r"lower it in rank_pattern, where 'gate' sets it$"):
        lora.add_lora(blocks(1, 1), "all-linear", r=4, rank_pattern={"gate": 2})


def test_iterators_are_accepted_as_lists():
    model = AnyModel()
    names = lora.add_lora(
        model,
        (name for name in ("q_proj", "v_proj", "self_attn")),
        r=2,
        exclude=(name for name in ("layers.0.q_proj", "out_proj")),
        layers=(number for number in (0, 1)),
        modules_to_train=(name for name in ("head",)),
        rank_pattern={"q_proj": 1},
    )
    attentions = tuple(f"encoder.layers.{i}.self_attn" for i in range(2))
    assert names == ("layers.0.v_proj", "layers.1.q_proj", "layers.1.v_proj", *attentions)
    assert model.head.weight.requires_grad
    assert lora.add_lora(AnyModel(), "q_proj", modules_to_train=iter(()))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"target_modules": ["q_proj"]}, "target_modules: give targets"),
        ({"targets": "q_proj", "lora_rank": 4}, "lora_rank: give r"),
        (
            {"target_modules": "q_proj", "r": 4, "alpha": 16, "dropout": 0.1, "use_dora": True},
            "target_modules, alpha, dropout, use_dora: give targets, lora_alpha, lora_dropout, "
            "variant ('lora', 'rslora', 'dora' or 'rslora+dora')",
        ),
        (
            {"target_modules": "q_proj", "target_parameters": "experts"},
            "target_modules, target_parameters: give targets",
        ),
    ],
)
def test_the_error_for_another_library_s_argument_names_ours(theirs, ours):
    with pytest.raises(TypeError, match=rf"^add_lora has no {re.escape(ours)}$"):
        lora.add_lora(AnyModel(), **theirs)


def test_the_error_for_all_other_libraries_arguments_at_once_is_short():
    with pytest.raises(TypeError, match=r"_modules, layers_to_.* and 9 more: give ") as refused:
        lora.add_lora(AnyModel(), **dict.fromkeys(_OTHER_LIBRARIES_NAMES))
    assert len(str(refused.value)) < 300
    given = str(refused.value).partition(": give ")[2]
    assert all(ours in given for ours in _OTHER_LIBRARIES_NAMES.values())


def test_an_unknown_keyword_is_python_s_own_error():
    for keywords in ({"task_type": "CAUSAL_LM"}, {"targts": "q_proj"}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            lora.add_lora(AnyModel(), **keywords)


def test_the_suggested_names_are_arguments_and_agree_with_the_page_for_peft_users():
    arguments = inspect.signature(lora.add_lora).parameters
    page = (ROOT / "docs" / "from-peft.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    for theirs, ours in _OTHER_LIBRARIES_NAMES.items():
        assert theirs not in arguments
        assert ours.partition(" ")[0] in arguments
        for left, right in rows:
            if f"`{theirs}`" in left:
                assert ours.partition(" ")[0] in right


WRONG_TYPES = {
    "targets": (
        {"targets": None},
        "targets has to be a module's name, a pattern or a list of these, got None",
    ),
    "a target": ({"targets": ["q_proj", 3]}, "targets has to be .* or a list of these, got 3"),
    "a module": ({"targets": nn.Linear(2, 2)}, r"targets has to be .* got Linear\(in_features=2"),
    "modules": ({"targets": nn.ModuleList([nn.Linear(2, 2)])}, r"targets has to be .* got Linear"),
    "exclude": ({"exclude": 1}, "exclude has to be .* got 1"),
    "layers": ({"layers": 0}, r"layers has to be a list of numbers such as \[0, 1\] .* got 0"),
    "a layer": ({"layers": ["0"]}, r"layers has to be a list of numbers .* got \['0'\]"),
    "to train": ({"modules_to_train": 1}, "modules_to_train has to be .* got 1"),
    "ranks": ({"rank_pattern": 4}, "have to be a dict of targets and values, such as .* got 4"),
    "slices": ({"enable_lora": [True, False]}, r"have to be a dict .* got \[True, False\]"),
    "an array": ({"enable_lora": numpy.ones(2)}, "have to be a dict .* got array"),
    "a slice": (
        {"enable_lora": {"q_proj": 2}},
        "enable_lora of q_proj .* list .* got 2",
    ),
    "no slice": ({"enable_lora": {"q_proj": []}}, r"enable_lora \[\] does not fit layers\.0"),
    "no slice of an embedding": (
        {"targets": "embed", "enable_lora": {"embed": [False]}},
        r"enable_lora \[False\] does not fit embed: .* divide 8, the number of outputs",
    ),
    "a matrix": ({"enable_lora": {"q_proj": numpy.ones((1, 2))}}, "each of .* got array"),
    "ranks as one": ({"r": torch.tensor([1, 2])}, "an integer of at least 1, got tensor"),
    "alphas as one": ({"lora_alpha": torch.ones(2)}, "lora_alpha has to be a number above 0, got"),
    "dropouts as one": ({"lora_dropout": torch.ones(2)}, "lora_dropout has to be a prob.* got t"),
    "a flag": ({"enable_lora": {"q_proj": ["no"]}}, "each of enable_lora of .* True or False, got"),
    "alpha": ({"lora_alpha": "16"}, "lora_alpha has to be a number above 0, got '16'"),
    "dropout": ({"lora_dropout": "0.1"}, "lora_dropout has to be a probability .* got '0.1'"),
    "too much dropout": ({"lora_dropout": 2}, "lora_dropout has to be a probability .* got 2"),
    "a frozen half": ({"freeze_A": "no"}, "freeze_A has to be True or False, got 'no'"),
    "tied": ({"untie": "no"}, "untie has to be True or False, got 'no'"),
    "a variant": ({"variant": ["dora"]}, "unknown variant"),
    "all dropped": ({"lora_dropout": 1.0}, "lora_dropout 1 drops all of an update's input"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_a_wrong_type_or_value_is_refused_in_one_line(case):
    settings, message = WRONG_TYPES[case]
    model = AnyModel()
    with pytest.raises(ValueError, match=message) as error:
        lora.add_lora(model, **{"targets": "q_proj", **settings})
    assert "\n" not in str(error.value)
    assert not names_of(model)


def test_an_iterator_of_slices_is_read_once_for_all_modules():
    model = AnyModel()
    adapted = lora.add_lora(model, "q_proj", r=2, enable_lora={"q_proj": iter([True, False])})
    assert len(adapted) > 1
    assert [model.get_submodule(name).enable_lora for name in adapted] == [[True, False]] * len(
        adapted
    )


def test_numpy_s_numbers_are_accepted(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    alphas = {"1": numpy.float32(4)}
    lora.add_lora(
        model, ["0", "1"], r=numpy.int64(2), lora_alpha=numpy.int64(8), alpha_pattern=alphas
    )
    assert (model[0].r, model[0].lora_alpha, model[1].lora_alpha) == (2, 8, 4.0)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    assert lora.read_adapter(tmp_path / "a.safetensors").lora.alpha_of("1") == 4


@pytest.mark.parametrize(
    ("second", "warning"),
    [
        ({}, None),
        ({"r": 4, "lora_alpha": 2}, None),
        ({"variant": "dora"}, "several values of variant now, dora, lora: save_adapter refuses"),
        ({"initialization": "olora"}, "several values of initialization now, default, olora: sav"),
        ({"initialization": "orthogonal"}, None),
        ({"freeze_A": True}, None),
    ],
)
def test_several_kinds_that_save_adapter_refuses_are_warned_of_before_training(
    tmp_path, caplog, second, warning
):
    model = AnyModel()
    lora.add_lora(model, "q_proj", r=2, modules_to_train=[])
    lora.add_lora(model, "v_proj", **{"r": 2, **second})
    lines = [record.getMessage() for record in caplog.records]
    if warning is None:
        assert not lines
        lora.save_adapter(model, tmp_path / "adapter")
        return
    (line,) = lines
    assert warning in line
    assert line.endswith("so give all calls of add_lora the same, or save the merged model")
    with pytest.raises(CheckpointError, match=r"several kinds.*; merge the model, and save"):
        lora.save_adapter(model, tmp_path / "adapter")
    lora.merge(model)
