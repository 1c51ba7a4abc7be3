"""Tests that `add_lora` warns of layers that a model bypasses, whose updates have no effect."""

import functools
import gc
import logging
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora
from loralib.lora_layer import lora_layers


class Net(nn.Module):
    """Calls its layers. The models below only differ from it in their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.proj(x))


# ---- models that never call `proj` ----


class Reads(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(F.linear(x, self.proj.weight, self.proj.bias))


class ReadsAView(Net):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == 4, """a text
that goes on at the margin"""
        return self.other(x @ self.proj.weight.view(2, 2, 4).flatten(0, 1).t())


class ReadsDtypeToo(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.proj.weight)
        return self.other(y.to(self.proj.weight.dtype))


class ReadsInAnotherMethod(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.project(x))

    def project(self, x: Tensor) -> Tensor:
        return torch.stack([(lambda row: row @ self.proj.weight.t())(row) for row in x])


def _decorated(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def wrapper(*args: Tensor) -> Tensor:
        return forward(*args)

    return wrapper


class ReadsDecorated(Net):
    @_decorated
    def forward(model, x: Tensor) -> Tensor:
        return model.other(F.linear(x, model.proj.weight))


class Inherits(Reads):
    pass


def forward_that_reads(model: Any, x: Tensor) -> Tensor:
    return model.other(F.linear(x, model.proj.weight))


class ReadsInAFunction(Net):
    """Its forward is a function of the module, as that of a class that was patched."""

    forward = forward_that_reads


class Listed(nn.Module):
    """Holds its layers in a list, and calls them by their places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(4, 4)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.layers)):
            x = self.layers[i]["proj"](x)
        return x


class ReadsByIndex(Listed):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.layers)):
            x = x @ self.layers[i]["proj"].weight[:, :].t()
        return x


class ReadsByNumber(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.layers[0].proj.weight), self.layers[-1]["proj"].weight)


class ReadsAKernel(Net):
    def __init__(self) -> None:
        super().__init__()
        self.proj: Any = nn.Conv1d(1, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.proj.weight - self.proj.weight.mean()
        return self.other(self.proj._conv_forward(x[:, None], kernel, self.proj.bias)[..., 0])


class ReadsOfAVariable(Net):
    def forward(self, x: Tensor) -> Tensor:
        layer = self.proj
        weight = layer.weight
        return self.other(x @ weight[:, :].t())


class ReadsInALoop(Listed):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, layer["proj"].weight)
        return x


