"""Tests of "all-linear": which layer it takes for the head, and warnings about what is left out."""

import copy
import re

import pytest
import torch
from any_models import AnyModel
from torch import nn

import loralib as lora
from loralib.targets import shortest_targets


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, True),
        ({"modules_to_train": "first"}, True),
        ({"modules_to_train": "last"}, False),
        ({"exclude": "last"}, False),
        ({"bias": "all"}, False),
        ({"bias": "lora_only"}, True),
        ({"targets": ["all-linear", "last"]}, False),
        ({"targets": ["first", "second"]}, False),
    ],
)
def test_the_layer_treated_as_the_head_is_warned_of_unless_the_call_names_it(
    caplog, settings, warns
):
    names = ("first", "second", "last")
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    first = {"exclude": "first"} if settings.get("modules_to_train") == "first" else {}
    lora.add_lora(model, **{"targets": "all-linear", "r": 2, **settings, **first})
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == warns
    assert all(
        "'all-linear' treats last, the last linear layer, as the head" in text for text in warnings
    )
    assert all(text.endswith("or to exclude if it should stay frozen") for text in warnings)


@pytest.mark.parametrize("head", ["adapted before", "built with LoRA", "frozen with its LoRA"])
def test_no_warning_about_a_head_that_has_lora(caplog, head):
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)})
    if head == "built with LoRA":
        model["last"] = lora.Linear(4, 4, r=2)
    else:
        lora.add_lora(model, "last", r=2)
        model.requires_grad_(head == "adapted before")
    assert lora.add_lora(model, "all-linear", r=2) == ("first",)
    assert not caplog.records


def test_for_a_head_tied_to_the_embedding_the_warning_only_suggests_exclude(caplog):
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "first": nn.Linear(4, 4)})
    model["last"] = nn.Linear(4, 9, bias=False)
    model["last"].weight = model["words"].weight
    plain = copy.deepcopy(model)
    lora.add_lora(model, "all-linear", r=2)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.endswith("which stays frozen: add it to exclude if it should stay frozen")
    caplog.clear()
    lora.add_lora(plain, "all-linear", r=2, exclude="last")
    assert not caplog.records


class Experts(nn.Module):
    """All experts of a layer, as one parameter, as in Hugging Face's Transformers."""

    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 8, 8))

    def forward(self, x):
        return x @ self.up[0].mT


def with_experts(count):
    blocks = [{"q": nn.Linear(8, 8), "experts": Experts(count)} for _ in range(3)]
    return nn.ModuleDict({"layers": nn.ModuleList(map(nn.ModuleDict, blocks))})


@pytest.mark.parametrize(
    ("count", "settings", "warns"),
    [
        (4, {}, True),
        (4, {"modules_to_train": "experts"}, False),
        (4, {"targets": "q"}, False),
        (4, {"exclude": "experts.up"}, False),
        (4, {"exclude": "experts"}, False),
        (4, {"exclude": "up_lora"}, False),
        (4, {"targets": ["all-linear", "experts.up"]}, False),
        (1, {}, False),
    ],
)
def test_stacks_with_more_weights_than_all_that_is_adapted_are_warned_of(
    caplog, count, settings, warns
):
    model = with_experts(count)
    assert len(lora.add_lora(model, **{"targets": "all-linear", "r": 2, **settings})) >= 3
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == warns * [
        "the targets leave out the stacks of matrices layers.0.experts.up, layers.1.experts.up … "
        "and 1 more, which hold more than all that is adapted: add 'experts.up' to targets, or to "
        "exclude to keep them frozen"
    ]


