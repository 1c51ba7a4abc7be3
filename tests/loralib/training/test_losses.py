"""Tests of losses that stay on the device until they are read."""

import math
import weakref

import pytest
import torch
from simulated_gpu import SimulatedGpu

from loralib.training.losses import PendingLosses


def add(losses, values, device="cpu", start=1):
    for step, value in enumerate(values, start=start):
        losses.add(step, torch.full((), value, device=device, requires_grad=True))


def test_on_a_cpu_every_loss_is_due_at_once():
    losses = PendingLosses()
    assert (losses.are_due, losses.read()) == (False, [])
    assert math.isnan(losses.last)
    add(losses, [0.5])
    assert losses.are_due
    assert losses.read() == [(1, 0.5)]
    assert (losses.last, losses.are_due, losses.read()) == (0.5, False, [])
    assert losses.last == 0.5


def test_on_a_gpu_all_losses_are_read_with_one_wait():
    with SimulatedGpu() as gpu:
        losses = PendingLosses()
        add(losses, [0.5, math.inf, 2.0], "cuda:0", start=7)
        assert (losses.are_due, gpu.waits) == (False, [])
        assert losses.read() == [(7, 0.5), (8, math.inf), (9, 2.0)]
        assert len(gpu.waits) == 1
        assert losses.last == 2.0


def test_on_a_gpu_losses_are_due_when_there_are_many(monkeypatch):
    monkeypatch.setattr(PendingLosses, "_MOST", 3)
    with SimulatedGpu():
        losses = PendingLosses()
        add(losses, [1.0, 1.0], "cuda:0")
        assert not losses.are_due
        add(losses, [1.0], "cuda:0")
        assert losses.are_due


def test_a_loss_that_is_held_does_not_hold_its_graph():
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            nodes.append(weakref.ref(ctx))
            return x.clone()

    nodes, losses = [], PendingLosses()
    losses.add(1, Identity.apply(torch.ones((), requires_grad=True)))
    assert nodes[0]() is None
    assert losses.read() == [(1, 1.0)]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_of_any_dtype_and_shape_is_read_exactly(dtype, shape):
    losses = PendingLosses()
    losses.add(1, torch.full(shape, 0.1, dtype=dtype))
    assert losses.read() == [(1, float(torch.tensor(0.1, dtype=dtype)))]