class ReadsAll(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.stack([layer["proj"].weight for layer in self.layers]).sum(0)


# ---- models that call it, or may call it ----


class CallsByIndex(Listed):
    def forward(self, x: Tensor) -> Tensor:
        penalty = self.layers[0]["proj"].weight.abs().sum()
        for i in range(len(self.layers)):
            x = self.layers[i]["proj"](x)
        return x + penalty


class CallsByNumber(nn.Module):
    """Reads its layer by name, and calls it by its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(OrderedDict(proj=nn.Linear(4, 4), act=nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) + self.layers.proj.weight.abs().sum()


class CallsOfASlice(Listed):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer["proj"](x) + self.layers[0]["proj"].weight.sum()
        return x


class CallsByItem(Listed):
    def __getitem__(self, i: int) -> nn.Module:
        return self.layers[i]["proj"]

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x)) + self.layers[0]["proj"].weight.sum()


class CallsAndReads(Net):
    is_exact = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_exact:
            return self.other(F.linear(x, self.proj.weight, self.proj.bias))
        return self.other(self.proj(x))


class CallsForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.proj.forward(x)) + self.proj.weight.sum()


class CallsAVariable(Net):
    def forward(self, x: Tensor) -> Tensor:
        layer = self.proj
        return self.other(layer(x)) + layer.weight.sum()


class CallsInALoop(Listed):
    def forward(self, x: Tensor) -> Tensor:
        penalty = self.layers[0]["proj"].weight.abs().sum()
        for layer in self.layers:
            x = layer["proj"](x)
        return x + penalty


class CallsOneOfTwoValues(Net):
    """Its variable is assigned twice, so it may be either."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.proj, self.other):
            x = layer(x)
        layer = self.other
        return x + layer.weight.sum() + self.proj.weight.sum()


class CallsItself(Net):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return self.proj(x)
        return self(self.other(x), depth - 1) + self.proj.weight.sum()


class CallsInParent(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.proj.weight.abs().sum()


class CallsByName(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(getattr(self, "proj")(x)) + self.proj.weight.abs().sum()  # noqa: B009


class CallsByProperty(Net):
    @property
    def first(self) -> nn.Module:
        return self.proj

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.first(x)) + self.proj.weight.abs().sum()


class CallsChildren(Net):
    def forward(self, x: Tensor) -> Tensor:
        penalty = self.proj.weight.abs().sum()
        for child in self.children():
            x = child(x)
        return x + penalty


class SharesIt(nn.Module):
    """Calls its layer under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.part = nn.Sequential(self.proj, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.part(x), self.proj.weight)


NEVER_CALLED = [
    *(Reads, ReadsAView, ReadsDtypeToo, ReadsInAnotherMethod, ReadsDecorated, Inherits),
    *(ReadsInAFunction, ReadsByIndex, ReadsByNumber, ReadsAKernel, ReadsOfAVariable),
    *(ReadsInALoop, ReadsAll),
]
CALLED = [
    *(Net, CallsAndReads, CallsForward, CallsAVariable, CallsInParent, CallsByName),
    *(CallsByProperty, CallsChildren, CallsItself, CallsOneOfTwoValues, SharesIt),
    *(Listed, CallsByIndex, CallsByNumber, CallsOfASlice, CallsInALoop, CallsByItem),
]


def warnings_of(
    model: nn.Module,
    caplog: pytest.LogCaptureFixture,
    targets: Any = "proj",
    what: str = "directly, and never calls",
) -> list[str]:
    """Returns the warnings of `add_lora` about layers whose weights are read."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        lora.add_lora(model, targets, r=2)
    return [line for r in caplog.records if what in (line := r.getMessage())]


def merging_changes(model: nn.Module, x: Tensor, method: str = "__call__") -> bool:
    """Returns whether merging updates that are not zero changes what a method returns."""
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_A)
        nn.init.normal_(layer.lora_B)
    adapted = getattr(model, method)(x)
    return not torch.allclose(getattr(lora.merge(model), method)(x), adapted, atol=1e-4)


@pytest.mark.parametrize("kind", [*NEVER_CALLED, *CALLED])
def test_it_warns_exactly_where_an_update_gets_no_gradient(kind: type[nn.Module], caplog):
    model: Any = kind()
    warnings = warnings_of(model, caplog)
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert bool(warnings) == (kind in NEVER_CALLED)
    without = [layer.lora_B.grad is None for layer in lora_layers(model).values()]
    assert without == [bool(warnings)] * len(without)
    # Of other layers than embeddings, this is only said if both certainly happen.
    does_both = kind in (CallsForward, CallsAVariable)
    assert bool(warnings_of(kind(), caplog, what="unless merged")) == does_both


def test_the_warning_names_each_class_once_and_the_layers_to_leave_out(caplog):
    model = nn.Sequential(*(Reads() for _ in range(3)), ReadsAView(), Net())
    assert warnings_of(model, caplog, "all-linear") == [
        "the source of Reads, ReadsAView reads the weight of 0.proj, 1.proj … and 2 more directly, "
        "and never calls them: an update has no effect there; leave out '0.proj', '1.proj', "
        "'2.proj', '3.proj'"
    ]
    lora.remove_lora(model)
    exclude = ["0.proj", "1.proj", "2.proj", "3.proj"]
    assert len(lora.add_lora(model, "all-linear", r=2, exclude=exclude)) == 6


@pytest.mark.parametrize("patterns", [{}, {"rank_pattern": {"proj": 8}}])
def test_the_error_for_too_large_a_rank_says_to_leave_a_bypassed_layer_out(patterns, caplog):
    """With a lower rank, the next message would be that the layer is never called."""
    message = (
        r"^r = 8 is too large for proj, whose largest possible rank is 4; the source of Reads "
        r"never calls it, so no rank has an effect: leave it out of targets, or exclude it if .*$"
    )
    with pytest.raises(ValueError, match=message):
        lora.add_lora(Reads(), ["proj", "other"], r=8, **patterns)
    with pytest.raises(ValueError, match=r"for proj, .* 4; lower it"):
        lora.add_lora(Net(), ["proj", "other"], r=8, **patterns)
    assert not warnings_of(Reads(), caplog, "other")


class ReadsOnlyAttributes(Net):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.proj.weight, Tensor)
        return self.other(x.to(self.proj.weight.dtype).to(self.proj.weight.device))

    def norm(self) -> Tensor:  # not called by forward
        return self.proj.weight.norm()


