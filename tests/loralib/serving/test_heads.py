"""Heads of a bank's adapters compute what they compute in the adapter's own model."""

import copy
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loralib as lora
from loralib.adapters.saving import adapter_of
from loralib.errors import NeedsMergingError

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


# ---- heads that are not called as a whole ----


class OfSeveral(OfTensor):
    """Its head is a list of heads, which it calls one by one."""

    def __init__(self):
        super().__init__()
        self.head = nn.ModuleList([nn.Linear(WIDTH, 3), nn.ModuleDict({"b": nn.Linear(WIDTH, 2)})])
        self.head.append(nn.Tanh())

    def forward(self, x):
        first, others, last = self.head
        x = self.up(x)
        return torch.cat([first(x), last(others["b"](x))], -1)


class WithoutForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def scores(self, x):
        return self.linear(x)


class CallsAMethod(OfTensor):
    def __init__(self):
        super().__init__()
        self.head = WithoutForward()

    def forward(self, x):
        return self.head.scores(self.up(x))


@pytest.mark.parametrize("kind", [OfSeveral, CallsAMethod])
def test_heads_in_a_module_without_a_forward_are_computed_one_by_one(kind):
    plain, x = kind().eval(), torch.randn(3, WIDTH)
    own = {name: trained(plain) for name in "ab"}
    bank = lora.AdapterBank(plain)
    for name, model in own.items():
        bank.add(name, adapter_of(model))
    with torch.no_grad():
        expected = {name: model(x) for name, model in own.items()}
        for name in "ab":
            with bank.use(name):
                torch.testing.assert_close(plain(x), expected[name], rtol=1e-4, atol=1e-5)
        with bank.use(["a", "b", "b"]):
            mixed = torch.cat([expected["a"][:1], expected["b"][1:]])
            torch.testing.assert_close(plain(x), mixed, rtol=1e-4, atol=1e-5)


class CallsParts(OfTensor):
    """Calls the layers of its head, and not the head."""

    def forward(self, x, whole=False):
        x = self.up(x)
        return self.head(x) if whole else self.head[1](self.head[0](x))


def test_a_head_whose_parts_are_called_without_it_is_refused():
    plain, x = CallsParts().eval(), torch.randn(3, WIDTH)
    own, without = trained(plain), copy.deepcopy(plain)
    lora.add_lora(without, "up", r=2)
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter_of(own))
    bank.add("b", adapter_of(own))  # its head is a copy of one with hooks
    bank.add("headless", adapter_of(without))
    message = r"^the model calls head\.1 by itself, and not head as a whole, which an adapter repl"
    with torch.no_grad():
        expected = plain(x)
        for names in ("a", ["headless", "headless", "b"]):
            with bank.use(names), pytest.raises(ValueError, match=message):
                plain(x)
        for name in "ab":
            with bank.use(name):
                torch.testing.assert_close(plain(x, whole=True), own(x), rtol=1e-4, atol=1e-5)
        with bank.use("headless"):
            assert torch.equal(plain(x), expected)
        assert torch.equal(plain(x), expected)


class ReadsItsHead(OfTensor):
    """Compares with the rows of its head's weight."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.linear(F.normalize(self.up(x)), F.normalize(self.head.weight))


class ReadsABias(ReadsItsHead):
    def forward(self, x):
        return self.head(self.up(x)) - self.head.bias


class ReadsAParameter(OfTensor):
    def __init__(self):
        super().__init__()
        self.head = nn.ParameterList([torch.randn(WIDTH)])

    def forward(self, x):
        return self.up(x) * self.head[0]


class ReadsItself(WithoutForward):
    def forward(self, input):
        return F.linear(input, self.linear.weight)


class ReadsInItsHead(OfTensor):
    """The head reads a weight of its own, as its copies do."""

    def __init__(self):
        super().__init__()
        self.head = ReadsItself()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReadsItsHead, "trains head, whose parameters the source of ReadsItsHead reads directly"),
        (ReadsABias, "trains head, whose parameters the source of ReadsABias reads directly"),
        (ReadsAParameter, "trains head, which is never called"),
        (ReadsInItsHead, None),
    ],
)
def test_a_head_whose_parameters_the_model_reads_is_refused(kind, message):
    plain, x = kind().eval(), torch.randn(3, WIDTH)
    own = trained(plain)
    bank = lora.AdapterBank(plain)
    if message is not None:
        with pytest.raises(NeedsMergingError, match=f"{message}; merge it into its base$"):
            bank.add("a", adapter_of(own))
        assert not plain.head._forward_hooks
        return
    bank.add("a", adapter_of(own))
    with torch.no_grad(), bank.use("a"):
        torch.testing.assert_close(plain(x), own(x), rtol=1e-4, atol=1e-5)
