"""Tests of torch.func on LoRA layers: forward and reverse derivatives, and vmap."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compare import assert_close_to_rounding
from layer_cases import CASES, R, built
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap

import loralib as lora
from loralib.nn.fast_paths import is_transformed
from loralib.nn.products import Linear

# The terms of consecutive sums in a layer, and in a gradient over all outputs.
TERMS = 6 * 27 + R + 2 * 6 * 125
FOR_DORA = [name for name in CASES if name.startswith(("linear", "merged"))]
PAIRS = [(name, "lora") for name in CASES] + [(name, "dora") for name in FOR_DORA]


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(pair))
def layer_and_input(request):
    name, variant = request.param
    settings = {} if variant == "lora" else {"variant": variant}
    x = CASES[name].x()
    if name == "embedding":
        x[x == 1] = 0  # the padding row, whose derivative PyTorch leaves out only in reverse mode
    return built(CASES[name], **settings), x


def loss_with(layer, parameters, x):
    return functional_call(layer, parameters, (x,)).double().square().sum()


def gradients(layer, x):
    """Returns the gradients of one call, by autograd."""
    named = dict(layer.named_parameters())
    found = torch.autograd.grad(
        loss_with(layer, named, x), [p for p in named.values() if p.requires_grad]
    )
    return dict(zip([n for n, p in named.items() if p.requires_grad], found, strict=True))


def split(layer):
    """The trained parameters, and the frozen ones, both detached."""
    named = {name: p.detach() for name, p in layer.named_parameters()}
    trained = {n for n, p in layer.named_parameters() if p.requires_grad}
    return {n: named[n] for n in named if n in trained}, {
        n: named[n] for n in named if n not in trained
    }


def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        largest = float(expected.abs().max())
        assert_close_to_rounding(ours[name], expected, TERMS, magnitude=largest)


def test_gradients_equal_those_of_autograd(layer_and_input):
    layer, x = layer_and_input
    trained, frozen = split(layer)
    close(grad(lambda p: loss_with(layer, {**frozen, **p}, x))(trained), gradients(layer, x))
    close(jacrev(lambda p: loss_with(layer, {**frozen, **p}, x))(trained), gradients(layer, x))


def test_gradients_of_each_example_by_vmap(layer_and_input):
    layer, x = layer_and_input
    trained, frozen = split(layer)

    def of_one(p, x):
        return loss_with(layer, {**frozen, **p}, x[None])

    found = vmap(grad(of_one), (None, 0))(trained, x)
    for index, example in enumerate(x):
        close({n: t[index] for n, t in found.items()}, gradients(layer, example[None]))


def test_vmap_over_several_adapters(layer_and_input):
    layer, x = layer_and_input
    trained, frozen = split(layer)
    stacked = {name: torch.stack([p, 2 * p]) for name, p in trained.items()}
    found = vmap(lambda p: functional_call(layer, {**frozen, **p}, (x,)))(stacked)
    for index, factor in enumerate((1, 2)):
        own = {**frozen, **{name: factor * p for name, p in trained.items()}}
        close({"out": found[index]}, {"out": functional_call(layer, own, (x,)).detach()})


def test_directional_derivatives(layer_and_input):
    """They are the gradients' products with the direction."""
    layer, x = layer_and_input
    trained, frozen = split(layer)
    direction = {name: torch.randn_like(p) for name, p in trained.items()}
    of = gradients(layer, x)
    expected = sum((of[name].double() * direction[name].double()).sum() for name in of)
    size = sum((of[name].double() * direction[name].double()).abs().sum() for name in of)
    _, found = jvp(lambda p: loss_with(layer, {**frozen, **p}, x), (trained,), (direction,))
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(p, direction[n]) for n, p in trained.items()}
        loss = loss_with(layer, {**frozen, **duals}, x)
        again = forward_ad.unpack_dual(loss).tangent
    for derivative in (found, again):
        assert_close_to_rounding(derivative, expected, TERMS, magnitude=float(size))


def test_derivatives_of_a_layer_in_evaluation_mode(layer_and_input):
    """It usually computes with its merged copy there, which passes no derivatives."""
    layer, x = layer_and_input
    trained, frozen = split(layer)
    expected = gradients(layer, x)
    layer.eval()
    with torch.no_grad():
        assert layer.merged
        layer(x)  # makes the copy
    close(grad(lambda p: loss_with(layer, {**frozen, **p}, x))(trained), expected)
    with torch.no_grad(), forward_ad.dual_level():
        direction = {name: torch.randn_like(p) for name, p in trained.items()}
        duals = {n: forward_ad.make_dual(p, direction[n]) for n, p in trained.items()}
        tangent = forward_ad.unpack_dual(loss_with(layer, {**frozen, **duals}, x)).tangent
    parts = [(expected[n].double() * direction[n].double()).flatten() for n in expected]
    size = float(torch.cat(parts).abs().sum())
    assert_close_to_rounding(tangent, torch.cat(parts).sum(), TERMS, magnitude=size)


