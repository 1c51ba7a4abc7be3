"""Heads of a bank's adapters compute what they compute in the adapter's own model."""

import asyncio
import copy
import re
import time
from collections import UserDict
from contextlib import nullcontext
from dataclasses import replace
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from small_nets import Net, bank_of, close, drawn
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import loralib as lora
from loralib.adapters.saving import adapter_of
from loralib.errors import NeedsMergingError
from loralib.nn.routing import in_effect

WIDTH = 4


class WritesIntoItsInput(nn.Module):
    """Replaces its input in the mapping that holds it, as heads of sentence-transformers do.

    It also changes that input.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        features["x"] = self.linear(features["x"].tanh_())
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


class OfTuple(OfTensor):
    """Its head is given a tensor, but returns a tuple."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), Split())

    def forward(self, x):
        return torch.cat(self.head(self.up(x)), -1)


class Split(nn.Module):
    def forward(self, x):
        return x.split(2, -1)


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


def trained(plain, head="head"):
    model = copy.deepcopy(plain)
    lora.add_lora(model, "up", r=2, modules_to_train=head)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return model.eval()


class OfLinear(OfTensor):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)


class HookedLinear(OfTensor):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.head.register_forward_pre_hook(lambda _, args: (2 * args[0],))

    def forward(self, x):
        return self.head(self.up(x))


class TanhLinear(nn.Linear):
    """Changes its input in place, which a plain linear layer does not."""

    def forward(self, input):
        return super().forward(input.tanh_())


class OfTanhLinear(OfTensor):
    def __init__(self):
        super().__init__()
        self.head = TanhLinear(WIDTH, 3)


class OfChangedLinear(OfTensor):
    """The forward of its head, and of copies of that, has been replaced on the instance."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.head.forward = MethodType(tanh_first, self.head)


def with_adapter(plain, own, x, changed=dict):
    """Returns a bank with the adapter "a" of `own`, checked to compute what `own` computes."""
    bank, adapter = lora.AdapterBank(plain), adapter_of(own)
    with torch.no_grad():
        before = plain(x)
        bank.add("a", replace(adapter, tensors=changed(adapter.tensors)))
        with bank.use("a"):
            torch.testing.assert_close(plain(x), own(x), rtol=1e-4, atol=1e-5)
        assert torch.equal(plain(x), before)
    return bank


class OfScores(OfTensor):
    """Its head gives one value for each row, without a dimension of outputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0))

    def forward(self, x):
        return self.head(self.up(x))


def tanh_first(layer, input):
    return F.linear(input.tanh_(), layer.weight, layer.bias)


TAKE_TENSORS = (
    *(OfTensor, OfScores, Hooked, OfLinear),
    *(HookedLinear, OfTanhLinear, OfChangedLinear),
)
OTHERS = {OfMapping: "dict", OfUserDict: "UserDict", OfList: "list", OfTuple: "tuple"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [*OTHERS, *TAKE_TENSORS])
def test_a_head_is_given_what_the_model_s_head_is_given(kind, mode):
    """Also if that changes its input in place."""
    plain, x = kind().eval(), torch.randn(3, WIDTH)
    own, hooks = {name: trained(plain) for name in "ab"}, len(plain.head._forward_pre_hooks)
    own |= {name: trained(plain, ()) for name in ("headless", "headless_2")}
    bank = lora.AdapterBank(plain)
    with mode():
        expected = {name: model(x) for name, model in own.items()}
        of_plain = plain(x)
        for name, model in own.items():
            bank.add(name, adapter_of(model))
        for name in own:
            with bank.use(name):
                torch.testing.assert_close(plain(x), expected[name], rtol=1e-4, atol=1e-5)
        with bank.use(["headless", "headless_2", "headless_2"]):
            mixed = torch.cat([expected["headless"][:1], expected["headless_2"][1:]])
            torch.testing.assert_close(plain(x), mixed, rtol=1e-4, atol=1e-5)
        assert torch.equal(plain(x), of_plain)
        with bank.use(["a", "b", "b"]):
            if kind in TAKE_TENSORS:
                mixed = torch.cat([expected["a"][:1], expected["b"][1:]])
                torch.testing.assert_close(plain(x), mixed, rtol=1e-4, atol=1e-5)
            else:
                other = OTHERS[kind]
                message = rf"^head is given or returns a {other}, whose rows .* one adapter at"
                with pytest.raises(ValueError, match=message):
                    plain(x)
        bank.close()
        assert torch.equal(plain(x), of_plain)
    assert len(plain.head._forward_pre_hooks) == hooks