class CallsUnseen(Net):
    """Calls its layer through a function whose source is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.run = lambda x: self.proj(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.run(x.to(self.proj.weight, non_blocking=True)))


class ConvertsToItsType(CallsUnseen):
    def forward(self, x: Tensor) -> Tensor:
        assert self.proj.weight.grad is None
        assert self.proj.weight.layout == x.layout
        assert self.proj.weight.size(0) == 4
        return self.other(self.run(x.type_as(self.proj.weight)))


class AsksAboutItsWeight(CallsUnseen):
    def forward(self, x: Tensor) -> Tensor:
        assert self.proj.weight is not None
        assert self.other.weight is not self.proj.weight
        assert len(self.proj.weight) == self.proj.weight.stride(0)
        assert type(self.proj.weight) is nn.Parameter
        assert getattr(self.proj.weight, "quant_state", None) is None
        zeros = torch.zeros_like(self.proj.weight)[0]
        return self.other(self.run(x.to(self.proj.weight) + zeros))


class ConvertsTheWeight(Net):
    """Converts the weight itself, and computes with it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x @ self.proj.weight.to(self.other.weight).t())


class ComputesInAnArgument(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(x.to(self.proj.weight * 2)) * self.other(x)


@pytest.mark.parametrize(
    "kind", [ReadsOnlyAttributes, CallsUnseen, ConvertsToItsType, AsksAboutItsWeight]
)
def test_no_warning_where_only_attributes_of_a_weight_are_read(kind: type[Net], caplog):
    assert not warnings_of(kind(), caplog)
    assert kind()(torch.randn(3, 4)).shape == (3, 4)


class ComputesWithAComparison(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(x @ (self.proj.weight > 0).to(x.dtype))


@pytest.mark.parametrize("kind", [ConvertsTheWeight, ComputesInAnArgument, ComputesWithAComparison])
def test_it_warns_where_a_weight_is_converted_or_computed_with(kind: type[Net], caplog):
    assert warnings_of(kind(), caplog)
    assert not warnings_of(kind(), caplog, "other")


class Outer(nn.Module):
    """Reads the weight of a layer within a module that it does not call."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block: Any = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block.other(F.linear(x, self.block.proj.weight))


class UsesAMethod(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return self.block.project(x) + self.block.proj.weight.abs().sum()


class Moves(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.proj.to(x.device)(x)) + self.proj.weight.abs().sum()


class Recurs(Outer):
    """Calls a method of its own, not of the block."""

    def forward(self, x: Tensor, is_outer: bool = True) -> Tensor:
        if is_outer:
            return self.forward(x, False)
        return self.block.other(F.linear(x, self.block.proj.weight))


class CallsBlock(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.proj.weight.abs().sum()


def test_it_warns_where_a_module_further_out_reads_the_weight(caplog):
    assert warnings_of(Outer(Net()), caplog)[0].startswith(
        "the source of Outer reads the weight of block.pr"
    )
    assert warnings_of(Recurs(Net()), caplog)
    assert not warnings_of(Outer(Net()), caplog, "other")
    assert not warnings_of(CallsBlock(Net()), caplog)


def test_no_warning_where_a_method_may_call_the_layer(caplog):
    block: Any = Net()
    block.__class__ = type("Block", (Net,), {"project": lambda self, x: self.proj(x)})
    assert not warnings_of(UsesAMethod(block), caplog)
    assert not warnings_of(Moves(), caplog)


class ReadsAttention(nn.Module):
    """Computes with an attention's in_proj and calls its out_proj, as torchaudio's WavLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        projected = F.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias)
        q, k, v = projected.chunk(3, -1)
        return self.attention.out_proj(F.scaled_dot_product_attention(q, k, v))


class ReadsAttentionByFunction(ReadsAttention):
    """Calls PyTorch's function with the attention's weights."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        out, _ = F.multi_head_attention_forward(
            *(x, x, x, 4, 1),
            *(self.attention.in_proj_weight, self.attention.in_proj_bias, None, None, False, 0.0),
            *(self.attention.out_proj.weight, self.attention.out_proj.bias),
        )
        return out.transpose(0, 1)


class SeparateWeights(ReadsAttention):
    """Its keys and values have other widths, so its attention has a weight for each projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, kdim=3, vdim=2)


