"""Tests of AdamW against its formula, one number at a time, and of its state."""

import io
import math
import re

import pytest
import torch
from simulated_gpu import SimulatedGpu
from torch import nn

from loralib.training.optimizer import AdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference(
    p: float,
    gradients: list[float],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    correct_bias: bool,
) -> float:
    """The formula for one number."""
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        c = math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) if correct_bias else 1
        p -= lr * c * m / (math.sqrt(v) + eps)
        p -= lr * weight_decay * p
    return p


def tensors(*shapes: tuple[int, ...], dtype=torch.float64, device="cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_follows_the_formula(correct_bias, weight_decay, device):
    settings = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 0.1, "weight_decay": weight_decay}
    settings["correct_bias"] = correct_bias
    parameters = tensors((3,), (2, 2), device=device)
    before = torch.cat([p.detach().flatten() for p in parameters]).tolist()
    optimizer, history = AdamW(parameters, **settings), []
    for step in range(7):
        set_gradients(parameters, step)
        history.append(torch.cat([p.grad.flatten() for p in parameters]).tolist())
        optimizer.step()
    after = torch.cat([p.detach().flatten() for p in parameters]).tolist()
    expected = [
        reference(p, list(gradients), **settings)
        for p, gradients in zip(before, zip(*history, strict=True), strict=True)
    ]
    assert after == pytest.approx(expected, rel=1e-12)


def test_defaults_are_those_of_transformers_4_4_2():
    (group,) = AdamW(tensors((2,))).param_groups
    names = ("lr", "betas", "eps", "weight_decay", "correct_bias")
    assert [group[name] for name in names] == [1e-3, (0.9, 0.999), 1e-6, 0.0, True]


def test_without_eps_and_decay_it_is_torchs():
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 0.0, "weight_decay": 0.0}
    ours, theirs = tensors((4, 3)), tensors((4, 3))
    optimizers = AdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)
    for step in range(5):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(parameters, step)
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=0)


def test_a_tensor_without_a_gradient_is_not_updated_nor_its_step_counted():
    first, second, alone = tensors((2,), (2,), (2,))
    groups = [{"params": [first, second]}, {"params": [alone]}]
    optimizer = AdamW(groups, lr=0.1, eps=1e-6, weight_decay=0.01)
    unchanged = second.detach().clone()
    set_gradients([first], 0)
    optimizer.step()
    assert torch.equal(second, unchanged)
    assert list(optimizer.state) == [first]
    set_gradients([first, second], 1)
    gradients, before = second.grad.tolist(), second.tolist()
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in (first, second)] == [2, 1]
    expected = [
        reference(p, [g], 0.1, (0.9, 0.999), 1e-6, 0.01, True)
        for p, g in zip(before, gradients, strict=True)
    ]
    assert second.tolist() == pytest.approx(expected, rel=1e-12)


def test_training_resumes_bit_exactly_from_a_file():
    def trained(steps: range, parameters, optimizer) -> None:
        for step in steps:
            set_gradients(parameters, step)
            optimizer.step()

    whole = tensors((3,), (2, 2), dtype=torch.float32)
    optimizer = AdamW(whole, lr=0.1)
    trained(range(3), whole, optimizer)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [p.detach() for p in whole]), file)
    trained(range(3, 6), whole, optimizer)

    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    resumed = [nn.Parameter(value) for value in values]
    other = AdamW(resumed, lr=7.0)
    other.load_state_dict(state)
    trained(range(3, 6), resumed, other)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_closure_is_run_with_gradients():
    (p,) = tensors((2,))
    optimizer = AdamW([p], lr=0.1)

    def loss():
        optimizer.zero_grad()
        value = (p**2).sum()
        value.backward()
        return value

    first, second = optimizer.step(loss).item(), optimizer.step(loss).item()
    assert second < first


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_scaler_skips_steps_with_an_overflow(device):
    ours, plain = tensors((3,), device=device), tensors((3,), device=device)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaled, unscaled = AdamW(ours, lr=0.1), AdamW(plain, lr=0.1)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(plain, step)
        ours[0].grad *= 8.0
        if step == 1:
            ours[0].grad[0] = math.inf
        else:
            unscaled.step()
        scaler.scale(torch.zeros((), device=device))
        scaler.step(scaled)
        scaler.update(8.0)
    assert scaled.state[ours[0]]["step"] == 2
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-12, atol=0)


def test_the_number_of_launches_does_not_depend_on_the_number_of_tensors():
    counts = []
    for number in (2, 30):
        params = tensors(*[(3, 2)] * number)
        with SimulatedGpu() as gpu:
            ours = [nn.Parameter(p.detach().to("cuda:0")) for p in params]
            for p in ours:
                p.grad = torch.ones_like(p)
            optimizer = AdamW(ours, weight_decay=0.1)
            optimizer.step()
            gpu.waits.clear()
            gpu.launches.clear()
            optimizer.step()
            counts.append(gpu.launches.total())
            assert gpu.waits == []
    assert counts == [7, 7]


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
    ],
)
def test_hyperparameters_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} ha.*{re.escape(str(value))}$"):
        AdamW(tensors((1,)), **{name: value})


def test_another_optimizers_state_is_refused():
    parameters = tensors((2,), (3,))
    set_gradients(parameters, 0)
    other = torch.optim.AdamW(parameters)
    other.step()
    before = [p.detach().clone() for p in parameters]
    optimizer = AdamW(parameters)
    with pytest.raises(ValueError, match="another optimizer's"):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state
    assert all(map(torch.equal, parameters, before))
