"""Tests of the initializations of A and B: formulas, initial outputs, and unchanged weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from layer_cases import close_in_half
from torch import nn

import loralib as lora
from loralib.initialization import INITIALIZATIONS, from_weight, orthogonal

FROM_WEIGHT = ("pissa", "olora")
OTHERS = ("orthogonal", *FROM_WEIGHT)
BUILD = {
    "linear": lambda **more: lora.Linear(12, 8, r=4, lora_alpha=6, **more),
    "slices": lambda **more: lora.MergedLinear(
        12, 24, r=4, lora_alpha=6, enable_lora=[True, False, True], **more
    ),
    "fan_in_fan_out": lambda **more: lora.Linear(
        12, 8, r=4, lora_alpha=6, fan_in_fan_out=True, **more
    ),
    "embedding": lambda **more: lora.Embedding(12, 8, r=4, lora_alpha=6, **more),
    "convolution": lambda **more: lora.Conv2d(4, 6, 3, r=2, lora_alpha=3, **more),
}
INPUTS = {
    "embedding": torch.arange(12).view(3, 4),
    "convolution": torch.linspace(-1, 1, 2 * 4 * 25).sin().view(2, 4, 5, 5),
}
X = torch.linspace(-3, 3, 60).sin().view(5, 12)


def base_result(layer, x):
    state = {n: p for n, p in layer.state_dict().items() if "lora_" not in n}
    if isinstance(layer, lora.Conv2d):
        return layer.conv(x)
    if isinstance(layer, nn.Embedding):
        return F.embedding(x, state["weight"])
    weight = state["weight"].T if layer.fan_in_fan_out else state["weight"]
    return F.linear(x, weight, state["bias"])


# A convolution with the factors of 0.1.2 cannot have DoRA.
BUILT = [
    (kind, variant)
    for kind in BUILD
    for variant in ("lora", "rslora", "dora")
    if (kind, variant) != ("convolution", "dora")
]


def adapted(layer):
    lora.add_lora(nn.Sequential(layer), "0", r=2)
    return layer


AT_RANDOM = {
    **{kind: build for kind, build in BUILD.items() if kind != "embedding"},
    "linear in place": lambda: adapted(nn.Linear(12, 8)),
    "convolution in place": lambda: adapted(nn.Conv2d(4, 6, 3)),
    "groups in place": lambda: adapted(nn.Conv2d(4, 6, (3, 2), groups=2)),
    "attention in place": lambda: adapted(nn.MultiheadAttention(12, 2)),
}


@pytest.mark.parametrize("kind", AT_RANDOM)
def test_the_default_initializes_A_as_a_plain_layer_s_weight(kind):
    layer = AT_RANDOM[kind]()
    torch.manual_seed(0)
    layer.reset_lora_parameters()
    torch.manual_seed(0)
    expected = nn.init.kaiming_uniform_(torch.empty_like(layer.lora_A), a=math.sqrt(5))
    assert torch.equal(layer.lora_A, expected)
    assert not layer.lora_B.any()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("kind", "variant"), BUILT)
def test_the_initial_outputs_are_the_base_s(kind, name, variant):
    layer = BUILD[kind](initialization=name, variant=variant)
    x = INPUTS.get(kind, X)
    for mode in (True, False):
        torch.testing.assert_close(layer.train(mode)(x), base_result(layer, x))
    assert layer.lora_A.any()
    assert layer.lora_B.any()


@pytest.mark.parametrize("name", FROM_WEIGHT)
@pytest.mark.parametrize("kind", BUILD)
def test_the_initial_product_is_subtracted_and_the_weight_is_bit_exact(kind, name):
    layer = BUILD[kind](initialization=name)
    weight = layer.frozen_weight.detach().clone()
    with torch.no_grad():
        layer.lora_A.mul_(1.5)
    x = INPUTS.get(kind, X)
    trained = layer.train()(x)
    assert not torch.allclose(trained, base_result(layer, x))
    torch.testing.assert_close(layer.eval()(x), trained)
    torch.testing.assert_close(lora.merge(layer)(x), trained)
    assert torch.equal(layer.frozen_weight, weight)
    layer.half().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which refuses to concatenate float16
        low = layer(x.half() if x.is_floating_point() else x)
    close_in_half(low.float(), trained, atol=0.1, rtol=0.05)


def test_pissa_takes_the_largest_singular_values():
    layer = lora.Linear(12, 8, r=3, lora_alpha=6, initialization="pissa")
    left = nn.init.orthogonal_(torch.empty(8, 8))
    right = nn.init.orthogonal_(torch.empty(8, 12))
    values = torch.arange(8.0, 0.0, -1.0)  # clearly different
    layer.weight.data = left * values @ right
    layer.start_from_weight()
    product = layer.scaling * layer.lora_B @ layer.lora_A
    largest = left[:, :3] * values[:3] @ right[:3]
    torch.testing.assert_close(product, largest, atol=1e-4, rtol=0)
    # Half of each singular value is in each factor.
    norms = layer.lora_A.norm(dim=1), layer.lora_B.norm(dim=0)
    torch.testing.assert_close(*norms)


def test_olora_takes_an_orthonormal_basis():
    layer = lora.Linear(12, 8, r=3, lora_alpha=6, initialization="olora")
    torch.testing.assert_close(layer.lora_B.T @ layer.lora_B, torch.eye(3))
    weight = layer.weight
    # The first columns of W lie in the span of Q's.
    projected = layer.lora_B @ layer.lora_A
    torch.testing.assert_close(projected[:, :3], weight[:, :3])


def test_orthogonal_factors_have_a_product_of_zero():
    layer = BUILD["slices"](initialization="orthogonal")
    for A, B in zip(layer.lora_A.split(4), layer.lora_B.split(8), strict=True):
        torch.testing.assert_close(B @ A, torch.zeros(8, 12))
        assert torch.linalg.matrix_rank(A) == 2
        assert torch.linalg.matrix_rank(B) == 2


def test_orthogonal_factors_in_channels_last_have_a_product_of_zero():
    model = nn.Sequential(nn.Conv2d(4, 6, 3))
    lora.add_lora(model, ["0"], r=2, initialization="orthogonal")
    (layer,) = model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        layer.lora_B.fill_(1)
    layer.reset_lora_parameters()
    product = layer.lora_B.flatten(1) @ layer.lora_A.flatten(1)
    torch.testing.assert_close(product, torch.zeros(6, 36))
    assert torch.linalg.matrix_rank(layer.lora_B.flatten(1)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonal_factors_are_exact_in_their_dtype(dtype):
    layer = lora.Linear(12, 8, r=4, initialization="orthogonal", dtype=dtype)
    assert layer.lora_A.dtype == dtype
    # Each element of the product is a sum of r terms, rounded in this dtype.
    largest = layer.lora_B.norm(dim=1).max() * layer.lora_A.norm(dim=0).max()
    assert (layer.lora_B @ layer.lora_A).abs().max() <= 64 * torch.finfo(dtype).eps * largest


class OnApplesGpu(torch.Tensor):
    """A tensor of the CPU that reports a device for which PyTorch has no decompositions."""

    device = property(lambda self: torch.device("mps", 0))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.linalg.qr, torch.linalg.svd):
            raise NotImplementedError(f"{func} is not implemented for mps")
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else out


@pytest.mark.parametrize("name", FROM_WEIGHT)
def test_a_weight_on_apple_s_gpu_is_decomposed_on_the_cpu(name):
    weight = torch.randn(8, 12)
    ours = from_weight(name, weight.as_subclass(OnApplesGpu), 3, 2.0)
    for one, other in zip(ours, from_weight(name, weight, 3, 2.0), strict=True):
        assert torch.equal(one, other)


def test_orthogonal_factors_on_apple_s_gpu_have_a_product_of_zero():
    A, B = torch.zeros(4, 12), torch.zeros(8, 4)
    with torch.no_grad():
        orthogonal(A.as_subclass(OnApplesGpu), B.as_subclass(OnApplesGpu))
    torch.testing.assert_close(B @ A, torch.zeros(8, 12))
    assert torch.linalg.matrix_rank(A) == torch.linalg.matrix_rank(B) == 2


@pytest.mark.parametrize("name", FROM_WEIGHT)
def test_start_from_weight_uses_a_weight_loaded_later(name):
    layer = lora.Linear(12, 8, r=2, initialization=name)
    layer.load_state_dict({"weight": torch.randn(8, 12)}, strict=False)
    layer.start_from_weight()
    with torch.no_grad():
        expected = lora.Linear(12, 8, r=2, initialization=name)
        expected.weight.copy_(layer.weight)
        expected.start_from_weight()
    assert torch.equal(layer.lora_A, expected.lora_A)
    torch.testing.assert_close(layer(X), F.linear(X, layer.weight, layer.bias))


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match=r"unknown initialization 'eva' of LoRA \(known: default"):
        lora.Linear(4, 4, r=2, initialization="eva")
    with pytest.raises(ValueError, match="r has to be even for the orthogonal initialization"):
        lora.Linear(4, 4, r=3, initialization="orthogonal")
    with pytest.raises(ValueError, match="freeze_A would freeze an embedding's A at zero"):
        lora.Embedding(4, 4, r=2, freeze_A=True)
    assert set(INITIALIZATIONS) == {"default", *OTHERS}


# ---- LoRA-FA ----


def test_with_A_frozen_only_B_is_trained_and_the_input_is_not_saved():
    layer = lora.Linear(12, 8, r=2, freeze_A=True)
    lora.mark_only_lora_as_trainable(layer)
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["lora_B"]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        x = torch.randn(5, 12, requires_grad=True)
        out = layer(x)
    assert torch.Size([5, 12]) not in saved
    reference = lora.Linear(12, 8, r=2)
    reference.load_state_dict(layer.state_dict())
    out.sum().backward()
    grad = x.grad.clone()
    x.grad = None
    reference(x).sum().backward()
    assert torch.equal(layer.lora_B.grad, reference.lora_B.grad)
    assert torch.equal(grad, x.grad)
    assert layer.lora_A.grad is None
    assert reference.lora_A.grad is not None


def test_with_A_frozen_second_derivatives_are_an_error():
    layer = lora.Linear(12, 8, r=2, freeze_A=True)
    x = torch.randn(5, 12, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives cannot be computed"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_with_A_frozen_B_alone_has_second_derivatives(dropout):
    layer = lora.Linear(12, 3, r=2, freeze_A=True, lora_dropout=dropout).double()

    def output(B):
        torch.manual_seed(0)
        return torch.func.functional_call(layer, {"lora_B": B}, torch.tanh(X.double())).tanh()

    B = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(output, B)


def test_with_A_and_B_frozen_the_input_has_second_derivatives():
    layer = lora.Linear(12, 8, r=2).double()
    nn.init.normal_(layer.lora_B)
    model = nn.Sequential(nn.Tanh(), layer.requires_grad_(False), nn.Tanh())
    assert torch.autograd.gradgradcheck(model, X.double().requires_grad_())


@pytest.mark.parametrize("name", FROM_WEIGHT)
def test_a_weight_that_is_too_small_for_the_rank_is_refused(name):
    with pytest.raises(
        ValueError, match=rf"\(6, 4\) is too small for rank 5 .* {name}: choose a smaller"
    ):
        lora.Linear(4, 6, r=5, initialization=name)


@pytest.mark.parametrize("alpha", [0, -1])
def test_pissa_needs_an_alpha_above_zero(alpha):
    with pytest.raises(ValueError, match="lora_alpha has to be above 0 for the initialization pi"):
        lora.Linear(4, 6, r=2, lora_alpha=alpha, initialization="pissa")