class ReadsQueries(SeparateWeights):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.attention.q_proj_weight)


class ReadsKeys(SeparateWeights):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[..., :3], self.attention.k_proj_weight)


class ReadsValues(SeparateWeights):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[..., :2], self.attention.v_proj_weight)


class CallsAttention(ReadsAttention):
    def forward(self, x: Tensor) -> Tensor:
        penalty = self.attention.in_proj_weight.abs().sum()
        return self.attention(x, x, x)[0] + penalty


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (ReadsAttention, ["attention"]),
        (ReadsAttentionByFunction, ["attention", "attention.out_proj"]),
        (CallsAttention, []),
    ],
)
def test_an_attention_s_projections_can_be_read_as_well(kind: type[nn.Module], read, caplog):
    model: Any = kind()
    said = warnings_of(model, caplog, "attention")
    model(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
    layers = {"attention": model.attention, "attention.out_proj": model.attention.out_proj}
    assert read == [name for name, layer in layers.items() if layer.lora_B.grad is None]
    assert len(said) == bool(read)
    assert all(f"reads the weight of {', '.join(read)} directly" in line for line in said)


@pytest.mark.parametrize("kind", [ReadsQueries, ReadsKeys, ReadsValues])
def test_each_of_an_attention_s_separate_weights_can_be_read(kind: type[nn.Module], caplog):
    model: Any = kind()
    assert warnings_of(model, caplog, "attention")
    model(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
    assert all(layer.lora_B.grad is None for layer in lora_layers(model).values())


# ---- embeddings that are called, and read as well ----


class Tied(nn.Module):
    """Its output layer is its embedding, by whose weight it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.proj = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.proj(self.words(ids)), self.words.weight)


class TiedInAMethod(Tied):
    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.proj(self.words(ids)))

    def scores(self, x: Tensor) -> Tensor:
        return x @ self.words.weight.t()


class HandsOnItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Untied()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids) @ self.inner.words.weight.t()


class TiedByAFunction(Tied):
    """As x-transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = lambda x: x @ self.words.weight.t()

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.proj(self.words(ids)))


class Transposed:
    """Computes with an embedding's weight, as torchtune's TiedLinear."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight)


class TiedByASecondFunction(TiedByAFunction):
    """A function before it reads another weight by the same name, `self`, and it has two names."""

    def __init__(self) -> None:
        super().__init__()
        options = types.SimpleNamespace(factor=2)
        self.scores = lambda x: x @ self.proj.weight
        self.scale = lambda x: options.factor * x @ self.words.weight.t()

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale(self.proj(self.words(ids)))


class TiedByAnObject(TiedByAFunction):
    def __init__(self) -> None:
        super().__init__()
        self.scores = Transposed(self.words)


class NeverCalled(Tied):
    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.proj(F.embedding(ids, self.words.weight)), self.words.weight)


class Untied(Tied):
    def forward(self, ids: Tensor) -> Tensor:
        mask = self.words.weight.new_ones(4)
        if self.words.weight is None:
            return mask
        return self.proj(self.words(ids).to(self.words.weight.dtype)) * mask


class UntiedByAnObject(Untied):
    """Its function and its object read another weight, or not the weight's values."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = lambda x: x.to(self.words.weight.dtype) @ self.proj.weight
        self.more = Transposed(self.proj)


@pytest.mark.parametrize(
    "kind",
    [
        *(Tied, TiedInAMethod, HandsOnItsWeight, TiedByAFunction, TiedByASecondFunction),
        *(TiedByAnObject, Untied, UntiedByAnObject),
    ],
)
def test_it_is_said_where_merging_an_embedding_changes_outputs(kind: type[nn.Module], caplog):
    model: Any = kind()
    said = warnings_of(model, caplog, ["words", "proj"], "which lacks the update unless merged")
    is_other = merging_changes(model, torch.arange(6))
    assert is_other == bool(said) == (not issubclass(kind, Untied))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TiedByAFunction, "TiedByAFunction.__init__.<locals>.<lambda>"),
        (TiedByAnObject, "Transposed"),
    ],
)
def test_a_function_or_an_object_that_reads_an_embedding_is_named(kind, name, caplog):
    (said,) = warnings_of(kind(), caplog, "words", "unless merged")
    assert said.startswith(f"the source of {name} also reads the weight of words directly")


