"""What "all-linear" takes for the head, and what it leaves out, such as stacked experts."""

import copy

import pytest
import torch
from any_models import AnyModel
from torch import nn

import loralib as lora


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
    assert all("'all-linear' takes last, the last linear layer, for the head" in s for s in said)
    assert all(s.endswith("or to exclude, if it is to stay frozen") for s in said)


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
    assert said.endswith("which stays frozen: add it to exclude, if it is to stay frozen")
    caplog.clear()
    lora.add_lora(plain, "all-linear", r=2, exclude="last")
    assert not caplog.records


class Experts(nn.Module):
    """The weights of all experts of a layer, as upstream's Transformers holds them."""

    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 8, 8))


def with_experts(count):
    blocks = [{"q": nn.Linear(8, 8), "experts": Experts(count)} for _ in range(3)]
    return nn.ModuleDict({"layers": nn.ModuleList(map(nn.ModuleDict, blocks))})


@pytest.mark.parametrize(
    ("count", "settings", "warns"),
    [
        (4, {}, True),
        (4, {"modules_to_train": "experts"}, False),
        (4, {"targets": "q"}, False),
        (1, {}, False),
    ],
)
def test_most_of_the_weights_that_all_linear_leaves_out_are_named(caplog, count, settings, warns):
    model = with_experts(count)
    assert len(lora.add_lora(model, **{"targets": "all-linear", "r": 2, **settings})) == 3
    said = [record.getMessage() for record in caplog.records]
    assert said == warns * [
        "'all-linear' leaves out layers.0.experts.up, layers.1.experts.up … and 1 more, which hold "
        "more than all that it adapts, but as stacks of matrices: to adapt these as well, add "
        "'experts.up' to targets"
    ]


def test_kernels_of_convolutions_and_small_tables_are_no_stacks(caplog):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q": nn.Linear(8, 8)})])})
    model["conv"], model["experts"] = nn.Conv1d(8, 64, 9), Experts(1)
    lora.add_lora(model, "all-linear", r=2)
    assert not caplog.records


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
