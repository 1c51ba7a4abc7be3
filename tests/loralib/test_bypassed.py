"""Layers with whose weights a model computes itself, so that their updates would have no effect."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora


class Called(nn.Module):
    """Calls its layer; the others here are like it but for their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.proj(x))


class Read(Called):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(F.linear(x, self.proj.weight, self.proj.bias))


class ReadThroughView(Called):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(x @ self.proj.weight.view(2, 2, 4).flatten(0, 1).t())


class ReadInHelper(Called):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.project(x))

    def project(self, x: Tensor) -> Tensor:
        return torch.stack([(lambda row: row @ self.proj.weight.t())(row) for row in x])


def _decorated(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def wrapper(*args: Tensor) -> Tensor:
        return forward(*args)

    return wrapper


class ReadInDecorated(Called):
    @_decorated
    def forward(self, x: Tensor) -> Tensor:
        return self.other(F.linear(x, self.proj.weight))


class Inherits(Read):
    pass


class ReadsWhatIsAbout(Called):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.proj.weight, Tensor)
        x = x.to(self.proj.weight.dtype).to(self.proj.weight.device)
        return self.other(self.proj(x))

    def norm(self) -> Tensor:  # which forward does not call
        return self.proj.weight.norm()


class ReadsSometimes(Called):
    is_exact = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_exact:
            return self.other(F.linear(x, self.proj.weight, self.proj.bias))
        return self.other(self.proj(x))


class CallsForward(Called):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.proj.forward(x))


class Outer(nn.Module):
    """Reads the weight of a layer within a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Called()

    def forward(self, x: Tensor) -> Tensor:
        return self.block.other(F.linear(x, self.block.proj.weight))


NEVER_CALLED = [Read, ReadThroughView, ReadInHelper, ReadInDecorated, Inherits]
CALLED = [Called, CallsForward, ReadsWhatIsAbout]


@pytest.mark.parametrize("kind", NEVER_CALLED)
def test_a_layer_that_is_never_called_is_refused(kind: type[Called]):
    model = nn.Sequential(kind(), kind())
    message = (
        rf"an update of 0\.proj would have no effect: {kind.__name__} computes with its weight and "
        r"does not call it; leave it out of targets, .*: exclude=\['proj'\]"
    )
    with pytest.raises(lora.UnsupportedLayerError, match=message):
        lora.add_lora(model, "all-linear", r=2)
    assert type(model[0].proj) is nn.Linear
    assert lora.add_lora(model, "all-linear", r=2, exclude=["proj"]) == ("0.other", "1.other")


@pytest.mark.parametrize("kind", [*NEVER_CALLED, *CALLED])
def test_it_is_refused_where_its_update_would_get_no_gradient(kind: type[Called]):
    """Held against what happens in a layer that is made by hand."""
    model = kind()
    model.proj = lora.Linear(4, 4, r=2)
    model(torch.randn(3, 4)).sum().backward()
    has_effect = model.proj.lora_B.grad is not None
    assert has_effect == (kind in CALLED)
    model.proj = nn.Linear(4, 4)
    if has_effect:
        assert lora.add_lora(model, "proj", r=2) == ("proj",)
    else:
        with pytest.raises(lora.UnsupportedLayerError):
            lora.add_lora(model, "proj", r=2)


def test_the_weight_is_read_by_a_module_further_out():
    with pytest.raises(lora.UnsupportedLayerError, match=r"block\.proj would .* effect: Outer "):
        lora.add_lora(Outer(), ["proj"], r=2)
    assert lora.add_lora(Outer(), ["other"], r=2) == ("block.other",)


def test_the_way_out_leaves_out_nothing_else():
    model = nn.ModuleDict({"a": Read(), "b": Called()})
    with pytest.raises(lora.UnsupportedLayerError, match=r"exclude=\['a\.proj'\]"):
        lora.add_lora(model, ["proj"], r=2)
    assert lora.add_lora(model, ["proj"], r=2, exclude=["a.proj"]) == ("b.proj",)


def test_what_is_read_in_some_cases_is_said_once(caplog):
    model = nn.Sequential(ReadsSometimes(), ReadsSometimes(), Called())
    with caplog.at_level(logging.WARNING):
        assert len(lora.add_lora(model, ["proj", "other"], r=2)) == 6
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("ReadsSometimes may compute with the weight of 0.proj, 1.proj itself")


def test_what_is_called_is_not_said(caplog):
    for kind in CALLED:
        lora.add_lora(kind(), ["proj"], r=2)
    assert not caplog.records


def test_an_adapter_for_such_a_layer_is_loaded_and_said(tmp_path: Path, caplog):
    """Its update may have an effect elsewhere, and once it is merged."""
    model = Called()
    lora.add_lora(model, ["proj"], r=2)
    nn.init.normal_(model.proj.lora_B)
    lora.save_adapter(model, tmp_path / "adapter")
    other = Read()
    caplog.clear()
    other.load_state_dict(model.state_dict(), strict=False)
    lora.load_adapter(other, tmp_path / "adapter")
    assert any("Read may compute with the weight of proj" in r.getMessage() for r in caplog.records)


def test_a_class_without_source_is_taken_as_it_is():
    names = {"Called": Called, "F": F}
    exec(  # as in a prompt of Python
        "class Hidden(Called):\n"
        "    def forward(self, x):\n"
        "        return self.other(F.linear(x, self.proj.weight))\n",
        names,
    )
    assert lora.add_lora(names["Hidden"](), ["proj"], r=2) == ("proj",)
