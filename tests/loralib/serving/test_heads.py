"""Heads of a bank's adapters compute what they compute in the adapter's own model."""

import copy
from collections import UserDict

import pytest
import torch
from torch import nn

import loralib as lora
from loralib.adapters.saving import adapter_of

WIDTH = 4


class WritesIntoItsInput(nn.Module):
    """Replaces its input in the mapping that holds it, as heads of sentence-transformers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        features["x"] = self.linear(features["x"])
        return features


class OfMapping(nn.Module):
    kind = dict

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, WIDTH), WritesIntoItsInput()

    def forward(self, x):
        features = self.kind(x=self.up(x))
        self.head(features)
        return features["x"]


class OfUserDict(OfMapping):
    kind = UserDict


class OfTensor(nn.Module):
    """Its head changes what it is given in place, and calls itself by a name."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.ELU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.head(input=self.up(x))


class OfList(OfTensor):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(Joined(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.head([self.up(x), (x.clone(), None)])


class Joined(nn.Module):
    def forward(self, parts):
        first, (second, _) = parts
        parts.clear()
        return first.tanh_() + second.sigmoid_()


class Hooked(OfTensor):
    """Its head has a hook of its own, which doubles the input."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.head.register_forward_pre_hook(lambda _, args: (2 * args[0],))

    def forward(self, x):
        return self.head(self.up(x))


def trained(plain):
    model = copy.deepcopy(plain)
    lora.add_lora(model, "up", r=2, modules_to_train="head")
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return model.eval()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [OfMapping, OfUserDict, OfTensor, OfList, Hooked])
def test_a_head_is_given_what_the_model_s_head_is_given(kind, mode):
    """Also if that changes its input in place."""
    plain, x = kind().eval(), torch.randn(3, WIDTH)
    own, hooks = {name: trained(plain) for name in "ab"}, len(plain.head._forward_pre_hooks)
    bank = lora.AdapterBank(plain)
    with mode():
        expected = {name: model(x) for name, model in own.items()}
        of_plain = plain(x)
        for name, model in own.items():
            bank.add(name, adapter_of(model))
        for name in "ab":
            with bank.use(name):
                torch.testing.assert_close(plain(x), expected[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(plain(x), of_plain)
        with bank.use(["a", "b", "b"]):
            if kind in (OfTensor, Hooked):
                mixed = torch.cat([expected["a"][:1], expected["b"][1:]])
                torch.testing.assert_close(plain(x), mixed, rtol=1e-4, atol=1e-5)
            else:
                given = "list" if kind is OfList else kind.kind.__name__
                message = rf"^head is given or returns a {given}, whose rows .* one adapter at"
                with pytest.raises(ValueError, match=message):
                    plain(x)
        bank.close()
        assert torch.equal(plain(x), of_plain)
    assert len(plain.head._forward_pre_hooks) == hooks


def test_a_head_of_the_model_is_computed_on_a_copy_for_rows_without_another():
    plain, x = OfTensor().eval(), torch.randn(3, WIDTH)
    own = trained(plain)
    without = copy.deepcopy(plain)
    lora.add_lora(without, "up", r=2)
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter_of(own))
    bank.add("headless", adapter_of(without))
    with torch.no_grad():
        expected = torch.cat([own(x[:1]), plain(x[1:])])
        with bank.use(["a", "headless", "headless"]):
            torch.testing.assert_close(plain(x), expected, rtol=1e-4, atol=1e-5)
