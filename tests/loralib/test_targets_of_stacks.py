"""Tests of which stacks of matrices targets, exclusions and patterns match, beside modules."""

import re

import pytest
import torch
from stacked_experts import FORWARD, STACKS, Mixture, R, build, close, owned_by, randomised
from torch import nn

import loralib as lora
from loralib.errors import UnsupportedLayerError
from loralib.stacks import matrices

LINEAR = ("layers.0.shared.down_proj",)
DOWN = tuple(f"layers.{layer}.experts.down_proj_lora" for layer in range(2))
BOTH = tuple(f"layers.{layer}.experts.{name}_lora" for layer in range(2) for name in STACKS)
QUERIES = ("layers.0.q_proj", "layers.1.q_proj")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"targets": "down_proj", "lora_dropout": 0.1}, LINEAR),
        ({"targets": "*_proj", "variant": "dora"}, (*QUERIES, *LINEAR)),
        ({"targets": re.compile(r".*_proj"), "lora_dropout": 0.1}, (*QUERIES, *LINEAR)),
        ({"targets": "experts.down_proj"}, DOWN),
        ({"targets": re.compile(r".*experts\..*")}, BOTH),
        ({"targets": "gate_up_proj"}, BOTH[::2]),
        ({"targets": ["down_proj", "experts.down_proj"]}, (*LINEAR, *DOWN)),
        ({"targets": "experts.*_proj", "exclude": "gate_up_proj"}, DOWN),
        ({"targets": "experts.*_proj", "exclude": "down_proj"}, BOTH[::2]),
        ({"targets": "experts.*_proj", "exclude": [*BOTH[::2]]}, DOWN),
        ({"targets": ["q_proj", "down_proj"], "exclude": ["experts.down_proj"]}, QUERIES + LINEAR),
        ({"targets": "experts.down_proj", "layers": [1]}, DOWN[1:]),
        ({"targets": DOWN}, DOWN),
        ({"targets": "down_proj_lora", "exclude": DOWN[0]}, DOWN[1:]),
        ({"targets": "*_proj_lora"}, BOTH),  # not the linear layers, which have no such child
        ({"targets": "experts.*", "exclude": "act_fn"}, BOTH),
        ({"targets": ["q_proj", "experts.*"]}, (*QUERIES, *BOTH)),
        ({"targets": re.compile(r"layers\.0\.experts\..*"), "exclude": "*act_fn"}, BOTH[:2]),
    ],
)
def test_a_target_matches_stacks_only_if_it_matches_no_module(settings, expected):
    names = lora.add_lora(Mixture(), **{"r": R, **settings})
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"layers": [0]}, {"layers": [1]}, BOTH[2:]),
        ({"exclude": "gate_up_proj"}, {"exclude": ["down_proj"]}, BOTH[::2]),
        ({"targets": DOWN[:1]}, {"exclude": "layers.0.*"}, BOTH[2:]),
        ({"targets": "gate_up_proj"}, {"exclude": "gate_up_proj_lora"}, DOWN),
        ({"targets": DOWN[:1]}, {"targets": "down_proj_lora", "layers": [1]}, DOWN[1:]),
    ],
)
@pytest.mark.parametrize("target", ["experts.*", re.compile(r".*\.experts\..*proj.*")])
def test_a_second_call_matches_the_remaining_stacks(target, first, second, expected):
    """The LoRA layers that the first call has added do not hide the other stacks."""
    model = Mixture()
    lora.add_lora(model, **{"targets": target, "r": R, **first})
    assert lora.add_lora(model, **{"targets": target, "r": R, **second}) == expected
    with pytest.raises(ValueError, match="has LoRA already"):
        lora.add_lora(model, target)


def test_a_stack_may_be_named_like_the_lora_layer_of_another_stack():
    def build():
        owner = owned_by(nn.Module, **FORWARD)
        owner["owner"].stack_lora = nn.Parameter(torch.randn(2, 4, 4))
        return owner

    for names in (["stack_lora"], ["owner.stack_lora"], ["stack_lora_lora"], ["own*.stack_lora"]):
        assert lora.add_lora(build(), names, r=R) == ("owner.stack_lora_lora",)
    with pytest.raises(UnsupportedLayerError, match=r"^owner\.stack belongs to .* 'stack_lora'"):
        lora.add_lora(build(), ["stack", "stack_lora"], r=R)


def test_the_returned_names_are_targets_for_another_model():
    names = lora.add_lora(build(), ["q", *STACKS], r=R)
    model = build()
    assert lora.add_lora(model, names, r=R) == names
    with pytest.raises(ValueError, match="has LoRA already"):
        lora.add_lora(model, names[1:2], r=R)


def test_a_pattern_s_key_applies_to_stacks_and_modules_that_it_matches():
    """As an exclusion does. Only a target has to name the stacks apart."""
    model, both = Mixture(), ["down_proj", "experts.down_proj"]
    names = lora.add_lora(model, both, r=R, rank_pattern={"down_proj": 3})
    assert sorted(names) == sorted((*LINEAR, *DOWN))
    assert {model.get_submodule(name).r for name in names} == {3}
    with pytest.raises(ValueError, match="matches only modules that are left out"):
        lora.add_lora(Mixture(), both, r=R, exclude="down_proj")


