"""Tests of which precision a device supports, and of updates in float16."""

import pytest
import torch
from torch import nn

from loralib.training.precision import (
    Precision,
    all_in_half,
    cast_frozen,
    check_precision,
    compute_dtype,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# ---- what a device supports ----


@pytest.mark.parametrize(
    ("fp16", "bf16", "device", "has_bf16", "message"),
    [
        (True, False, CPU, False, "fp16 needs a GPU: use bf16"),
        (True, False, GPU, False, None),
        (False, True, CPU, False, None),
        (False, True, GPU, True, None),
        (False, True, GPU, False, "bf16 needs a GPU with bfloat16, and a T4 has none: leave"),
        (False, False, GPU, False, None),
    ],
)
def test_half_precision_needs_a_device_that_supports_it(
    monkeypatch, fp16, bf16, device, has_bf16, message
):
    """By default, PyTorch counts emulated bfloat16 as supported."""
    supported = lambda including_emulation=True: including_emulation or has_bf16  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a T4")
    if message is None:
        check_precision(fp16, bf16, device)
        return
    with pytest.raises(ValueError, match=f"^{message}"):
        check_precision(fp16, bf16, device)


def test_flags_choose_the_dtype_of_products():
    found = [compute_dtype(*flags) for flags in ((True, False), (False, True), (False, False))]
    assert found == [torch.float16, torch.bfloat16, torch.float32]


def test_only_frozen_floating_weights_without_lora_are_held_in_half_precision():
    model = nn.Module()
    model.frozen, model.trained, model.lora_A = (nn.Parameter(torch.ones(2)) for _ in range(3))
    model.whole = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
    model.frozen.requires_grad = model.lora_A.requires_grad = False
    model.register_buffer("buffer", torch.ones(2))
    cast_frozen(model, torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == {
        "frozen": torch.bfloat16,
        **dict.fromkeys(("trained", "lora_A", "buffer"), torch.float32),
        "whole": torch.int32,
    }


def test_all_in_half_leaves_integers_as_they_are():
    model = nn.Linear(2, 2)
    model.register_buffer("ids", torch.arange(3))
    with all_in_half(model):
        assert (model.weight.dtype, model.ids.dtype) == (torch.float16, torch.int64)
    assert (model.weight.dtype, model.ids.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_computes_products_in_the_dtype(dtype):
    ones = torch.ones(2, 2)
    with Precision(dtype, "cpu").autocast():
        assert (ones @ ones).dtype == dtype


# ---- updates in float16 ----


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_returns_whether_there_was_an_update(fused, max_norm):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=fused)
    precision = Precision(torch.float16, "cpu")
    for factor in (1.0, float("inf"), 1.0):
        before = weight.detach().clone()
        precision.backward((weight * factor).sum())
        updated = precision.step(optimizer, max_norm)
        optimizer.zero_grad()
        assert updated == (not torch.equal(weight, before)) == (factor == 1.0)


def test_a_resumed_scaler_has_the_same_scale():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    first, second = (Precision(torch.float16, "cpu") for _ in range(2))
    first.backward((weight * float("inf")).sum())
    first.step(optimizer, 0.0)
    assert first.scaler.get_scale() == second.scaler.get_scale() / 2
    second.load_state_dict(first.state_dict())
    assert second.scaler.get_scale() == first.scaler.get_scale()
