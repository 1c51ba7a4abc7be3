"""Tests what the source of a forward is read to do with the attributes of `self`."""

import pytest
import torch
from torch import nn

from loralib.sources import ANY, ASKED, Use, used_in_forward


class InAnExpressionWithAnIf(nn.Module):
    def forward(self, x):
        x = self.first(x) if self.asked else self.second(x)
        return self.last(x)

    uses = (
        Use(("asked",), False, True),
        Use(("first",), True, False),
        Use(("second",), True, False),
        Use(("last",), True, True),
    )


class AfterConditions(nn.Module):
    def forward(self, x):
        if self.asked:
            x = self.first(x)
        while self.more(x):
            x = self.second(x)
        self.third(x) and self.fourth(x)
        return self.last(x)

    uses = (
        Use(("asked",), False, True),
        Use(("first",), True, False),
        Use(("more",), True, True),
        Use(("second",), True, False),
        Use(("third",), True, True),
        Use(("fourth",), True, False),
        Use(("last",), True, True),
    )


class InIndices(nn.Module):
    def forward(self, x):
        self.seen[self.where] = x
        return self.layers[0](x) + self.layers[self.index].weight + self.rest[1:][0]

    uses = (
        Use(("where",), False, True),
        Use(("layers", "0"), True, True),
        Use(("layers", ANY, "weight"), False, True),
        Use(("index",), False, True),
        Use(("rest",), False, True),
    )


class Comparing(nn.Module):
    def forward(self, x):
        x = self.first(x, scale=self.scale)
        return x if self.bias is None else x.to(self.weight) > self.threshold

    uses = (
        Use(("first",), True, True),
        Use(("scale",), False, True),
        Use(("bias", ASKED), False, True),
        Use(("weight", ASKED), False, False),
        Use(("threshold",), False, False),
    )


class ByOtherNames(nn.Module):
    def forward(self, x):
        first = self.first
        several = self.second
        several = self.third
        given = self.fourth
        for layer in self.layers:
            x = layer(given(x))
        with torch.no_grad():
            held = self.held
        inner = held.inner
        x = [block(x) for block in self.blocks]
        return first(x) + several(x) + inner(x) + (lambda given: given(x))(abs)

    uses = (
        Use(("second",), False, True),
        Use(("third",), False, True),
        Use(("fourth",), False, True),
        Use(("layers", ANY), True, True),
        Use(("blocks", ANY), True, True),
        Use(("first",), True, True),
        Use(("held", "inner"), True, True),
    )


class InMethods(nn.Module):
    def forward(self, x):
        x = self.always(x)
        x.register_hook(self.later)
        return self.sometimes(x) if x.any() else x

    def always(self, x):
        return self.first(x)

    def sometimes(self, x):
        return self.second(x)

    def later(self, grad):
        return self.third(grad)

    uses = (
        Use(("always",), True, True),
        Use(("sometimes",), True, False),
        Use(("first",), True, True),
        Use(("second",), True, False),
        Use(("later",), False, True),
        Use(("third",), True, False),
    )


class WithSuper(nn.Module):
    def forward(self, x):
        return self.first(super().forward(x))

    uses = ()


class AsAWhole(nn.Module):
    def forward(self, x):
        return self.first(x) + len(vars(self))

    uses = ()


class ByAProperty(nn.Module):
    def forward(self, x):
        return self.chosen(x)

    @property
    def chosen(self):
        return self.first

    uses = ()


@pytest.mark.parametrize(
    "kind",
    [
        *(InAnExpressionWithAnIf, AfterConditions, InIndices, Comparing, ByOtherNames, InMethods),
        *(WithSuper, AsAWhole, ByAProperty),
    ],
)
def test_uses_in_a_forward(kind):
    assert sorted(used_in_forward(kind)) == sorted(kind.uses)