def with_shared(**more):
    """As in DeepSeek-V3: linear layers that have the names of the experts' stacks."""
    model = with_experts(4)
    for layer in model["layers"]:
        layer["shared"] = nn.ModuleDict({"up": nn.Linear(8, 8), **more})
    return model


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"targets": "up"}, (0, 1, 2)),
        ({"targets": ["q", "*up"]}, (0, 1, 2)),
        ({"targets": "up", "layers": iter([1])}, (1,)),
        ({"targets": "shared.up"}, ()),
        ({"targets": ["up", "experts.up"]}, ()),
        ({"targets": ["up", "0.experts.up"]}, (1, 2)),
        ({"targets": "up", "exclude": "experts.up"}, ()),
        ({"targets": "up", "exclude": "1.experts.up"}, (0, 2)),
        ({"targets": "up", "exclude": "experts"}, ()),
        ({"targets": "up", "modules_to_train": "experts"}, ()),
        ({"targets": "q"}, ()),
    ],
)
def test_stacks_with_the_name_of_a_targeted_layer_are_warned_of(caplog, settings, left_out):
    """Such targets adapted the experts when these were linear layers; longer ones are explicit."""
    model = with_shared()
    names = lora.add_lora(model, **{"r": 2, **settings})
    stacks = [f"layers.{layer}.experts.up" for layer in left_out]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(left_out)
    assert all(f"of matrices {', '.join(stacks[:2])}" in line for line in warnings)
    assert all(f"and {len(left_out) - 2} more" in line for line in warnings if len(left_out) > 2)
    assert all("add 'experts.up' to targets" in line for line in warnings)
    caplog.clear()
    if left_out:
        lora.remove_lora(model)
        model.requires_grad_(True)
        again = lora.add_lora(model, "up", r=2, exclude="experts.up")
        assert not [each for each in again if "experts" in each]
        assert not caplog.records
        second = lora.add_lora(model, "experts.up", r=2, layers=left_out)
        assert sorted(second) == [f"{stack}_lora" for stack in stacks]
        assert not caplog.records
    assert names


def with_shared_and_gates():
    """As in DeepSeek-V3: two layers of each expert are one stack, the larger one."""
    model = with_shared(gate=nn.Linear(8, 8))
    for layer in model["layers"]:
        layer["experts"].gate_up = nn.Parameter(torch.randn(4, 16, 8))
    return model


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"targets": ["q", "gate", "up"]}, ["up", "gate_up"]),
        ({"targets": "*up"}, ["up", "gate_up"]),
        ({"targets": "shared.*"}, []),
        ({"targets": re.compile(r".*\b(gate|up)")}, ["up", "gate_up"]),
        ({"targets": ["gate", "up", "experts.up"]}, ["gate_up"]),
        # Without gate as a target, the stack of gate and up is not meant.
        ({"targets": "up"}, ["up"]),
        ({"targets": ["q", "up"]}, ["up"]),
        ({"targets": ["up", "experts.up"]}, []),
        ({"targets": re.compile(r".*\b(gate|up)"), "exclude": "gate"}, ["up"]),
        ({"targets": ["gate", "up"], "exclude": "experts.up"}, []),
        ({"targets": ["gate", "up"], "exclude": "gate_up"}, ["up"]),
        ({"targets": ["gate", "up"], "exclude": "experts"}, []),
        ({"targets": ["gate", "up", "experts.*"]}, []),
        ({"targets": ["q", "experts.up"]}, []),
        ({"targets": ["q", "gate"]}, []),
    ],
)
def test_all_stacks_of_a_module_are_named_if_the_layers_of_all_their_parts_are_targeted(
    caplog, settings, left_out
):
    """If only some were named, the others would stay frozen without another warning."""
    model = with_shared_and_gates()
    lora.add_lora(model, **{"r": 1, **settings})
    warnings = [record.getMessage() for record in caplog.records]
    quoted = ", ".join(f"'experts.{name}'" for name in left_out)
    assert len(warnings) == bool(left_out)
    assert all(f"add {quoted} to targets" in line for line in warnings)
    caplog.clear()
    lora.remove_lora(model)
    model.requires_grad_(True)
    named = [f"experts.{name}" for name in left_out]
    targets = (
        settings["targets"] if isinstance(settings["targets"], list) else [settings["targets"]]
    )
    names = lora.add_lora(model, **{"r": 1, **settings, "targets": [*targets, *named]})
    assert all(f"layers.2.{name}_lora" in names for name in named)
    assert not caplog.records


def test_a_targeted_layer_without_siblings_means_only_the_stack_of_its_name(caplog):
    model = with_shared_and_gates()
    for layer in model["layers"]:
        del layer["shared"]["gate"]
    lora.add_lora(model, "up", r=1)
    assert "add 'experts.up' to targets" in caplog.text


def test_no_warning_about_stacks_that_were_adapted_before(caplog):
    model = with_shared()
    lora.add_lora(model, "experts.up", r=2, layers=[0, 1])
    lora.add_lora(model, "q", r=2)
    lora.add_lora(model, "shared.up", r=2, layers=[2])
    assert not caplog.records
    assert len(lora.add_lora(model, "up", r=2, layers=[0, 1])) == 2
    assert not caplog.records


