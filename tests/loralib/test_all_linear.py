"""What "all-linear" takes for the head, and what it leaves out, such as stacked experts."""

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
def test_a_layer_that_is_taken_for_the_head_is_named(caplog, settings, warns):
    names = ("first", "second", "last")
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    first = {"exclude": "first"} if settings.get("modules_to_train") == "first" else {}
    lora.add_lora(model, **{"targets": "all-linear", "r": 2, **settings, **first})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warns
    assert all("'all-linear' treats last, the last linear layer, as the head" in s for s in said)
    assert all(s.endswith("or to exclude if it should stay frozen") for s in said)


@pytest.mark.parametrize("head", ["adapted before", "built with LoRA", "frozen with its LoRA"])
def test_a_head_that_has_lora_is_not_taken_for_a_frozen_one(caplog, head):
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)})
    if head == "built with LoRA":
        model["last"] = lora.Linear(4, 4, r=2)
    else:
        lora.add_lora(model, "last", r=2)
        model.requires_grad_(head == "adapted before")
    assert lora.add_lora(model, "all-linear", r=2) == ("first",)
    assert not caplog.records


def test_a_head_with_the_embeddings_weight_can_only_be_excluded(caplog):
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "first": nn.Linear(4, 4)})
    model["last"] = nn.Linear(4, 9, bias=False)
    model["last"].weight = model["words"].weight
    plain = copy.deepcopy(model)
    lora.add_lora(model, "all-linear", r=2)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.endswith("which stays frozen: add it to exclude if it should stay frozen")
    caplog.clear()
    lora.add_lora(plain, "all-linear", r=2, exclude="last")
    assert not caplog.records


class Experts(nn.Module):
    """The weights of all experts of a layer, as upstream's Transformers holds them."""

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
        (4, {"targets": ["all-linear", "experts.up"]}, False),
        (1, {}, False),
    ],
)
def test_most_of_the_weights_that_all_linear_leaves_out_are_named(caplog, count, settings, warns):
    model = with_experts(count)
    assert len(lora.add_lora(model, **{"targets": "all-linear", "r": 2, **settings})) >= 3
    said = [record.getMessage() for record in caplog.records]
    assert said == warns * [
        "the targets leave out the stacks of matrices layers.0.experts.up, layers.1.experts.up … "
        "and 1 more, which hold more than all that is adapted: add 'experts.up' to targets, or to "
        "exclude to keep them frozen"
    ]


def with_shared(**more):
    """As DeepSeek-V3: linear layers that are called as the experts' stacks."""
    model = with_experts(4)
    for layer in model["layers"]:
        layer["shared"] = nn.ModuleDict({"up": nn.Linear(8, 8), **more})
    return model


@pytest.mark.parametrize(
    ("settings", "left"),
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
def test_stacks_that_a_name_matches_and_does_not_mean_are_named(caplog, settings, left):
    """What adapted the experts while they were linear layers; said more exactly, it is meant."""
    model = with_shared()
    names = lora.add_lora(model, **{"r": 2, **settings})
    stacks = [f"layers.{layer}.experts.up" for layer in left]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(left)
    assert all(f"of matrices {', '.join(stacks[:2])}" in line for line in said)
    assert all(f"and {len(left) - 2} more" in line for line in said if len(left) > 2)
    assert all("add 'experts.up' to targets" in line for line in said)
    caplog.clear()
    if left:
        lora.remove_lora(model)
        model.requires_grad_(True)
        again = lora.add_lora(model, "up", r=2, exclude="experts.up")
        assert not [each for each in again if "experts" in each]
        assert not caplog.records
        second = lora.add_lora(model, "experts.up", r=2, layers=left)
        assert sorted(second) == [f"{stack}_lora" for stack in stacks]
        assert not caplog.records
    assert names


def with_shared_and_gates():
    """As DeepSeek-V3, of which two layers of each expert are one stack, the larger one."""
    model = with_shared(gate=nn.Linear(8, 8))
    for layer in model["layers"]:
        layer["experts"].gate_up = nn.Parameter(torch.randn(4, 16, 8))
    return model


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"targets": ["q", "gate", "up"]}, ["up", "gate_up"]),
        ({"targets": "*up"}, ["up", "gate_up"]),
        ({"targets": "shared.*"}, []),
        ({"targets": re.compile(r".*\b(gate|up)")}, ["up", "gate_up"]),
        ({"targets": ["gate", "up", "experts.up"]}, ["gate_up"]),
        # The layers beside are not named, so that their stacks are not meant.
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
def test_all_stacks_of_a_module_are_named_if_all_layers_beside_one_are_meant(
    caplog, settings, left
):
    """Those named alone, the others stayed frozen and nothing more was said."""
    model = with_shared_and_gates()
    lora.add_lora(model, **{"r": 1, **settings})
    said = [record.getMessage() for record in caplog.records]
    quoted = ", ".join(f"'experts.{name}'" for name in left)
    assert len(said) == bool(left)
    assert all(f"add {quoted} to targets" in line for line in said)
    caplog.clear()
    lora.remove_lora(model)
    model.requires_grad_(True)
    named = [f"experts.{name}" for name in left]
    targets = (
        settings["targets"] if isinstance(settings["targets"], list) else [settings["targets"]]
    )
    names = lora.add_lora(model, **{"r": 1, **settings, "targets": [*targets, *named]})
    assert all(f"layers.2.{name}_lora" in names for name in named)
    assert not caplog.records


