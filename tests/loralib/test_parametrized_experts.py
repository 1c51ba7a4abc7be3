"""Tests of LoRA on stacks of matrices in modules that are parametrized before or after add_lora."""

import abc
import copy

import pytest
import torch
from stacked_experts import EXPERTS, WIDTH, Experts, R, adapted, close, randomised, tokens
from torch import nn
from torch.nn.utils import parametrize

import loralib as lora


def test_a_parametrized_stack_is_an_error():
    experts = adapted(layers=1).layers[0]["experts"]
    parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    with pytest.raises(AttributeError, match="no longer has its parameter down_proj"):
        experts(tokens())
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match="down_proj_lora has been parametrized or pruned"):
            undo(experts)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_other_parameters_may_be_parametrized_before_and_after():
    experts = Experts()
    parametrize.register_parametrization(experts, "down_proj", Doubled())
    parametrize.register_parametrization(experts, "gate_up_proj_bias", Doubled())
    lora.add_lora(experts, "gate_up_proj", r=R)
    parametrize.register_parametrization(experts, "down_proj_bias", Doubled())
    out = randomised(experts)(tokens())
    for undo in (lora.merge, lora.remove_lora):
        plain = copy.deepcopy(experts)
        undo(plain)
        assert type(plain).__bases__ == (Experts,)
        assert set(plain.parametrizations) == {"down_proj", "gate_up_proj_bias", "down_proj_bias"}
        assert set(plain._parameters) == {"gate_up_proj"}
        if undo is lora.merge:
            close(plain(tokens()), out)
    close(experts(tokens()), out)


@pytest.mark.parametrize("is_doubled", [True, False])
def test_parametrizations_from_before_add_lora_may_be_removed_after_it(is_doubled):
    """PyTorch removes its own class then, and leaves that of experts with LoRA."""
    experts, names = Experts(), ("down_proj", "down_proj_bias")
    for name in names:
        parametrize.register_parametrization(experts, name, Doubled())
    before = copy.deepcopy(experts)
    lora.add_lora(experts, "gate_up_proj", r=R)
    out = randomised(experts)(tokens())
    for name in names:
        assert isinstance(experts, Experts)
        parametrize.remove_parametrizations(experts, name, leave_parametrized=is_doubled)
    close(experts(tokens()), out if is_doubled else out / 2)
    assert lora.add_lora(experts, "down_proj", r=R) == ("down_proj_lora",)
    out = randomised(experts)(tokens())
    close(lora.merge(experts)(tokens()), out)
    assert type(experts) is Experts
    before(tokens())  # the copy's own class still works


def test_adapting_a_stack_registered_later_keeps_the_parametrizations():
    experts = Experts()
    lora.add_lora(experts, "gate_up_proj", r=R)
    out = randomised(experts)(tokens())
    parametrize.register_parametrization(experts, "down_proj", Doubled())
    parametrize.register_parametrization(experts, "down_proj_bias", Doubled())
    experts.another = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
    assert lora.add_lora(experts, "another", r=R) == ("another_lora",)
    close(experts(tokens()), 2 * out)
    close(lora.merge(experts)(tokens()), 2 * out)


def test_a_class_with_a_metaclass_is_parametrized_like_others():
    kind = abc.ABCMeta("Abstract", (Experts,), {})
    experts = kind()
    parametrize.register_parametrization(experts, "down_proj", Doubled())
    lora.add_lora(experts, "gate_up_proj", r=R)
    out = randomised(experts)(tokens())
    close(lora.merge(experts)(tokens()), out)
    assert type(experts).__bases__ == (kind,)
    parametrize.remove_parametrizations(experts, "down_proj")
    assert type(experts) is kind


def test_a_submodule_called_parametrizations_is_not_taken_for_pytorch_s():
    """Nor is a class with properties that read such a submodule, as PyTorch's has them."""

    class Lookalike(Experts):
        own = property(lambda self: self.parametrizations["own"])

        def forward(self, x):
            return self.own(super().forward(x))

    experts = Lookalike()
    experts.parametrizations = nn.ModuleDict({"own": nn.Linear(WIDTH, WIDTH)})
    before = experts(tokens())
    lora.add_lora(experts, "gate_up_proj", r=R)
    out = randomised(experts)(tokens())
    assert (out - before).abs().max() > 0.01
    close(lora.merge(experts)(tokens()), out)
    assert type(experts) is Lookalike