class TiedByIndex(nn.Module):
    """Its output layer is the second of its embeddings, all of which it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(6, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        rows = sum(self.words[i](ids) for i in range(3))
        return F.linear(rows, self.words[1].weight)


def test_of_several_embeddings_the_one_that_is_read_is_named(caplog):
    (said,) = warnings_of(TiedByIndex(), caplog, "words.*", "which lacks the update unless merged")
    assert "TiedByIndex also reads the weight of words.1 directly" in said
    assert "words.0" not in said
    assert "words.2" not in said


def test_a_model_with_a_function_is_not_kept_alive():
    model = TiedByAFunction()
    lora.add_lora(model, ["words", "proj"], r=2)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


class Strange:
    """Has no attributes of its own, and cannot be asked for any."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.inner.words.weight.t()


def test_functions_and_objects_of_any_kind_are_only_looked_at(caplog):
    """None of their code is run, and none is found to read the embedding."""
    model, strange = Untied(), Strange()
    values = [strange, Strange, torch.relu, functools.partial(torch.relu), model.forward]
    values += [lambda x: x @ strange.inner.words.weight.t(), lambda x: x @ late.words.weight.t()]
    values += [F.relu, lambda x: model(x)]  # without variables; uses one as a whole
    of_dict = {
        "the line of this is not Python by itself": lambda x: x @ model.words.weight.t(),
    }
    values += of_dict.values()
    for number, value in enumerate(values):
        setattr(model, f"value_{number}", value)
    lora.add_lora(model, ["words", "proj"], r=2)
    late = model  # only now has the second function's variable a value
    assert not caplog.records


def test_what_to_do_about_an_embedding_that_is_read(caplog):
    model = nn.Sequential(Tied())
    assert warnings_of(model, caplog, "words", "unless merged") == [
        "the source of Tied also reads the weight of 0.words directly, which lacks the update "
        "unless merged: leave out '0.words', or name it in modules_to_train instead"
    ]
    several = nn.ModuleList([Tied(), TiedInAMethod()])
    assert warnings_of(several, caplog, "words", "unless merged") == [
        "the source of Tied, TiedInAMethod also reads the weights of 0.words, 1.words directly, "
        "which lack the update unless merged: leave out '0.words', '1.words', or name them in "
        "modules_to_train instead"
    ]
    assert not warnings_of(NeverCalled(), caplog, "words", "unless merged")
    assert warnings_of(NeverCalled(), caplog, "words")
    lora.remove_lora(model)
    lora.add_lora(model, "proj", r=2, modules_to_train=["words"])
    assert model[0].words.weight.requires_grad


# ---- other layers that are called, and read as well ----