def test_a_linear_head_is_given_its_input_itself():
    """A copy could be large, and such a head does not change it."""
    plain, inputs = OfLinear().eval(), []
    plain.up.register_forward_hook(lambda *given: inputs.append(given[-1]))
    plain.head.register_forward_hook(
        lambda _, args, kwargs, out: inputs.append(kwargs["input"]), with_kwargs=True
    )
    bank, x = lora.AdapterBank(plain), torch.randn(3, WIDTH)
    bank.add("a", adapter_of(trained(plain)))
    with torch.no_grad(), bank.use("a"):
        plain(x)
    assert len(inputs) == 3  # the head is computed, and the adapter's
    assert all(each is inputs[0] for each in inputs)


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
        first = nn.Sequential(nn.Linear(WIDTH, 3))
        self.head = nn.ModuleList([first, nn.ModuleDict({"b": nn.Linear(WIDTH, 2)}), nn.Tanh()])

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

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.ELU(), nn.Sequential(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x, whole=False):
        x = self.up(x)
        return self.head(x) if whole else self.head[1][0](self.head[0](x))


def test_a_head_whose_parts_are_called_without_it_is_refused():
    plain, x = CallsParts().eval(), torch.randn(3, WIDTH)
    own, without = trained(plain), copy.deepcopy(plain)
    lora.add_lora(without, "up", r=2)
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter_of(own))
    bank.add("b", adapter_of(own))  # its head is a copy of one with hooks
    bank.add("headless", adapter_of(without))
    message = r"^the model calls head\.1\.0 by itself, and not head as a whole, which an adapter re"
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


@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 8), 1, nn.LayerNorm(WIDTH), False
        ),
        nn.TransformerEncoderLayer(WIDTH, 2, 8),
        nn.MultiheadAttention(WIDTH, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_modules_with_a_fast_path_get_no_hooks_inside(layer):
    """With hooks there, PyTorch would not take that path, also without an adapter in use."""
    plain = OfTensor().eval()
    plain.head = nn.Sequential(nn.Sequential(layer), nn.Linear(WIDTH, WIDTH)).eval()
    lora.AdapterBank(plain).add("a", adapter_of(trained(plain)))
    hooked = [name for name, module in plain.head.named_modules() if module._forward_hooks]
    assert hooked == ["", "1"]


class OfTwoHeads(OfTensor):
    """The name of one of its heads begins with the name of the other."""

    def __init__(self):
        super().__init__()
        self.head_2 = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = self.up(x)
        return self.head_2(x) + self.head(input=x)


def test_a_head_whose_name_begins_with_another_one_s():
    plain, x = OfTwoHeads().eval(), torch.randn(3, WIDTH)
    with_adapter(plain, trained(plain, ["head", "head_2"]), x)


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


class ReadsAnother(OfTensor):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(F.linear(self.up(x), self.other.weight))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReadsItsHead, "trains head, whose parameters the source of ReadsItsHead reads directly"),
        (ReadsABias, "trains head, whose parameters the source of ReadsABias reads directly"),
        (ReadsAParameter, "trains head, which is never called"),
        (ReadsInItsHead, None),
        (ReadsAnother, None),
    ],
)
def test_a_head_whose_parameters_the_model_reads_is_refused(kind, message):
    plain, x = kind().eval(), torch.randn(3, WIDTH)
    own = trained(plain)
    if message is None:
        with_adapter(plain, own, x)
        return
    with pytest.raises(NeedsMergingError, match=f"{message}; merge it into its base$"):
        lora.AdapterBank(plain).add("a", adapter_of(own))
    assert not plain.head._forward_hooks


