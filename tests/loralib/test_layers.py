"""A table of LoRA layers × what is done to layers: each test runs for every kind of layer."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding, rounding
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import loralib as lora

R, ALPHA = 2, 6


@dataclass(frozen=True)
class Case:
    """A layer with an update, the plain layer it stands for, and an input of either."""

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


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def randomised(layer):
    """The layer with an update that is not zero."""
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
    """scaling · B A in the shape of the weight, put together the slow way."""
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


# Of a convolution's sum of 4 · 3³ products, with the update's of 3 · R and its R · R.
TERMS = 4 * 27 + 3 * R + R * R


def close(actual, expected, terms=TERMS):
    """Of tensors, or of tensors by name."""
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
    """To the bit, but where the plain layer holds the transposed weight: another product."""
    if getattr(layer, "fan_in_fan_out", False):
        close(actual, expected)
    else:
        assert torch.equal(actual, expected)


def bits(layer):
    return base_of(layer).weight.detach().clone()


# What is computed


def test_it_starts_as_the_plain_layer(case):
    layer, x = case.make(r=R, lora_alpha=ALPHA), case.x()
    expected = run_plain(layer, x, base_of(layer).weight)
    assert torch.equal(layer(x), expected)
    assert layer.lora_A.any() != layer.lora_B.any()


@pytest.mark.parametrize("grad", [True, False])
def test_both_modes_compute_the_update(case, grad):
    layer, x = built(case), case.x()
    with torch.set_grad_enabled(grad):
        assert not layer.merged
        close(layer(x), reference(layer, x))
        assert layer.eval() is layer
        assert layer.merged
        close(layer(x), reference(layer, x))
        layer.train()
        assert not layer.merged
        close(layer(x), reference(layer, x))


def test_without_merge_weights_evaluation_keeps_the_branch(case):
    layer, x = built(case, merge_weights=False).eval(), case.x()
    assert not layer.merged
    with torch.no_grad():
        close(layer(x), reference(layer, x))
    assert layer._merged_copy is None


@pytest.mark.parametrize("mode", [True, False])
def test_gradients_reach_the_update_and_not_the_frozen_weight(case, mode):
    layer, x = built(case).train(mode), case.x()
    if x.is_floating_point():
        x.requires_grad = True
    with torch.no_grad():
        layer(x)  # leaves a merged copy behind, which has no gradient
    actual = gradients(layer, layer(x))
    expected = gradients(layer, reference(layer, x))
    if isinstance(layer, lora.Embedding):
        expected["lora_A"][:, layer.padding_idx] = 0  # the padding row is not trained
    assert {"lora_A", "lora_B"} <= actual.keys()
    assert not any(name.endswith("weight") for name in actual)
    close(actual, expected)


@pytest.mark.parametrize("mode", [True, False])
def test_a_weight_set_free_gets_its_gradient(case, mode):
    layer, x = built(case).train(mode), case.x()
    base_of(layer).weight.requires_grad = True
    actual = gradients(layer, layer(x))
    expected = gradients(layer, reference(layer, x))
    if isinstance(layer, lora.Embedding):
        expected["lora_A"][:, layer.padding_idx] = 0
        expected["weight"][layer.padding_idx] = 0
    close(actual, expected)


def test_a_frozen_layer_passes_gradients_on(case):
    layer, x = built(case).requires_grad_(False), case.x()
    if not x.is_floating_point():
        pytest.skip("row numbers have no gradient")
    x.requires_grad = True
    (expected,) = torch.autograd.grad(reference(layer, x).pow(2).sum(), x)
    for mode in (True, False):
        (actual,) = torch.autograd.grad(layer.train(mode)(x).pow(2).sum(), x)
        close(actual, expected, 2 * TERMS)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("name", ["linear-fan-in-fan-out", "merged-qv"])
def test_the_handwritten_gradients_of_both_orders(name, p):
    layer = built(CASES[name], lora_dropout=p, dtype=torch.float64).requires_grad_(True)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(x, *parameters):
        torch.manual_seed(0)
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, named, x)

    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert torch.autograd.gradgradcheck(function, (x, *parameters))


def test_rank_0_is_the_plain_layer(case):
    layer, plain, x = case.make(r=0), case.plain(), case.x()
    names = [name.removeprefix("conv.") for name in layer.state_dict()]
    assert names == list(plain.state_dict())
    assert trainable(layer).keys() == dict(layer.named_parameters()).keys()
    weight = base_of(layer).weight.detach()
    state = base_of(layer).state_dict()
    state["weight"] = weight.t() if getattr(layer, "fan_in_fan_out", False) else weight
    plain.load_state_dict(state)
    for mode in (True, False):
        same_as_plain(layer, layer.train(mode)(x), plain(x))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_acts_on_the_updates_input_only(name):
    layer, x = built(CASES[name], lora_dropout=1.0), CASES[name].x()
    close(layer(x), run_plain(layer, x, base_of(layer).weight))  # the update's input is all zero
    layer.eval()
    close(layer(x), reference(layer, x))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_keeps_the_mean(name):
    layer, x = built(CASES[name], lora_dropout=0.5), CASES[name].x()[:1]
    with torch.no_grad():
        outs = torch.stack([layer(x) for _ in range(500)])
        error = outs.std(dim=0) / len(outs) ** 0.5
        assert ((outs.mean(dim=0) - reference(layer, x)).abs() < 5 * error + 1e-4).all()


# The frozen weight, and what is saved


def test_the_frozen_weight_keeps_its_bits(case, tmp_path):
    layer, x = built(case), case.x()
    before = bits(layer)
    optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.1)
    for _ in range(3):
        layer.train()
        layer(x).sum().backward()
        optimizer.step()
        layer.eval()
        with torch.no_grad():
            layer(x)
        torch.save(layer.state_dict(), tmp_path / "state.pt")
        layer.to("cpu").to(torch.float32)
        layer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        layer = copy.deepcopy(layer)
        layer(x)
        optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.1)
    assert torch.equal(bits(layer), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_weight_keeps_its_bits_through_a_wider_dtype(case, dtype):
    layer, x = built(case).to(dtype), case.x()
    before = bits(layer)
    for _ in range(3):
        layer.float().eval()
        with torch.no_grad():
            layer(x)
        layer.train().to(dtype)
    assert torch.equal(bits(layer), before)


@pytest.mark.parametrize("saved_in", [True, False])
@pytest.mark.parametrize("loaded_in", [True, False])
def test_states_are_the_same_in_both_modes(case, saved_in, loaded_in):
    layer, other, x = built(case), built(case), case.x()
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        expected = layer(x)
        layer.train(saved_in)(x)
        other.train(loaded_in)(x)
        torch.testing.assert_close(layer.state_dict(), state, atol=0, rtol=0)
        other.load_state_dict(layer.state_dict(), strict=True)
        for mode in (loaded_in, True, False):
            close(other.train(mode)(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_is_whole_and_its_own(case, copied):
    layer, x = built(case).eval(), case.x()
    with torch.no_grad():
        expected = layer(x)
        other = copied(layer)
        assert other._merged_copy is None
        close(other(x), expected)
        randomised(other)
        close(other(x), reference(other, x))
        close(layer(x), expected)


# The merged copy is never stale


def step(**kwargs):
    def change(layer):
        layer.lora_A.grad = torch.ones_like(layer.lora_A)
        torch.optim.AdamW([layer.lora_A], lr=0.3, **kwargs).step()

    return change


def assign_data(layer):
    layer.lora_B.data = layer.lora_B.data + 1


def assign_parameter(layer):
    layer.lora_B = nn.Parameter(layer.lora_B.detach() + 1)


def load(layer, assign=False):
    state = {name: value * 1.5 for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


CHANGES = {
    "step": step(foreach=False),
    "foreach-step": step(foreach=True),
    "load": load,
    "load-assign": lambda layer: load(layer, assign=True),
    "assign-data": assign_data,
    "assign-parameter": assign_parameter,
    "base-in-place": lambda layer: base_of(layer).weight.detach().mul_(2),
    "base-data-then-eval": lambda layer: (base_of(layer).weight.data.mul_(2), layer.eval()),
    "cast": lambda layer: layer.bfloat16().float(),
    "cast-part": lambda layer: base_of(layer).bfloat16().float(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_merged_copy_follows_every_change(case, change, mode):
    layer, x = built(case).eval(), case.x()
    with mode():
        before = layer(x)
        made = layer._merged_copy
        layer(x)
        assert layer._merged_copy is made  # it is made once
    change(layer)
    with mode():
        assert not torch.allclose(layer(x), before, atol=1e-4)
        close(layer(x), reference(layer, x))


def test_a_fused_step_after_a_backward_in_evaluation_mode_is_seen(case):
    layer, x = built(case).eval(), case.x()
    optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.3, fused=True)
    for _ in range(2):
        with torch.no_grad():
            close(layer(x), reference(layer, x))
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        close(layer(x), reference(layer, x))


def test_the_scaling_can_be_changed(case):
    layer, x = built(case).eval(), case.x()
    with torch.no_grad():
        layer(x)
        layer.scaling = 0
        close(layer(x), run_plain(layer, x, base_of(layer).weight))


def test_a_layer_made_in_inference_mode_computes(case):
    with torch.inference_mode():
        layer, x = built(case).eval(), case.x()
        close(layer(x), reference(layer, x))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_copy_made_in_inference_mode_serves_autograd(name):
    layer, x = built(CASES[name]).requires_grad_(False).eval(), CASES[name].x()
    with torch.inference_mode():
        layer(x)
    made = layer._merged_copy
    x.requires_grad = True
    layer(x).sum().backward()
    assert layer._merged_copy is made
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("leave", [lambda layer: layer.train(), lambda layer: layer.half()])
def test_the_merged_copy_is_dropped(case, leave):
    layer = built(case).eval()
    with torch.no_grad():
        layer(case.x())
    assert layer._merged_copy is not None
    leave(layer)
    assert layer._merged_copy is None


# Precisions


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_in_half_precision(case, mode, dtype):
    layer, x = built(case).to(dtype).train(mode), case.x()
    wide = copy.deepcopy(layer).float()
    x = x.to(dtype) if x.is_floating_point() else x
    out = layer(x)
    assert out.dtype == dtype
    expected = reference(wide, x.float() if x.is_floating_point() else x)
    close_in_half(out.float(), expected, atol=0.2, rtol=0.05)
    assert all(grad.dtype == dtype for grad in gradients(layer, out).values())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_frozen_weights_in_half_precision_beside_trainable_ones_in_float32(case, mode, grad):
    layer, x = built(case).train(mode), case.x()
    base_of(layer).weight.data = base_of(layer).weight.data.bfloat16()
    wide = copy.deepcopy(layer).float()
    x = x.bfloat16() if x.is_floating_point() else x
    with torch.set_grad_enabled(grad):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    expected = reference(wide, x.float() if x.is_floating_point() else x)
    close_in_half(out.float(), expected.detach(), atol=0.2, rtol=0.05)
    if grad:
        actual = gradients(layer, out)
        assert {grad.dtype for grad in actual.values()} == {torch.float32}
        expected = gradients(wide, expected)
        if isinstance(layer, lora.Embedding):
            expected["lora_A"][:, layer.padding_idx] = 0
        close_in_half(actual, expected, atol=0.3, rtol=0.05)


def test_the_bits_of_a_merged_half_precision_weight_come_from_one_rounding(case):
    layer = built(case)
    base_of(layer).weight.data = base_of(layer).weight.data.bfloat16()
    weight = base_of(lora.merge(layer)).weight
    exact = base_of(layer).weight.double() + update(layer.double()).detach()
    if getattr(layer, "fan_in_fan_out", False):
        exact = exact.t()
    assert weight.dtype == torch.bfloat16
    close_in_half(weight.double(), exact, atol=rounding(exact, R), rtol=2**-8)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_autocast(case, mode, grad):
    layer, plain, x = built(case).train(mode), case.plain(), case.x()
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        assert out.dtype == plain(x).dtype
    close_in_half(out.detach().float(), reference(layer, x).detach(), atol=0.2, rtol=0.05)
    if grad:
        assert {grad.dtype for grad in gradients(layer, out).values()} == {torch.float32}


@pytest.mark.parametrize("mode", [True, False])
def test_autocast_leaves_float64_alone(case, mode):
    layer, x = built(case).double().train(mode), case.x()
    x = x.double() if x.is_floating_point() else x
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        out = layer(x)
    assert out.dtype == torch.float64
    close(out, reference(layer, x).detach())


# torch.compile


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "grad"), [(True, True), (False, False)])
@pytest.mark.parametrize("name", ["linear", "merged-qv", "embedding", "conv2d", "conv3d"])
def test_compiled_whole(name, mode, grad):
    torch.compiler.reset()
    layer, x = built(CASES[name]).train(mode), CASES[name].x()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        out = compiled(x)
        close(out, reference(layer, x))
    if grad:
        close(gradients(layer, out), gradients(layer, layer(x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "merged-qv", "conv2d"])
def test_compiled_under_autocast_with_dropout(name):
    torch.compiler.reset()
    layer, x = built(CASES[name], lora_dropout=0.5), CASES[name].x()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(x)
        assert not torch.equal(out, compiled(x))
    assert {grad.dtype for grad in gradients(layer, out).values()} == {torch.float32}


# merge


def test_merge_of_a_layer_gives_its_plain_counterpart(case):
    layer, plain, x = built(case), case.plain(), case.x()
    before = bits(layer)
    folded = lora.merge(layer.eval())
    assert type(folded) is type(plain)
    assert repr(folded) == repr(plain)
    assert folded.training is False
    plain.load_state_dict(folded.state_dict(), strict=True)
    close(plain(x), reference(layer, x))
    assert torch.equal(bits(layer), before)
    assert folded.weight.is_contiguous()
    assert folded.weight.requires_grad is False


def test_merge_of_rank_0_shares_the_weights(case):
    layer, x = case.make(r=0), case.x()
    folded = lora.merge(layer)
    assert type(folded) is type(case.plain())
    same_as_plain(layer, layer(x), folded(x))
    assert folded.weight.data_ptr() == base_of(layer).weight.data_ptr() or layer.fan_in_fan_out


# Construction


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_update_is_made_where_and_like_the_weight(case, device):
    layer = case.make(r=R, device=device, dtype=torch.float64)
    made = {(p.device.type, p.dtype) for p in layer.parameters()}
    assert made == {(device, torch.float64)}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_keywords_reach_the_plain_layer(name):
    layer = built(CASES[name], bias=False)
    assert base_of(layer).bias is None
    x = CASES[name].x()
    close(layer(x), reference(layer, x))
    close(lora.merge(layer)(x), reference(layer, x))


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("make", "fan_in"),
    [
        (lambda: lora.Linear(100, 300, r=50), 100),
        (lambda: lora.Linear(100, 300, r=50, fan_in_fan_out=True), 100),
        (lambda: lora.MergedLinear(100, 300, r=30, enable_lora=[True, False, True]), 100),
        (lambda: lora.Conv2d(20, 40, 3, r=20), 180),
    ],
)
def test_initial_distributions(make, fan_in, reset):
    layer = make()
    if reset:
        randomised(layer).reset_parameters()
    # Kaiming uniform with a = √5 is U(-1/√fan_in, 1/√fan_in).
    for tensor, fan in ((base_of(layer).weight, fan_in), (layer.lora_A, layer.lora_A.shape[1])):
        bound = fan**-0.5
        assert 0.99 * bound < tensor.abs().max() <= bound
        assert tensor.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
        assert abs(tensor.mean()) < 0.05 * bound
    assert not layer.lora_B.any()


@pytest.mark.parametrize("reset", [False, True])
def test_initial_distributions_of_an_embedding(reset):
    layer = lora.Embedding(200, 100, r=50, padding_idx=3)
    if reset:
        randomised(layer).reset_parameters()
    for tensor in (layer.weight[4:], layer.lora_B):
        assert tensor.std().item() == pytest.approx(1.0, rel=0.03)
        assert abs(tensor.mean()) < 0.05
    assert not layer.lora_A.any()
    assert not layer.weight[3].any()


def test_an_embedding_keeps_a_weight_it_is_given():
    weight = torch.randn(9, 4)
    assert torch.equal(lora.Embedding(9, 4, r=R, _weight=weight).weight, weight)
    assert torch.equal(lora.Embedding.from_pretrained(weight).weight, weight)


def test_gradients_of_an_embedding_may_be_sparse_or_scaled():
    ids = torch.tensor([[2, 2, 5]])
    layer = randomised(lora.Embedding(9, 4, r=R, lora_alpha=ALPHA, scale_grad_by_freq=True))
    scaled = gradients(layer, layer(ids))["lora_A"]
    layer.scale_grad_by_freq, layer.sparse = False, True
    close(gradients(layer, layer(ids))["lora_A"][:, 2], 2 * scaled[:, 2])
    layer.weight.requires_grad = True
    assert gradients(layer, layer(ids))["weight"].is_sparse


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "message"),
    [
        ("Linear", (4, 6), {"r": -1}, "got -1"),
        ("Linear", (4, 6), {"r": 1.5}, "got 1.5"),
        ("Linear", (4, 6), {"r": "8"}, "got '8'"),
        ("Linear", (4, 6), {"r": True}, "got True"),
        ("Linear", (4, 6), {"r": 1, "lora_dropout": 1.5}, "between 0 and 1, but got 1.5"),
        ("Linear", (4, 6), {"r": 1, "lora_dropout": -0.1}, "between 0 and 1, but got -0.1"),
        ("Embedding", (4, 6), {"r": -2}, "got -2"),
        ("Embedding", (4, 6), {"r": 1, "max_norm": 2.0}, "max_norm=2.0"),
        ("MergedLinear", (4, 6), {"r": -3, "enable_lora": [True]}, "got -3"),
        ("MergedLinear", (4, 6), {"r": 1}, r"no slice for r=1, got \(False,\)"),
        ("MergedLinear", (4, 6), {"r": 1, "enable_lora": [False, False]}, "no slice for r=1"),
        ("MergedLinear", (4, 6), {"enable_lora": [True] * 4}, "out_features=6 .* got 4"),
        ("MergedLinear", (4, 6), {"enable_lora": []}, "out_features=6 .* got 0"),
        ("Conv1d", (4, 6, 3), {"r": -1}, "got -1"),
        ("Conv2d", (4, 6, (3, 3)), {"r": 1}, r"kernel_size must be an integer, got \(3, 3\)"),
        ("Conv3d", (4, 6, 3), {"r": 1, "lora_dropout": 2}, "but got 2"),
    ],
)
def test_bad_arguments_are_named_in_one_line(kind, args, kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        getattr(lora, kind)(*args, **kwargs)
    assert "\n" not in str(error.value)


# What it costs


class NewTensors(TorchDispatchMode):
    """Records the sizes of the tensors whose memory the operations inside allocate."""

    def __init__(self):
        super().__init__()
        self.seen, self.kept, self.sizes = set(), [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen |= {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.seen:
                    self.sizes.append(storage.nbytes() // tensor.element_size())
                    self.kept.append(tensor)  # so that no address is used twice
                self.seen.add(storage.data_ptr())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: lora.Linear(60, 210, r=R),
        lambda: lora.Linear(60, 210, r=R, fan_in_fan_out=True),
        lambda: lora.MergedLinear(60, 210, r=R, enable_lora=[True, False, True]),
    ],
)
def test_a_step_allocates_its_output_its_gradient_and_small_things(make, dtype):
    layer, rows = randomised(make()), 300
    layer.weight.data = layer.weight.data.to(dtype)
    x = torch.randn(rows, 60, dtype=dtype, requires_grad=True)
    with NewTensors() as forward:
        out = layer(x)
    weights = torch.randn_like(out)
    with NewTensors() as backward:
        torch.autograd.grad(out, [x, layer.lora_A, layer.lora_B], weights)
    small = rows * 2 * R  # A x
    assert [size for size in forward.sizes if size > small] == [rows * 210]
    assert [size for size in backward.sizes if size > small] == [rows * 60]


@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_take_inputs_of_any_shape(name, shape):
    layer, x = built(CASES[name]), torch.randn(shape)
    assert layer(x).shape == (*shape[:-1], 12)
    close(layer(x), reference(layer, x))
    x = torch.randn(6, 4, 3).permute(2, 1, 0)
    close(layer(x), reference(layer, x))


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", LINEAR)
def test_an_input_of_another_size_is_refused(name, mode):
    layer = built(CASES[name]).train(mode)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(6, 2))  # as many numbers as two rows have