def test_a_stack_of_the_model_itself_is_suggested_by_its_plain_name(caplog):
    model = Experts(4)
    model.layers = nn.ModuleList([nn.ModuleDict({"q": nn.Linear(8, 8)})])
    lora.add_lora(model, "all-linear", r=2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("the targets leave out the stacks of matrices up, which hold more")
    assert "add 'up' to targets" in warning
    lora.remove_lora(model)
    assert lora.add_lora(model, ["all-linear", "up"], r=2) == ("layers.0.q", "up_lora")


def test_no_warning_about_stacks_smaller_than_what_is_adapted(caplog):
    model = with_shared(more=nn.ModuleDict({"up": nn.Linear(64, 64)}))
    lora.add_lora(model, "up", r=2)
    assert not caplog.records


def test_suggested_targets_match_the_stacks_and_no_linear_layer(
    caplog,
):
    model = nn.ModuleDict({"a": with_experts(4), "b": nn.ModuleDict({"experts": nn.ModuleDict()})})
    model["b"]["experts"]["up"] = nn.Linear(8, 8)
    lora.add_lora(model, ["q", "experts.up"], r=2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "add '0.experts.up', '1.experts.up', '2.experts.up' to targets" in warning


def test_the_names_of_many_stacks_are_compared_with_the_modules_once():
    """Comparing each name with each module took seconds for a model of a hundred layers."""

    class Counted(list):
        rounds = 0

        def __iter__(self):
            self.rounds += 1
            return super().__iter__()

    stacks = [f"layers.{layer}.experts.up" for layer in range(9)]
    others = Counted(["layers", "layers.0.experts", "b.experts.up", "b.4.experts.up"])
    targets = shortest_targets(["4.experts.up", *stacks], others, least=2)
    assert others.rounds == 1
    assert targets["4.experts.up"] == r"re.compile(r'4\.experts\.up')"
    assert targets["layers.4.experts.up"] == "'layers.4.experts.up'"
    assert targets["layers.3.experts.up"] == "'3.experts.up'"
    assert shortest_targets(stacks, others[:2], least=2) == dict.fromkeys(stacks, "'experts.up'")


def test_no_warning_about_stacks_with_as_many_weights_as_all_that_is_adapted(caplog):
    block = nn.ModuleDict({"q": nn.Linear(8, 16), "experts": Experts(2)})
    lora.add_lora(nn.ModuleDict({"layers": nn.ModuleList([block])}), "all-linear", r=2)
    assert not caplog.records


def test_no_warning_about_convolutions_and_stacks_of_one_matrix(caplog):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q": nn.Linear(8, 8)})])})
    model["conv"], model["experts"] = nn.Conv1d(8, 64, 9), Experts(1)
    lora.add_lora(model, "all-linear", r=2)
    assert not caplog.records


def test_no_warning_about_the_original_tensors_of_weight_norm(caplog):
    conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 64, 9))
    assert conv.parametrizations.weight.original1.shape == (64, 8, 9)
    layers = nn.ModuleDict({"0": nn.ModuleDict({"q": nn.Linear(8, 8), "conv": conv})})
    both = nn.ModuleList([copy.deepcopy(layers), with_experts(4)])
    lora.add_lora(layers, "all-linear", r=2)
    assert not caplog.records
    lora.add_lora(both, "all-linear", r=2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "of matrices 1.layers.0.experts.up, 1.layers.1.experts.up … and 1 more, which" in warning
    assert "add 'experts.up' to targets" in warning


def test_a_target_that_matches_only_parameters_is_an_error():
    expected = (
        r"^'up' matches no module of the model, only parameters such as layers\.0\.experts\.up"
    )
    with pytest.raises(ValueError, match=expected + "; it has "):
        lora.add_lora(with_experts(1), ["q", "up"], r=2)  # one matrix is not a stack
    with pytest.raises(ValueError, match=r"^'up' matches no module .*, only parameters"):
        lora.add_lora(with_experts(2), "q", r=2, modules_to_train="up")


def test_no_warning_about_a_head_outside_of_numbered_layers(caplog):
    lora.add_lora(AnyModel(), "all-linear", r=2)
    assert not caplog.records


def test_an_attention_that_is_itself_a_numbered_layer_is_adapted_with_its_out_proj():
    attentions = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(2))
    model = nn.ModuleDict({"attentions": attentions, "head": nn.Linear(8, 3)})
    adapted = lora.add_lora(model, "all-linear", r=2, layers=[1])
    assert adapted == ("attentions.1", "attentions.1.out_proj")


class OwnLinear(nn.Module):
    """Computes as `nn.Linear` does and is none, like the linear layers of torch_geometric."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class PackedLinear(nn.Module):
    """Has its weight in a buffer, as quantized layers do."""

    def __init__(self, has_bias: bool = True) -> None:
        super().__init__()
        self.register_buffer("packed", torch.ones(4, 2, dtype=torch.uint8))
        self.bias = nn.Parameter(torch.ones(4)) if has_bias else None


class AroundLinear(nn.Module):
    """Has a linear layer and a buffer, as Gemma 4's that clip their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("most", torch.ones(()))


