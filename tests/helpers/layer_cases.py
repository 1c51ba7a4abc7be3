"""The table of LoRA layers, and the plain layers that they are compared with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from torch import nn

import loralib as lora

R, ALPHA = 2, 6


@dataclass(frozen=True)
class Case:
    """A layer with LoRA, the plain layer that it replaces, and an input for both."""

    make: Callable[..., nn.Module]
    plain: Callable[..., nn.Module]
    x: Callable[[], torch.Tensor]


def linear(**fixed):
    return Case(
        lambda **kw: lora.Linear(6, 12, **fixed, **kw),
        lambda **kw: nn.Linear(6, 12, **kw),
        lambda: torch.randn(3, 5, 6),
    )


def merged(enable_lora, **fixed):
    return Case(
        lambda **kw: lora.MergedLinear(6, 12, enable_lora=enable_lora, **fixed, **kw),
        lambda **kw: nn.Linear(6, 12, **kw),
        lambda: torch.randn(3, 5, 6),
    )


def conv(dimensions, **fixed):
    name = f"Conv{dimensions}d"
    return Case(
        lambda **kw: getattr(lora, name)(4, 6, 3, **fixed, **kw),
        lambda **kw: getattr(nn, name)(4, 6, 3, **fixed, **kw),
        lambda: torch.randn(2, 4, *[5] * dimensions),
    )


CASES = {
    "linear": linear(),
    "linear-fan-in-fan-out": linear(fan_in_fan_out=True),
    "merged-qv": merged([True, False, True]),
    "merged-k": merged([False, True, False]),
    "merged-fan-in-fan-out": merged([True, True, False], fan_in_fan_out=True),
    "embedding": Case(
        lambda **kw: lora.Embedding(9, 4, padding_idx=1, **kw),
        lambda **kw: nn.Embedding(9, 4, padding_idx=1, **kw),
        lambda: torch.randint(9, (3, 5)),
    ),
    "conv1d": conv(1),
    "conv2d": conv(2, stride=2, padding=1, dilation=2, padding_mode="circular"),
    "conv2d-groups": conv(2, groups=2),
    "conv3d": conv(3),
}
WITH_DROPOUT = [name for name in CASES if name != "embedding"]
LINEAR = [name for name in CASES if name.startswith(("linear", "merged"))]


def randomised(layer):
    """Sets LoRA's tensors to random values, so that the delta is not zero; returns the layer."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return layer


def built(case, **kwargs):
    return randomised(case.make(r=R, lora_alpha=ALPHA, **kwargs))


def base_of(layer):
    return layer.conv if hasattr(layer, "conv") else layer


def update(layer):
    """The delta, scaling · B A, in the shape of the weight, computed group by group."""
    A, B, weight = layer.lora_A, layer.lora_B, base_of(layer).weight
    if isinstance(layer, lora.MergedLinear):
        parts, done = [], 0
        width = layer.out_features // len(layer.enable_lora)
        for on in layer.enable_lora:
            group_A, group_B = A[done * R :][:R], B[done * width :][:width]
            parts.append(group_B @ group_A if on else torch.zeros(width, layer.in_features))
            done += on
        product = torch.cat([part.to(A.dtype) for part in parts])
    else:
        product = B @ A
    transposed = isinstance(layer, lora.Embedding) or getattr(layer, "fan_in_fan_out", False)
    return ALPHA / R * (product.t() if transposed else product.reshape(weight.shape))


def run_plain(layer, x, weight):
    """What the plain layer computes with this weight."""
    base = base_of(layer)
    if isinstance(layer, lora.Embedding):
        return F.embedding(x, weight)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight.t() if layer.fan_in_fan_out else weight, base.bias)
    return base._conv_forward(x, weight, base.bias)


def reference(layer, x):
    return run_plain(layer, x, base_of(layer).weight + update(layer))


def trainable(layer):
    return {name: p for name, p in layer.named_parameters() if p.requires_grad}


def gradients(layer, out):
    parameters = trainable(layer)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    grads = torch.autograd.grad(out, parameters.values(), weights, allow_unused=True)
    return dict(zip(parameters, grads, strict=True))


# The terms of a convolution's sum of 4 · 3³ products, and those of the delta, 3 · R and R · R.
TERMS = 4 * 27 + 3 * R + R * R


def close(actual, expected, terms=TERMS):
    """Compares tensors, or dicts of tensors, up to rounding."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (actual[name] is None) == (tensor is None), name
            if tensor is not None:
                close(actual[name], tensor, terms)
    else:
        assert_close_to_rounding(actual, expected, terms, expected.dtype)


def close_in_half(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, **tolerance)


def same_as_plain(layer, actual, expected):
    """Compares bits; only values if the plain layer holds the transposed weight."""
    if getattr(layer, "fan_in_fan_out", False):
        close(actual, expected)
    else:
        assert torch.equal(actual, expected)


def bits(layer):
    return base_of(layer).weight.detach().clone()