def test_a_trained_parameter_of_the_model_itself_is_refused():
    plain = OfTensor().eval()
    plain.scale = nn.Parameter(torch.ones(()))
    own = trained(plain)
    own.scale.requires_grad_()
    with pytest.raises(NeedsMergingError, match="trains scale, a parameter of the model itself; "):
        lora.AdapterBank(plain).add("a", adapter_of(own))


class ReadsItsHeadsDtype(OfTensor):
    """Its head has a parametrized weight, which is computed whenever it is read."""

    def __init__(self, parametrized=weight_norm):
        super().__init__()
        self.head = parametrized(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.head(self.up(x).to(self.head.weight.dtype))


class ReadsAParametrizedHead(ReadsItsHeadsDtype):
    def forward(self, x):
        return F.linear(self.up(x), self.head.weight)


@pytest.mark.parametrize("parametrized", [weight_norm, spectral_norm])
def test_parametrized_heads(parametrized):
    """Such a weight may be read for its dtype, as other weights may."""
    plain, x = ReadsItsHeadsDtype(parametrized).eval(), torch.randn(3, WIDTH)
    own = trained(plain).train()
    own(x)  # a spectral norm changes its buffers
    bank = with_adapter(plain, own.eval(), x)
    with torch.no_grad(), bank.use("a"):
        assert plain.head.weight.shape == (WIDTH, WIDTH)


def test_parametrized_heads_whose_weight_is_read():
    read = ReadsAParametrizedHead().eval()
    with pytest.raises(NeedsMergingError, match=r"trains head, whose parameters the source of Re"):
        lora.AdapterBank(read).add("a", adapter_of(trained(read)))


class SharesALayer(OfTensor):
    """One of its head's two layers is also called elsewhere."""

    def __init__(self, shared):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.again = nn.Sequential(self.head[shared], nn.Tanh())

    def forward(self, x):
        return self.again(self.head(self.up(x)))


class SharesItsHead(OfTensor):
    def __init__(self):
        super().__init__()
        self.again = nn.Sequential(self.head, nn.Tanh())

    def forward(self, x):
        return self.again(self.head(self.up(x)))


def test_a_head_may_have_several_places_but_not_a_trained_part_of_it():
    shared, plain, x = SharesALayer(1).eval(), SharesItsHead().eval(), torch.randn(3, WIDTH)
    message = r"trains head\.1, which the model also has outside of head; merge it into its base$"
    with pytest.raises(NeedsMergingError, match=message):
        lora.AdapterBank(shared).add("a", adapter_of(trained(shared)))
    with_adapter(plain, trained(plain), x)
    plain = SharesALayer(0).eval()  # which this adapter does not train
    with_adapter(plain, trained(plain, "head.1"), x)


class OfTiedWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.up = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.up(self.words(ids)))


def test_a_trained_weight_that_modules_share_is_not_written_to_the_base():
    plain, ids = OfTiedWords().eval(), torch.tensor([[1, 2], [8, 0]])
    bank = with_adapter(plain, trained(plain, ["words", "head"]), ids)
    assert bank._adapters["a"].heads.keys() == {"words", "head"}
    assert plain.head.weight is plain.words.weight


