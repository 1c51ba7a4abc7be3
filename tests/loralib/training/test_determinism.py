"""Tests of random generators, and of how a device is set up."""

import io
import operator
import os
import random

import numpy as np
import pytest
import torch

from loralib.training.determinism import rng_state, set_rng_state, set_seed, set_up_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def draw():
    """Draws from each generator; `gauss` and `standard_normal` store a second number for later."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(()).item(),
    )


# ---- random generators ----


def test_a_seed_gives_the_same_numbers():
    drawn = []
    for seed in (3, 3, 4):
        set_seed(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_seeds_may_exceed_32_bits():
    set_seed(2**32 + 3)
    first = draw()
    set_seed(2**32 + 3)
    assert draw() == first


@pytest.mark.parametrize("draws_before", [0, 1, 700])
def test_rng_state_can_be_loaded_from_a_file_weights_only(draws_before):
    set_seed(5)
    for _ in range(draws_before):
        draw()
    file = io.BytesIO()
    torch.save(rng_state(CPU), file)
    expected = [draw() for _ in range(3)]
    set_seed(99)
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def test_reading_rng_state_draws_nothing():
    set_seed(5)
    expected = draw()
    set_seed(5)
    rng_state(CPU)
    assert draw() == expected


@pytest.mark.parametrize(("before", "now"), [(CPU, CPU), (GPU, GPU), (CPU, GPU), (GPU, CPU)])
def test_rng_state_of_another_device_is_a_warning(before, now, fake_gpu_rng, monkeypatch, caplog):
    monkeypatch.delenv("RANK", raising=False)
    file = io.BytesIO()
    torch.save(rng_state(before), file)
    expected = draw()
    fake_gpu_rng.append(torch.tensor([7, 7], dtype=torch.uint8))
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True), now)
    assert draw() == expected  # generators that both devices have are restored
    restored = before == now == GPU
    assert fake_gpu_rng[-1].tolist() == ([1, 2] if restored else [7, 7])
    names = {CPU: "a CPU", GPU: "a GPU"}
    assert caplog.messages == (
        []
        if before == now
        else [
            f"resumes, but not bit-exactly: the checkpoint was written on {names[before]}, and "
            f"this run computes on {names[now]}, which has other random numbers"
        ]
    )


def test_only_the_main_process_warns(fake_gpu_rng, monkeypatch, caplog):
    state = rng_state(CPU)
    for process, messages in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", process)
        set_rng_state(state, GPU)
        assert len(caplog.messages) == messages


# ---- the device ----


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_the_device_is_set_up_as_asked(device_settings, tf32, deterministic):
    device_settings.write(not tf32, not tf32, True, False)
    set_up_device(tf32=tf32, deterministic=deterministic)
    device_settings.expect(tf32, deterministic)
    workspace = ":4096:8" if deterministic else None
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
    # PyTorch's other settings for it agree.
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == tf32
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") == tf32


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("", "tf32"),
        ("", "bf16"),
        ("cudnn", "tf32"),
        ("cudnn.conv", "tf32"),
        ("cuda.matmul", "tf32"),
        ("mkldnn.matmul", "bf16"),
        ("mkldnn.conv", "bf16"),
        ("mkldnn.rnn", "bf16"),
    ],
)
def test_float32_is_float32_whatever_was_set(device_settings, place, value, tf32):
    backends = torch.backends
    operator.attrgetter(f"{place}.fp32_precision".lstrip("."))(
        backends
    )  # fails if PyTorch has no such setting
    target = operator.attrgetter(place)(backends) if place else backends
    target.fp32_precision = value
    set_up_device(tf32=tf32)
    device_settings.expect(tf32)  # PyTorch raises if its two settings contradict each other
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    on_gpu = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    assert {kind.fp32_precision == "tf32" for kind in on_gpu} == {tf32}
    on_cpu = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    assert {kind.fp32_precision for kind in on_cpu} <= {"ieee", "none"}


def test_a_workspace_that_the_user_has_set_stays(device_settings, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_up_device(deterministic=True)
    set_up_device()
    device_settings.expect(tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("was_on", [True, False])
def test_new_memory_is_filled_only_in_a_users_deterministic_mode(device_settings, was_on):
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(was_on)
    set_up_device(deterministic=True)
    assert torch.utils.deterministic.fill_uninitialized_memory == was_on
    device_settings.expect(tf32=False, deterministic=True)