def with_own_linear() -> nn.Module:
    block = {"a": nn.Linear(4, 4), "own": OwnLinear(), "packed": PackedLinear()}
    layers = nn.ModuleList(nn.ModuleDict(block | {"b": AroundLinear()}) for _ in range(1))
    return nn.ModuleDict({"layers": layers, "own": OwnLinear()})


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, ["own", "packed"]),
        ({"exclude": "packed"}, ["own"]),
        ({"modules_to_train": "layers.0.own"}, ["packed"]),
        ({"exclude": ["own", "packed"]}, []),
        ({"targets": ["a", "inner"]}, []),
    ],
)
def test_linear_layers_of_other_classes_are_not_left_out_in_silence(caplog, settings, left):
    model = with_own_linear()
    adapted = lora.add_lora(model, **{"targets": "all-linear", "r": 2, **settings})
    assert adapted == ("layers.0.a", "layers.0.b.inner")
    kinds = {"own": OwnLinear, "packed": PackedLinear}
    of_kinds = ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in map(kinds.get, left))
    way_out = "in modules_to_train to train them, or in exclude" if "own" in left else "in exclude"
    said = (
        f"'all-linear' leaves out {', '.join(f'layers.0.{name}' for name in left)}, of classes "
        f"without a LoRA layer ({of_kinds}): name them {way_out} to keep them frozen"
    )
    assert [record.getMessage() for record in caplog.records] == [said] * bool(left)


def test_of_linear_layers_of_other_classes_only_those_in_the_given_layers_are_named(caplog):
    blocks = [{"a": nn.Linear(4, 4), "own": OwnLinear()} for _ in range(3)]
    model = nn.ModuleDict({"layers": nn.ModuleList(map(nn.ModuleDict, blocks))})
    lora.add_lora(model, "all-linear", r=2, layers=[1])
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("'all-linear' leaves out layers.1.own, of classes")


class StackedLinear(nn.Module):
    """Has a matrix for each position, as Moshi's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, 4))


def test_a_stack_of_matrices_is_not_said_to_be_without_a_lora_layer(caplog):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), StackedLinear()))
    lora.add_lora(model, "all-linear", r=2)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("the targets leave out the stacks of matrices 0.1.weight, ")


def test_linear_layers_of_other_classes_in_a_model_without_layers(caplog):
    model = nn.ModuleDict({"own": OwnLinear(), "up": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    model["other_name"] = model["own"]
    lora.add_lora(model, "all-linear", r=2, exclude=["head"])
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("'all-linear' leaves out own, of classes without a LoRA layer (")
    caplog.clear()
    lora.remove_lora(model)
    lora.add_lora(model, "all-linear", r=2, exclude=["head", "other_name"])
    assert not caplog.records


def test_modules_without_weights_of_their_own_are_not_said_to_be_left_out(caplog):
    """Nor those around a linear layer, even if that is excluded, or outside of numbered layers."""
    kinds = {name: type(name, (nn.Module,), {}) for name in ("EmptyLinear", "BlockLinear")}
    block = kinds["BlockLinear"]()
    block.packed, block.own = PackedLinear(has_bias=False), OwnLinear()
    parts = {"a": nn.Linear(4, 4), "b": AroundLinear(), "c": kinds["EmptyLinear"](), "d": block}
    layers = nn.ModuleList([nn.ModuleDict(parts)])
    model = nn.ModuleDict({"layers": layers, "own": OwnLinear(), "head": nn.Linear(4, 4)})
    assert lora.add_lora(model, "all-linear", r=2, exclude="inner") == ("layers.0.a",)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("'all-linear' leaves out layers.0.d.packed, layers.0.d.own, of")


@pytest.mark.filterwarnings("ignore:.*torch.jit.(script|trace):DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 4))])
def test_scripted_linear_layers_are_not_left_out_in_silence(caplog, make):
    scripted = make(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), scripted)])})
    assert lora.add_lora(model, "all-linear", r=2) == ("layers.0.0",)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("'all-linear' leaves out layers.0.1.0, of classes without a LoRA layer")
    assert said.endswith("): name them in exclude to keep them frozen")
    caplog.clear()
    lora.remove_lora(model)
    lora.add_lora(model, "all-linear", r=2, exclude="1.*")
    assert not caplog.records