class TwoNames(nn.Module):
    """A head whose bias has two names, as a language model's in Transformers."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(WIDTH, 3)
        self.bias = self.decoder.bias

    def forward(self, x):
        return self.decoder(x)


@pytest.mark.parametrize("left_out", ["head.bias", "head.decoder.bias", "neither"])
def test_a_bias_with_two_names_in_a_head_may_be_held_once(left_out):
    plain = OfScores().eval()
    plain.head = TwoNames()
    bank = with_adapter(
        plain,
        trained(plain),
        torch.randn(2, WIDTH),
        lambda tensors: {n: t for n, t in tensors.items() if n != left_out},
    )
    head = bank._adapters["a"].heads["head"]
    assert head.decoder.bias is head.bias


def test_a_trained_weight_may_be_for_one_of_the_modules_that_share_it():
    plain, ids = OfTiedWords().eval(), torch.tensor([[1, 2], [8, 0]])
    adapter = adapter_of(own := trained(plain, ["words", "head"]))
    own.head.weight = plain.head.weight
    del adapter.tensors["head.weight"]
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter)
    with torch.no_grad(), bank.use("a"):
        torch.testing.assert_close(plain(ids), own(ids), rtol=1e-4, atol=1e-5)


# ---- calls of heads ----


class OfTwoTensors(OfTensor):
    def __init__(self):
        super().__init__()
        self.head = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, x):
        return self.head(self.up(x), x)


class OfColumns(OfTwoTensors):
    """Its head gives a column for each row, or one value for all."""

    function = staticmethod(torch.t)

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, 3), Calls(self.function))

    def forward(self, x):
        return self.head(self.up(x))


class OfMean(OfColumns):
    function = staticmethod(torch.mean)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("kind", [OfMapping, OfTwoTensors, OfColumns, OfMean])
def test_rows_of_one_adapter_may_be_given_to_any_head(kind):
    plain, x = kind().eval(), torch.randn(3, WIDTH)
    own = trained(plain)
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter_of(own))
    bank.add("b", adapter_of(own))
    bank.add("h", adapter_of(trained(plain, ())))  # has no head
    with torch.no_grad():
        with bank.use(["a"] * 3):
            torch.testing.assert_close(plain(x), own(x), rtol=1e-4, atol=1e-5)
        with bank.use(["a"] * 2), pytest.raises(ValueError, match="given for 2 rows, but a layer"):
            plain(x)
        for names in ("abb", "aba", "aaah"):
            one_at_a_time = pytest.raises(ValueError, match=r"^head .* one adapter at a time$")
            with bank.use(list(names)), one_at_a_time:
                plain(torch.randn(len(names), WIDTH))


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda x: x.squeeze(-1), [(), (3,)]),  # a score, or logits
        (lambda x: x if len(x.T) == 1 else x[:, None], [(1,), (1, 3)]),
        (lambda x: x[:, None].expand(-1, len(x.T), -1), [(1, 1), (3, 3)]),
        (lambda x: x > 0, [(1,), (3,)]),  # there is no -inf of this dtype
    ],
)
def test_outputs_that_padding_does_not_fit_together_are_refused(function, rows):
    plain, x = OfColumns().eval(), torch.randn(2, WIDTH)
    plain.head[1].function = function
    bank, other = lora.AdapterBank(plain), copy.deepcopy(plain)
    other.head[0] = nn.Linear(WIDTH, 1)
    bank.add("1", adapter_of(trained(other)))
    bank.add("3", adapter_of(trained(plain)))
    bank.add("h", adapter_of(trained(plain, ())))
    for names, (first, second) in {"11": rows[:1] * 2, "13": rows, "h1": rows[::-1]}.items():
        message = re.escape(f"head turns a row into {first} for one adapter and {second} for ano")
        refused = pytest.raises(ValueError, match=f"^{message}.* use one adapter at a time$")
        with torch.no_grad(), bank.use(list(names)), nullcontext() if names == "11" else refused:
            assert plain(x).shape == (2, *first)


def test_rows_of_one_adapter_are_counted_where_a_head_is_given_a_tensor():
    plain, x = OfTwoTensors().eval(), torch.randn(2, WIDTH)
    bank = with_adapter(plain, trained(plain), x)
    with bank.use(["a"] * 3), pytest.raises(ValueError, match="given for 3 rows, but a layer"):
        plain.head(x, x)


class OfItself(nn.Module):
    """Calls itself, and may fail."""

    def __init__(self):
        super().__init__()
        self.linear, self.fails = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x, depth=2):
        inner = self(x.tanh_(), depth=depth - 1) if depth else x
        time.sleep(0.001)
        if self.fails and depth:
            raise RuntimeError("the head fails")
        return self.linear(inner)


CALLS = {
    "by place": lambda head, x: head(x, 1),
    "by name": lambda head, x: head(x=x, depth=1),
    "by both": lambda head, x: head(x, depth=1),
}


class CallsItsHead(OfTensor):
    called = staticmethod(CALLS["by place"])

    def __init__(self):
        super().__init__()
        self.head = OfItself()

    def forward(self, x, whole=True):
        x = self.up(x)
        if not whole:
            return self.head.linear(x)
        return self.called(self.head, x)


@pytest.mark.parametrize("called", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("names", ["a", "aab"])
def test_a_head_may_call_itself_and_fail(names, called):
    """A failed call leaves nothing behind, although it was in a block that goes on."""
    plain, x = CallsItsHead().eval(), torch.randn(3, WIDTH)
    plain.called = called
    own = {name: trained(plain) for name in "ab"}
    bank = lora.AdapterBank(plain)
    for name, model in own.items():
        bank.add(name, adapter_of(model))
    with torch.no_grad(), bank.use(names if names == "a" else list(names)):
        expected = torch.cat([own["a"](x[:2]), own[names[-1]](x[2:])])
        for _ in range(2):
            torch.testing.assert_close(plain(x), expected, rtol=1e-4, atol=1e-5)
            plain.head.fails = True
            with pytest.raises(RuntimeError, match="the head fails"):
                plain(x)
            plain.head.fails = False
            assert not in_effect().inputs
            with pytest.raises(ValueError, match=r"calls head\.linear by itself"):
                plain(x, whole=False)


@torch.no_grad()
def test_threads_that_are_given_a_block_do_not_mix_their_inputs():
    plain = CallsItsHead().eval()
    own, batches = trained(plain), torch.randn(20, 3, WIDTH)
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter_of(own))

    async def computed():
        with torch.no_grad(), bank.use("a"):
            return await asyncio.gather(*(asyncio.to_thread(plain, x) for x in batches))

    expected = torch.stack([own(x) for x in batches])
    torch.testing.assert_close(torch.stack(asyncio.run(computed())), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["up", "head"])
def test_a_copy_that_has_replaced_a_module_takes_adapters(name):
    """Its hooks are copies, which never act. The module may be put back."""
    plain, x = OfTensor().eval(), torch.randn(3, WIDTH)
    own, bank, module = trained(plain), lora.AdapterBank(plain), plain.get_submodule(name)
    hooks = []
    for is_replaced in (False, True, False):
        setattr(plain, name, copy.deepcopy(module) if is_replaced else module)
        bank.add("a", adapter_of(own))
        hooks.append((len(module._forward_hooks), len(module._forward_pre_hooks)))
        with torch.no_grad(), bank.use("a"):
            torch.testing.assert_close(plain(x), own(x), rtol=1e-4, atol=1e-5)
            assert not in_effect().inputs
        bank.remove("a")
    assert hooks == [hooks[0], (0, 0), hooks[0]]
    bank.close()
    assert not module._forward_hooks


@pytest.mark.parametrize(("variant", "tokens"), [("lora", []), ("dora", []), ("lora", [2])])
def test_lora_of_the_models_head_shares_a_batch_with_a_wider_head(tmp_path, variant, tokens):
    torch.manual_seed(0)
    base = Net().eval()
    other = copy.deepcopy(base)
    other.head = nn.Linear(6, 5)
    models = drawn(other, "a", modules_to_train="head"), drawn(base, "head", variant=variant)
    for number, model in enumerate(models):
        lora.save_adapter(model, tmp_path / f"{number}.safetensors")
    bank = bank_of(base, tmp_path / "0.safetensors", tmp_path / "1.safetensors")
    x = torch.randn(2, *tokens, 6)
    with torch.no_grad(), bank.use(["a0", "a1"]):
        logits = base(x)
    close(logits[0], models[0](x[:1])[0])
    close(logits[1, ..., :3], models[1](x[1:])[0])
    assert logits[1, ..., 3:].isneginf().all()