class Autoencoder(nn.Module):
    """Its decoder is the transpose of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.proj: Any = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.proj(x), self.proj.weight.t())


class InMethods(Autoencoder):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.decode(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.proj(x)

    def decode(self, x: Tensor) -> Tensor:
        return x @ self.proj.weight


class Convolutional(Autoencoder):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv1d(1, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(self.proj(x[:, None]), self.proj.weight)


class UnderACondition(Autoencoder):
    """Subclasses read the weight in one case and call the layer in another."""

    is_exact = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.proj.weight) if self.is_exact else self.proj(x)


class AfterAReturn(UnderACondition):
    def forward(self, x: Tensor) -> Tensor:
        if not self.is_exact:
            return self.proj(x)
        return F.linear(x, self.proj.weight)


class InCases(UnderACondition):
    def forward(self, x: Tensor) -> Tensor:
        assert self.proj.weight.isfinite().all()
        match self.is_exact:
            case True:
                return F.linear(x, self.proj.weight)
        try:
            return self.proj(x)
        except TypeError:
            return F.linear(x, self.proj.weight)


class InALambda(UnderACondition):
    def forward(self, x: Tensor) -> Tensor:
        exact = lambda x: F.linear(x, self.proj.weight)  # noqa: E731
        ways = [self.proj, exact]
        return (self.is_exact and exact(x)) or ways[0](x)


@pytest.mark.parametrize(
    "kind",
    [
        *(Autoencoder, InMethods, Convolutional),
        *(UnderACondition, AfterAReturn, InCases, InALambda),
    ],
)
def test_it_is_said_where_merging_a_layer_changes_outputs(kind: type[nn.Module], caplog):
    model: Any = kind()
    said = warnings_of(model, caplog, "proj", "which lacks the update unless merged")
    is_other = merging_changes(model, torch.randn(2, 4))
    assert is_other == bool(said) == (not issubclass(kind, UnderACondition))


class CallsTheFirstAndReadsTheLast(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers[0]["proj"](x), self.layers[-1]["proj"].weight)


def test_a_layer_of_a_list_is_not_taken_for_another_that_is_read(caplog):
    model = CallsTheFirstAndReadsTheLast()
    assert not warnings_of(model, caplog, "layers.0.proj", "directly")


# ---- methods other than forward ----


class Recommends(Untied):
    """Is trained by another method than forward."""

    def loss(self, ids: Tensor) -> Tensor:
        return self.proj(self.words(ids)) @ self.words.weight.t()


class RecommendsByItself(Recommends):
    def loss(self, ids: Tensor) -> Tensor:
        table = self.words
        return self(ids) @ table.weight.t()


class RecommendsByMethods(Recommends):
    def loss(self, ids: Tensor) -> Tensor:
        return self.encode(ids) @ torch.cat([self.words.weight]).t()

    def encode(self, ids: Tensor) -> Tensor:
        return self.proj(self.words(ids))


class RecommendsByAScore(Recommends):
    def loss(self, ids: Tensor) -> Tensor:
        return self.scores(self.proj(self.words(ids)))

    def scores(self, x: Tensor) -> Tensor:
        return x @ self.words.weight.t()


class RecommendsByAProperty(Recommends):
    @property
    def table(self) -> Tensor:
        return self.words.weight

    @functools.cached_property
    def shift(self) -> Tensor:
        return torch.ones(4)

    def loss(self, ids: Tensor) -> Tensor:
        return (self(ids) + self.shift) @ self.table.t()


class RecommendsByAnother(Recommends):
    """Its output layer has the embedding under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = Output()
        self.output.table = self.words

    def loss(self, ids: Tensor) -> Tensor:
        return self.output(self(ids))


class Output(nn.Module):
    table: Any

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.weight.t()


class RecommendsInAChild(Recommends):
    """What else its parent's method does is not known."""

    def loss(self, ids: Tensor) -> Tensor:
        return super().forward(ids) @ self(ids).t() @ self.words.weight


class RecommendsByAList(Recommends):
    """Its output layer has the embedding in a list, which is not part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [self.proj, (self.words, self.proj)]

    def loss(self, ids: Tensor) -> Tensor:
        return self(ids) @ self.held[1][0].weight.t()


class Resizes(Recommends):
    """Its other methods compute nothing with the weight."""

    def loss(self, ids: Tensor) -> Tensor:
        return self(ids).to(self.words.weight)

    def resize(self, rows: int) -> Tensor:
        return nn.Embedding(rows, 4, _weight=self.words.weight.detach().repeat(2, 1)[:rows]).weight

    def reset(self) -> None:
        self.proj.reset_parameters()
        nn.init.normal_(self.words.weight)


@pytest.mark.parametrize(
    "kind",
    [
        *(Recommends, RecommendsByItself, RecommendsByMethods, RecommendsByAScore),
        *(RecommendsByAProperty, RecommendsByAnother),
        *(RecommendsInAChild, RecommendsByAList, Resizes),
    ],
)
def test_embeddings_that_other_methods_than_forward_read(kind: type[nn.Module], caplog):
    model: Any = kind()
    said = warnings_of(model, caplog, ["words", "proj"], "which lacks the update unless merged")
    is_other = merging_changes(model, torch.arange(6), "loss")
    assert is_other == bool(said) == (kind is not Resizes)


class Bilinear(nn.Module):
    """Computes with a stack of matrices in two methods, one of which is forward."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.relations = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.proj(x))

    def score(self, x: Tensor) -> Tensor:
        return torch.einsum("ti,roi->tro", x, self.relations)

    def loss(self, x: Tensor) -> Tensor:
        return torch.einsum("ti,rio->tro", self.proj(x), self.relations)

    def penalty(self) -> Tensor:
        return self.relations.square().mean()