def test_a_layer_with_none_beside_it_means_no_other_stack(caplog):
    model = with_shared_and_gates()
    for layer in model["layers"]:
        del layer["shared"]["gate"]
    lora.add_lora(model, "up", r=1)
    assert "add 'experts.up' to targets" in caplog.text


def test_stacks_that_were_adapted_before_are_not_left_out(caplog):
    model = with_shared()
    lora.add_lora(model, "experts.up", r=2, layers=[0, 1])
    lora.add_lora(model, "q", r=2)
    lora.add_lora(model, "shared.up", r=2, layers=[2])
    assert not caplog.records
    assert len(lora.add_lora(model, "up", r=2, layers=[0, 1])) == 2
    assert not caplog.records


def test_a_stack_of_the_model_itself_has_a_name_of_one_part(caplog):
    model = Experts(4)
    model.layers = nn.ModuleList([nn.ModuleDict({"q": nn.Linear(8, 8)})])
    lora.add_lora(model, "all-linear", r=2)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the targets leave out the stacks of matrices up, which hold more")
    assert "add 'up' to targets" in said
    lora.remove_lora(model)
    assert lora.add_lora(model, ["all-linear", "up"], r=2) == ("layers.0.q", "up_lora")


def test_a_few_weights_that_are_left_out_are_not_worth_a_line(caplog):
    model = with_shared(more=nn.ModuleDict({"up": nn.Linear(64, 64)}))
    lora.add_lora(model, "up", r=2)
    assert not caplog.records


def test_stacks_that_share_their_name_s_end_with_linear_layers_are_named_so_that_they_are_meant(
    caplog,
):
    model = nn.ModuleDict({"a": with_experts(4), "b": nn.ModuleDict({"experts": nn.ModuleDict()})})
    model["b"]["experts"]["up"] = nn.Linear(8, 8)
    lora.add_lora(model, ["q", "experts.up"], r=2)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "add '0.experts.up', '1.experts.up', '2.experts.up' to targets" in said


def test_the_names_of_many_stacks_are_compared_with_the_modules_once():
    """Each name with each module took seconds for a model of a hundred layers."""

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


def test_kernels_of_convolutions_and_small_tables_are_no_stacks(caplog):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q": nn.Linear(8, 8)})])})
    model["conv"], model["experts"] = nn.Conv1d(8, 64, 9), Experts(1)
    lora.add_lora(model, "all-linear", r=2)
    assert not caplog.records


def test_what_a_kernel_is_computed_from_is_no_stack(caplog):
    conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 64, 9))
    assert conv.parametrizations.weight.original1.shape == (64, 8, 9)
    layers = nn.ModuleDict({"0": nn.ModuleDict({"q": nn.Linear(8, 8), "conv": conv})})
    both = nn.ModuleList([copy.deepcopy(layers), with_experts(4)])
    lora.add_lora(layers, "all-linear", r=2)
    assert not caplog.records
    lora.add_lora(both, "all-linear", r=2)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "of matrices 1.layers.0.experts.up, 1.layers.1.experts.up … and 1 more, which" in said
    assert "add 'experts.up' to targets" in said


def test_a_parameter_that_is_named_is_no_module():
    expected = (
        r"^'up' matches no module of the model, only parameters such as layers\.0\.experts\.up"
    )
    with pytest.raises(ValueError, match=expected + "; it has "):
        lora.add_lora(with_experts(1), ["q", "up"], r=2)  # one matrix is no stack
    with pytest.raises(ValueError, match=r"^'up' matches no module .*, only parameters"):
        lora.add_lora(with_experts(2), "q", r=2, modules_to_train="up")


def test_a_head_outside_of_numbered_layers_is_left_out_in_silence(caplog):
    lora.add_lora(AnyModel(), "all-linear", r=2)
    assert not caplog.records


class OwnLinear(nn.Module):
    """Computes as `nn.Linear` does and is none, like the linear layers of torch_geometric."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class PackedLinear(nn.Module):
    """Has its weight in a buffer, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.ones(4, 2, dtype=torch.uint8))


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
    said = (
        f"'all-linear' leaves out {', '.join(f'layers.0.{name}' for name in left)}, of classes "
        f"without a LoRA layer ({of_kinds}): name them in modules_to_train to train them, or in "
        "exclude to keep them frozen"
    )
    assert [record.getMessage() for record in caplog.records] == [said] * bool(left)


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