@pytest.mark.parametrize("pattern", [DOWN[0], "0.experts.down_proj_lora", "0.experts.down_proj"])
def test_a_pattern_s_key_may_be_a_returned_name(pattern):
    model = Mixture()
    names = lora.add_lora(
        model, ["experts.*", "q_proj"], r=R, rank_pattern={pattern: 3}, alpha_pattern={pattern: 5}
    )
    layers = {name: model.get_submodule(name) for name in names}
    assert {n: (each.r, each.lora_alpha) for n, each in layers.items()} == {
        **dict.fromkeys(names, (R, 16)),
        DOWN[0]: (3, 5),
    }


def test_pattern_keys_that_match_no_stack_or_do_not_fit_one_are_refused():
    for key in ("q_proj_lora", "up_proj_lora"):
        with pytest.raises(ValueError, match=f"the pattern '{key}' matches none of the adapted"):
            lora.add_lora(Mixture(), ["experts.*", "q_proj"], r=R, rank_pattern={key: 3})
    with pytest.raises(ValueError, match=r"lower it in rank_pattern, where 'down_proj_lora' sets"):
        lora.add_lora(Mixture(), "experts.*", r=R, rank_pattern={"down_proj_lora": 9})
    message = r"is not a linear layer, .*: remove it from enable_lora, or use a longer name that m"
    for key in (DOWN[0], "down_proj"):
        with pytest.raises(ValueError, match=message):
            lora.add_lora(Mixture(), [*LINEAR, *DOWN], enable_lora={key: [True, False]})
    slices = {"shared.down_proj": [True, False]}
    assert len(lora.add_lora(Mixture(), [*LINEAR, *DOWN], r=R, enable_lora=slices)) == 3


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (
            "block",
            UnsupportedLayerError,
            r"^block is a .*: name layers inside it, such as block\.q, ",
        ),
        ("conv", UnsupportedLayerError, r"^block\.conv has no weight that is a plain param"),
        ("other", ValueError, r"^'other' matches no module of the model; it has block, conv, para"),
    ],
)
def test_the_original_tensors_of_weight_norm_are_not_suggested_as_stacks(target, error, message):
    with pytest.raises(error, match=message):
        lora.add_lora(weight_normed(), target)


@pytest.mark.parametrize(
    ("kind", "held"),
    [(nn.ParameterList, [torch.zeros(3, 4, 4)]), (nn.ParameterDict, {"0": torch.zeros(3, 4, 4)})],
)
def test_the_tensors_of_a_list_or_dict_are_not_suggested_as_stacks(caplog, kind, held):
    weights, message = kind(held), rf"^weights\.0 belongs to a {kind.__name__}, wh"
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "weights": weights})
    with pytest.raises(ValueError, match=r"^'other' matches no module of the model; it has layers"):
        lora.add_lora(model, "other")
    lora.add_lora(model, re.compile(r"layers\.0"), r=R)
    with pytest.raises(UnsupportedLayerError, match=message):
        lora.add_lora(model, "weights.0", r=R)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])})
    model["weights"] = weights
    lora.add_lora(model, "all-linear", r=R)
    assert not caplog.messages


def test_a_kernel_that_has_a_second_name_is_not_suggested_as_a_stack(caplog):
    block = nn.Sequential(nn.Conv1d(8, 64, 3))
    block.weight = block[0].weight
    model = nn.ModuleDict({"layers": nn.ModuleList([block, nn.Sequential(nn.Linear(4, 4))])})
    with pytest.raises(UnsupportedLayerError, match=r"^layers\.0 is a .*: leave it out of targets"):
        lora.add_lora(model, "layers.0", r=R)
    lora.add_lora(model, "all-linear", r=R)
    assert not caplog.messages


def weight_normed() -> nn.ModuleDict:
    torch.manual_seed(0)
    conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 64, 9))
    return nn.ModuleDict({"block": nn.ModuleDict({"conv": conv, "q": nn.Linear(8, 8)})})


@pytest.mark.parametrize("target", ["original1", "block.conv.parametrizations.weight.original1"])
def test_an_original_tensor_of_weight_norm_is_adapted_if_it_is_named(tmp_path, target):
    model, loaded, x = weight_normed(), weight_normed(), torch.randn(1, 8, 16)
    conv, before = model["block"]["conv"], model["block"]["conv"](x)
    assert len(lora.add_lora(model, target, r=R)) == 1
    assert lora.add_lora(model, "q", r=R) == ("block.q",)
    out = randomised(model)["block"]["conv"](x)
    assert (out - before).abs().max() > 0.01
    lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.load_adapter(loaded, tmp_path / "a.safetensors")
    close(loaded["block"]["conv"](x), out)
    lora.merge(model)
    close(conv(x), out)


def test_a_stack_is_out_by_in_unless_its_module_says_otherwise():
    module = nn.Module()
    module.stack = nn.Parameter(torch.randn(3, 4, 6))
    assert matrices(module, module.stack) is module.stack
    module.is_transposed = True
    assert torch.equal(matrices(module, module.stack), module.stack.mT)
