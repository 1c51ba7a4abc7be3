"""Tests of which modules a name, a glob or a regular expression matches, and of the errors."""

import re

import pytest
import torch
from any_models import AnyModel
from torch import nn

from loralib.module_names import layer_of
from loralib.targets import (
    as_targets,
    by_pattern,
    check_exclusions,
    find,
    guessed_head,
    matches,
)

BLOCK = ("q_proj", "v_proj", "c_attn", "up", "down")


@pytest.fixture(scope="module")
def model():
    return AnyModel()


@pytest.mark.parametrize(
    ("target", "name", "expected"),
    [
        ("q_proj", "layers.0.q_proj", True),
        ("q_proj", "q_proj", True),
        ("q_proj", "layers.0.xq_proj", False),
        ("0.q_proj", "layers.0.q_proj", True),
        ("0.q_proj", "layers.10.q_proj", False),
        ("layers.*.q_proj", "layers.10.q_proj", True),
        ("layers.*.q_proj", "model.layers.10.q_proj", True),
        ("[qv]_proj", "layers.0.v_proj", True),
        ("[qv]_proj", "layers.0.k_proj", False),
        ("Q_PROJ", "layers.0.q_proj", False),
        (re.compile(r"layers\.\d\.(q|v)_proj"), "layers.3.v_proj", True),
        (re.compile(r"q_proj"), "layers.3.q_proj", False),
        (re.compile(r".*q_proj"), "layers.3.q_proj", True),
    ],
)
def test_which_names_a_target_matches(target, name, expected):
    assert matches(name, target) is expected


@pytest.mark.parametrize(
    ("name", "layer"),
    [("layers.3.q", 3), ("h.11.attn.0", 11), ("head", None), ("layer1.conv", None), ("0", 0)],
)
def test_the_layer_number_in_a_module_s_name(name, layer):
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"targets": "q_proj"}, [f"layers.{i}.q_proj" for i in range(3)]),
        ({"targets": ["up", "q_proj"], "layers": [1]}, ["layers.1.q_proj", "layers.1.up"]),
        ({"targets": "*_proj", "layers": range(2, 3)}, ["layers.2.q_proj", "layers.2.v_proj"]),
        ({"targets": "*_proj", "exclude": "layers.[01].*"}, ["layers.2.q_proj", "layers.2.v_proj"]),
        ({"targets": ["head", "head"]}, ["head"]),
        (
            {"targets": "all-linear", "exclude": ["encoder.*", "up", "down"]},
            [f"layers.{i}.{name}" for i in range(3) for name in BLOCK[:3]],
        ),
    ],
)
def test_matching_modules_are_in_the_model_s_order(model, arguments, expected):
    assert find(model, **arguments) == expected