class ScoresInItsLoss(Bilinear):
    """Calls the method that forward calls, in which only forward has the update."""

    def loss(self, x: Tensor) -> Tensor:
        return self.score(self.proj(x))


class CallsForwardInItsLoss(Bilinear):
    def loss(self, x: Tensor) -> Tensor:
        assert len(x) < self.relations.size(0)
        return self(x)


class InAChild(Bilinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def loss(self, x: Tensor) -> Tensor:
        return self(x)


class ByAFunction(CallsForwardInItsLoss):
    def forward(self, x: Tensor) -> Tensor:
        return _scored(self, x)

    def scored(self, x: Tensor) -> Tensor:
        return self.score(self.proj(x)) + self.relations.mean()


class ByAProperty(ByAFunction):
    @property
    def way(self) -> Any:
        return self.scored

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x)


class ByItsName(ByAFunction):
    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "scored")(x)  # noqa: B009


def _scored(module: Any, x: Tensor) -> Tensor:
    return module.scored(x)


@pytest.mark.parametrize(
    "kind",
    [
        *(Bilinear, ScoresInItsLoss, CallsForwardInItsLoss),
        *(InAChild, ByAFunction, ByAProperty, ByItsName),
    ],
)
def test_stacks_that_other_methods_than_forward_read(kind: type[nn.Module], caplog):
    model: Any = kind()
    said = warnings_of(model, caplog, ["relations"], "in methods other than forward")
    model.loss(torch.randn(2, 4, requires_grad=True)).sum().backward()
    is_read = kind in (Bilinear, ScoresInItsLoss)
    assert (model.relations_lora.lora_B.grad is None) == is_read
    assert said == is_read * [
        f"the source of {kind.__name__} also reads relations in methods other than forward, where "
        "an update has no effect unless merged: leave out 'relations', or compute with it in "
        "forward alone"
    ]


# ---- adapters that are loaded ----


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        (Reads, "proj", "the weight of proj directly, and never calls it: an update has no effect"),
        (Tied, "words", "directly, which lacks the update unless merged: merging changes the outp"),
        (Bilinear, "relations", "has no effect unless merged: compute with it in forward alone"),
        (Net, "proj", None),
    ],
)
def test_loading_says_which_updates_a_model_reads_past(kind, target, said, tmp_path, caplog):
    """The adapter may come from a model whose class calls its layers."""
    model = kind()
    lora.add_lora(model, target, r=2)
    for layer in lora_layers(model).values():
        nn.init.ones_(layer.lora_A)
        nn.init.ones_(layer.lora_B)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.remove_lora(model)
    caplog.clear()
    lora.load_adapter(model, tmp_path / "a.safetensors")
    (line,) = [record.getMessage() for record in caplog.records] or [None]
    assert line == said or said in line
    lora.load_adapter(model, tmp_path / "a.safetensors")  # which has the layers already
    assert len(caplog.records) == bool(said)


# ---- stacks of matrices ----


class Experts(nn.Module):
    """Has a gate like DeepSeek's, and computes with its weight directly."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, 4, 4))
        self.down = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        shares = F.linear(x, self.gate.weight).softmax(-1)
        return torch.einsum("te,eoi,epo,ti->tp", shares, self.up, self.down, x)

    def route(self, x: Tensor) -> Tensor:
        return self(x)


class Block(nn.Module):
    """Calls its experts. The modules below only differ from it in their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.experts = nn.Linear(4, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.proj(x))


class ReadsStack(Block):
    def forward(self, x: Tensor) -> Tensor:
        assert self.experts.down.shape == self.experts.up.shape
        return self.proj(x) @ self.experts.up[0].mT


