"""Which precision a device has, and apex, played by a stand-in: what is asked of it."""

import sys
import types
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding

import loralib as lora
from loralib.training.precision import ApexPrecision, Precision, check_precision, has_apex

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

# Six columns, an update of two, and the way back over 3 · 4 outputs.
TERMS = 6 + 2 + 12 + 6


# ---- what a device has ----


@pytest.mark.parametrize(
    ("fp16", "bf16", "device", "has_bf16", "message"),
    [
        (True, False, CPU, False, "--fp16 needs a GPU: use --bf16"),
        (True, False, GPU, False, None),
        (False, True, CPU, False, None),
        (False, True, GPU, True, None),
        (False, True, GPU, False, "--bf16 needs a GPU that has bfloat16, and a T4 has not: leave"),
        (False, False, GPU, False, None),
    ],
)
def test_half_precision_of_a_device(monkeypatch, fp16, bf16, device, has_bf16, message):
    """PyTorch has bfloat16 on every GPU, where it is emulated too."""
    supported = lambda including_emulation=True: including_emulation or has_bf16  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a T4")
    if message is None:
        check_precision(fp16, bf16, device)
        return
    with pytest.raises(ValueError, match=f"^{message}"):
        check_precision(fp16, bf16, device)


# ---- updates in float16 ----


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_says_whether_there_was_an_update(fused, max_norm):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=fused)
    precision = Precision(torch.float16, "cpu")
    for factor in (1.0, float("inf"), 1.0):
        before = weight.detach().clone()
        precision.backward((weight * factor).sum())
        updated = precision.step(optimizer, [weight], max_norm)
        optimizer.zero_grad()
        assert updated == (not torch.equal(weight, before)) == (factor == 1.0)


# ---- apex ----


@pytest.fixture
def amp(monkeypatch):
    """``apex.amp`` at O1: products give float16, unless casts are disabled."""
    casts = {"on": False}
    linear = F.linear

    def half_linear(x, weight, bias=None):
        out = linear(x, weight, bias)
        return out.half() if casts["on"] else out

    @contextmanager
    def disable_casts():
        before, casts["on"] = casts["on"], False
        yield
        casts["on"] = before

    @contextmanager
    def scale_loss(loss, optimizer):
        yield loss * 8
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad /= 8

    def initialize(model, optimizer, opt_level):
        assert opt_level == "O1"
        casts["on"] = True
        monkeypatch.setattr(F, "linear", half_linear)

    amp = types.SimpleNamespace(
        initialize=initialize,
        disable_casts=disable_casts,
        scale_loss=scale_loss,
        master_params=lambda optimizer: (p for g in optimizer.param_groups for p in g["params"]),
    )
    apex = types.ModuleType("apex")
    apex.amp = amp
    monkeypatch.setitem(sys.modules, "apex", apex)
    # There may be no GPU: its autocast then does nothing, with a warning.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: disable_casts())
    return amp


def make_layer():
    torch.manual_seed(0)
    layer = lora.Linear(6, 4, r=2)
    torch.nn.init.normal_(layer.lora_B)
    return layer


def test_an_apex_without_amp_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    assert not has_apex()


def test_a_step_under_apex_is_the_plain_step(amp):
    assert has_apex()
    plain, layer, x = make_layer(), make_layer(), torch.randn(3, 6)
    plain(x).square().mean().backward()
    optimizer = torch.optim.SGD([layer.lora_A, layer.lora_B], lr=0.1)
    precision = ApexPrecision(layer, optimizer)
    with pytest.raises(RuntimeError):
        layer(x)  # apex's own casts do not reach into the layer's function
    with precision.autocast():
        loss = layer(x).square().mean()
    precision.backward(loss)
    assert_close_to_rounding(layer.lora_A.grad, plain.lora_A.grad, TERMS)
    assert precision.step(optimizer, [layer.lora_A, layer.lora_B], max_norm=0.0)
    assert_close_to_rounding(layer.lora_B, plain.lora_B - 0.1 * plain.lora_B.grad, TERMS)