def test_all_linear_matches_all_linear_layers_but_the_head(model):
    encoder = ("self_attn", "self_attn.out_proj", "linear1", "linear2")
    assert find(model, "all-linear") == [
        *(f"layers.{i}.{name}" for i in range(3) for name in BLOCK),
        *(f"encoder.layers.{i}.{name}" for i in range(2) for name in encoder),
    ]
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert find(plain, "all-linear") == ["0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": "qproj"}, r"'qproj' matches no module of the model; it has .*q_proj"),
        ({"targets": ["q_proj", "zzz"]}, r"'zzz' matches no module of the model; it has "),
        ({"targets": re.compile("q_proj")}, r"'q_proj' matches no module"),
        ({"targets": "q_proj", "exclude": "kproj"}, r"'kproj' matches no module"),
        (
            {"targets": "q_proj", "exclude": "*_proj"},
            r"matches only modules that are left out",
        ),
        ({"targets": "q_proj", "layers": [0, 3]}, r"has no layer 3; its layers are 0 to 2"),
        ({"targets": ()}, r"no target is given"),
        (
            {"targets": {"q_proj": 4}},
            r"^targets has to be a list, not a dict: ranks by module are r",
        ),
        (
            {"targets": "q_proj", "exclude": {"head": 4}},
            r"^exclude has to be a list, not a dict: its values have no meaning$",
        ),
        (
            {"targets": re.compile(b"q_proj")},
            r"^targets has to be .*, got re\.compile\(b'q_proj'\)$",
        ),
        (
            {"targets": "q_proj", "layers": [True]},
            r"^layers has to be a list of numbers .*\[True\]$",
        ),
        (
            {"targets": r".*q_proj|.*v"},
            r"; a regular expression is re\.compile\(r'\.\*q_proj\|\.\*v'\)$",
        ),
        ({"targets": "[q_proj"}, r"; it has .*proj, .*, model\.named_modules\(\) lists all names$"),
        ({"targets": "All_Linear"}, r"; 'all-linear' takes all linear layers, "),
        ({"targets": "query"}, r"; it has c_attn, up, .*, linear1, .*, q_proj, v_proj .*; 'all-l"),
        (
            {"targets": "q_proj", "exclude": r"k|.*v_proj"},
            r"; a regular expression is re\.compile\(",
        ),
        ({"targets": "q_proj", "exclude": "zzz"}, r"; it has c_attn, conv1, .* more$"),
        ({"targets": "haed", "with_stacks": False}, r"; it has head$"),
        ({"targets": "q_proj", "layers": []}, r"layers is empty: leave it out to adapt all layers"),
        (
            {"targets": "all-linear", "exclude": ["layers.*", "encoder.*"]},
            r"'all-linear' means only modules that are left out, such as encoder\.layers\.0\.lin",
        ),
    ],
)
def test_what_matches_nothing_is_refused_in_one_line(model, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        find(model, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("several", [["layers.0.q_proj", "layers.1.*"], []])
def test_a_dict_without_values_is_accepted_as_a_list(model, several):
    ordered = dict.fromkeys(several)
    assert as_targets(ordered) == tuple(several)
    found = find(model, ["q_proj", "up"], exclude=ordered)
    assert found == find(model, ["q_proj", "up"], exclude=several)


class OwnLinear(nn.Module):
    """A linear layer that a library has written from scratch, as PyTorch Geometric has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (nn.ReLU(), "weight", r"'weight' matches no module of the model; it has none"),
        (
            nn.Sequential(nn.ReLU(), nn.Linear(2, 2)),
            "all-linear",
            r"treats module 1, the model's only",
        ),
        (nn.Sequential(nn.ReLU()), "all-linear", r"finds no linear layer in the model: name the"),
        (nn.Sequential(nn.ReLU()), "relu", r"'relu' matches no module of the model; it has 0$"),
        (nn.MultiheadAttention(4, 1), "all-linear", r"treats out_proj, the model's only linear"),
        (
            nn.Sequential(OwnLinear(), OwnLinear()),
            "all-linear",
            r"finds only linear layers of .* such as module 0 \(\S*test_targets.OwnLinear\): name",
        ),
    ],
)
def test_models_with_only_one_layer_or_none_are_refused(model, target, message):
    with pytest.raises(ValueError, match=message) as error:
        find(model, target)
    assert "\n" not in str(error.value)


def test_which_layer_is_taken_for_the_head():
    layers = {"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)}
    assert guessed_head(nn.ModuleDict(layers)) == "last"
    assert guessed_head(nn.ModuleDict({"norm": nn.LayerNorm(2)})) is None
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
    assert guessed_head(nn.ModuleDict({**layers, "blocks": blocks})) is None


def test_numbered_layers_in_the_head_alone_are_not_taken_for_all_layers():
    """As in GANDALF of pytorch_tabular, whose backbone has its linear layers in lists."""
    backbone = nn.ModuleDict(
        {name: nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for name in ("a", "b")}
    )
    head = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 1)))
    model = nn.ModuleDict({"backbone": backbone, "head": head})
    lists = ["backbone.a.0", "backbone.a.1", "backbone.b.0", "backbone.b.1"]
    assert find(model, "all-linear") == [*lists, "head.0.0"]
    assert guessed_head(model) == "head.1.0"


def test_many_heads_do_not_make_a_shallow_model_one_without_layers():
    heads = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    layers = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    model = nn.ModuleDict({"layers": layers, "heads": heads})
    assert find(model, "all-linear") == ["layers.0.0"]
    assert guessed_head(model) is None


def test_names_that_end_in_a_number_are_suggested_but_not_bare_numbers(model):
    with pytest.raises(ValueError, match=r"it has linear1, linear2, layers, norm1, c_attn, up, "):
        find(model, "linaer1")
    with pytest.raises(ValueError, match=r"it has 0, 1; 'all-linear' takes"):  # all of them
        find(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "zzz")


def test_the_likeliest_names_are_suggested_first():
    model = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    likeliest = r"it has out_proj, self_attn, multihead_attn, linear1, linear2; 'all-linear' takes"
    with pytest.raises(ValueError, match=likeliest):
        find(model, "q_proj")
    with pytest.raises(ValueError, match=r"it has conv$"):
        find(nn.ModuleDict({"conv": nn.Conv1d(1, 1, 1)}), "q_proj")


class Experts(nn.Module):
    """A layer whose experts are stacks, one larger than all else, as in DeepSeek-V3 and Mixtral."""

    def __init__(self, has_shared):
        super().__init__()
        self.q_proj, self.router = nn.Linear(2, 2), nn.Identity()
        self.down_proj = nn.Linear(2, 3) if has_shared else None
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(5, 6, 2))
        self.experts.down_proj = nn.Parameter(torch.empty(5, 2, 3))


@pytest.mark.parametrize(
    ("has_shared", "target", "names"),
    [
        (False, "w1", "experts.gate_up_proj, experts.down_proj, q_proj, experts, router"),
        (True, "w1", "experts.gate_up_proj, experts.down_proj, down_proj, q_proj, experts, router"),
        (False, "down", "experts.down_proj, experts.gate_up_proj, q_proj"),
        (True, "down", "experts.down_proj, down_proj, experts.gate_up_proj, q_proj"),
        (False, "expert", "experts, experts.gate_up_proj, experts.down_proj, q_proj"),
    ],
)
def test_the_largest_are_suggested_first_and_stacks_by_unambiguous_names(has_shared, target, names):
    model = nn.Sequential(Experts(has_shared), Experts(has_shared))
    with pytest.raises(ValueError, match=rf"; it has {re.escape(names)}; 'all-linear' takes all"):
        find(model, target)
    assert find(model, "experts.down_proj") == ["0.experts.down_proj", "1.experts.down_proj"]


def test_stacks_do_not_match_where_only_modules_are_allowed():
    model = nn.Sequential(Experts(has_shared=False))
    message = r", only parameters such as 0\.experts\.down_proj; it has q_proj$"
    with pytest.raises(ValueError, match=message):
        find(model, "experts.down_proj", with_stacks=False)
    assert find(model, "*xperts*", with_stacks=False) == ["0.experts"]
    assert find(model, "*xperts.*") == ["0.experts.gate_up_proj", "0.experts.down_proj"]


def test_for_a_remaining_stack_a_target_that_matches_it_alone_is_suggested():
    model = Experts(has_shared=False).experts
    model.x = nn.ModuleDict({"down_proj": nn.Linear(2, 2)})
    left_out = r"left out, such as x\.down_proj: .*; to mean the stack down_proj, give "
    with pytest.raises(ValueError, match=left_out + r"re\.compile\(r'down_proj'\)$"):
        find(model, "down_proj", exclude="x.*")
    assert find(model, re.compile("down_proj"), exclude="x.*") == ["down_proj"]
    with pytest.raises(ValueError, match=r"leave it out of targets as well$"):
        find(model, "down_proj", exclude=["x.*", re.compile("down_proj")])


def test_exclusions_by_the_names_of_stacks_lora_layers_are_checked_too():
    model = nn.Sequential(Experts(has_shared=True))
    meant = ["0.down_proj", "0.experts.down_proj"]
    check_exclusions(model, [re.compile(r"0\.experts(\.down_proj_lora)?")], meant)
    with pytest.raises(
        ValueError, match=r"' matches none of the targets, only a module around 0\.experts\.d"
    ):
        check_exclusions(model, [re.compile(r"0\.experts")], meant)
    with pytest.raises(ValueError, match=r"only a module around 0\.down_proj: use '0\.\*'$"):
        check_exclusions(model, ["0"], meant)


def test_a_stack_of_a_numbered_module_and_a_lazy_layer_are_suggested():
    stack, lazy = nn.Module(), nn.LazyLinear(2)
    stack.weights = nn.Parameter(torch.empty(2, 2, 2))
    model = nn.Sequential(stack, nn.ModuleDict({"up": nn.Linear(2, 2), "lazy": lazy}))
    with pytest.raises(ValueError, match=r"; it has weights, up, lazy; 'all-linear'"):
        find(model, "zzz")


def test_a_layer_number_is_refused_if_the_model_has_no_numbered_layers():
    with pytest.raises(ValueError, match="no layer 0; its layers are none"):
        find(nn.ModuleDict({"a": nn.Linear(2, 2)}), "a", layers=[0])


def test_values_by_pattern():
    names = ["layers.0.q", "layers.0.v", "layers.1.q"]
    values = by_pattern(names, {"layers.0.*": 2, "q": 4}, 8)
    assert values == {"layers.0.q": 2, "layers.0.v": 2, "layers.1.q": 4}
    with pytest.raises(ValueError, match="the pattern 'k' matches none of the adapted modules"):
        by_pattern(names, {"k": 1}, 8)