def test_dropout_may_differ_from_example_to_example():
    layer = built(CASES["linear"], lora_dropout=0.5)
    x = torch.ones(64, 1, 6)
    out = vmap(layer, randomness="different")(x)
    assert not torch.equal(out, out[:1].expand_as(out))
    out = vmap(layer, randomness="same")(x)
    assert torch.equal(out, out[:1].expand_as(out))


def test_is_transformed_detects_transforms_and_forward_derivatives():
    seen = []

    def note(x):
        seen.append(is_transformed())
        return x.sum()

    for call in (grad(note), vmap(note), note, lambda x: jvp(note, (x,), (x,))):
        call(torch.ones(2, 2))
    assert seen == [True, True, False, True]
    with forward_ad.dual_level():
        x = torch.ones(2)
        dual = forward_ad.make_dual(x, x)
        assert is_transformed(x, dual)
        assert not is_transformed(x)
        # Another thread's tensors have no forward derivatives.
        with ThreadPoolExecutor() as pool:
            assert not pool.submit(is_transformed, x).result()
    assert not is_transformed(x)


def test_batches_of_gradients_through_a_frozen_layer():
    """By vmap, as `torch.autograd.functional.jacobian(vectorize=True)` computes them."""
    layer, x = Linear(512, 768), torch.randn(640, 512, requires_grad=True)
    layer.weight.requires_grad_(False)
    out, grads = layer(x), torch.randn(3, 640, 768)
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
    assert_close_to_rounding(found, grads @ layer.weight, 768)


def test_vmap_over_an_attention_with_dora():
    """An attention computes with weights, which have to include DoRA's gain."""
    torch.manual_seed(0)
    attention = torch.nn.Sequential(torch.nn.MultiheadAttention(8, 2)).double()
    lora.add_lora(attention, "0", r=2, variant="dora")
    layer, x = attention[0], torch.randn(2, 5, 8, dtype=torch.double)
    for parameter in (layer.lora_B, layer.out_proj.lora_B, layer.lora_magnitude_vector):
        torch.nn.init.normal_(parameter, mean=1.0)
    expected = torch.stack([layer(each, each, each)[0] for each in x])
    torch.testing.assert_close(vmap(lambda each: layer(each, each, each)[0])(x), expected)
    trained, frozen = split(layer)

    def loss(parameters, x):
        return functional_call(layer, {**frozen, **parameters}, (x, x, x))[0].square().sum()

    named = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    found = vmap(grad(loss), (None, 0))(trained, x)
    for index, example in enumerate(x):
        gradients = torch.autograd.grad(loss(named, example), named.values())
        for name, theirs in zip(named, gradients, strict=True):
            torch.testing.assert_close(found[name][index], theirs)


def test_vmap_over_an_attention_with_dora_in_half_precision():
    attention = torch.nn.Sequential(torch.nn.MultiheadAttention(8, 2)).bfloat16()
    lora.add_lora(attention, "0", r=2, variant="dora")
    layer, x = attention[0], torch.randn(2, 5, 8, dtype=torch.bfloat16)
    expected = torch.stack([layer(each, each, each)[0] for each in x])
    found = vmap(lambda each: layer(each, each, each)[0])(x)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_a_frozen_layer_s_scaling_may_be_transformed():
    """It has no merged copy then, which would have no derivative."""
    layer = lora.Linear(4, 3, r=R).eval().requires_grad_(False)
    torch.nn.init.normal_(layer.lora_B)
    x, scalings = torch.randn(2, 4), torch.tensor([1.0, 2.0])

    def scaled(scaling):
        layer.scaling = scaling
        return layer(x)

    with torch.no_grad():
        expected = torch.stack([scaled(each) for each in scalings])
    assert_close_to_rounding(vmap(scaled)(scalings), expected, TERMS)
    _, slope = jvp(scaled, (scalings[0],), (torch.tensor(1.0),))
    largest = float(expected.abs().max())
    assert_close_to_rounding(slope, expected[1] - expected[0], TERMS, magnitude=largest)