class ReadsStackAndCalls(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts.up.abs().sum()


class ReadsStackAndUsesAMethod(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts.route(x) + self.experts.up.abs().sum()


class CallsFromATuple(Block):
    def forward(self, x: Tensor) -> Tensor:
        parts = (self.experts.up, self.experts)
        return parts[1](x) * parts[0].sum()


@pytest.mark.parametrize("also", [[], ["experts.down"]])
@pytest.mark.parametrize(
    "kind", [ReadsStack, Block, ReadsStackAndCalls, ReadsStackAndUsesAMethod, CallsFromATuple]
)
def test_it_warns_exactly_where_a_stack_s_update_gets_no_gradient(
    kind: type[nn.Module], also, caplog
):
    model: Any = nn.Sequential(kind())
    warnings = warnings_of(model, caplog, ["proj", "experts.up", *also])
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    is_read = kind is ReadsStack
    assert warnings == is_read * [
        "the source of ReadsStack reads 0.experts.up directly, and never calls the module "
        "that has it: an update has no effect there; leave out 'experts.up'"
    ]
    assert is_read == (model[0].experts.up_lora.lora_B.grad is None)


def test_layers_and_stacks_are_named_with_the_modules_that_read_them(caplog):
    model = nn.Sequential(ReadsStack(), Block(), Reads())
    targets = ["experts.up", "gate", "2.proj"]
    of_layers, of_stack = warnings_of(model, caplog, targets)
    assert of_layers.startswith("the source of Experts, Reads reads the weight of ")
    assert of_stack.startswith("the source of ReadsStack reads 0.experts.up directly")
    assert of_stack.endswith("leave out 'experts.up'")


def test_no_warning_where_another_module_calls_the_stack_s_module(caplog):
    model = nn.Sequential(ReadsStack(), Block())
    model[1].experts = model[0].experts
    assert not warnings_of(model, caplog, ["experts.up"])


@pytest.mark.parametrize(
    "calls",
    [[["gate"]], [["gate", "up"]], [["up"], ["gate"]], [["down"], ["up"], ["gate", "proj"]]],
)
def test_it_warns_of_a_layer_beside_an_adapted_stack_too(calls, caplog):
    """The stack's update has given the module another class, with properties."""
    model = Block()
    *first, last = calls
    for targets in first:
        assert not warnings_of(model, caplog, targets)
    rank = r"for experts\.gate, .* 3; the source of Experts never calls it, so"
    with pytest.raises(ValueError, match=rank):
        lora.add_lora(model, last, r=4)
    (warning,) = warnings_of(model, caplog, last)
    assert warning.startswith("the source of Experts reads the weight of experts.gate directly")


def test_a_forward_that_was_set_is_read_instead_of_the_class_s(caplog, monkeypatch):
    model = Reads()
    model.forward = types.MethodType(Net.forward, model)  # type: ignore[method-assign]
    assert not warnings_of(model, caplog)
    assert warnings_of(Reads(), caplog)
    around = nn.Sequential(Reads())
    around.forward = lambda x: around[0](x)  # type: ignore[method-assign]
    assert warnings_of(around, caplog)
    monkeypatch.setattr(Reads, "forward", Net.forward)
    assert not warnings_of(Reads(), caplog)


def test_no_warning_about_a_class_without_source(caplog):
    names = {"Net": Net, "F": F}
    exec(  # as at Python's prompt
        "class Hidden(Net):\n"
        "    def forward(self, x):\n"
        "        return self.other(F.linear(x, self.proj.weight))\n",
        names,
    )
    assert not warnings_of(names["Hidden"](), caplog)


class Raises:
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise ImportError("needs another package")


class NoHash(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other

    __hash__ = None  # type: ignore[assignment]


def test_attributes_that_raise_and_classes_without_a_hash(caplog):
    """Attributes are not read, and classes need not be hashable."""

    class Odd(Reads):
        project = Raises()
        settings = types.SimpleNamespace(__wrapped__=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.project(x) + self.settings + self.proj.weight

    class Hashless(Net, metaclass=NoHash):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.proj.weight)

    assert not warnings_of(Odd(), caplog)
    assert warnings_of(Hashless(), caplog)
