"""Builds a training step as this project's scripts make it."""

from collections.abc import Callable

import torch
from timing import Batch, Step
from torch import Tensor, nn

from loralib.training.cuda_graphs import GraphedStep
from loralib.training.determinism import set_up_device
from loralib.training.precision import Precision, cast_frozen
from loralib.training.product_choices import choose_products, frozen_weights


def training_step(
    plan: dict,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss_of: Callable[[Batch], Tensor],
    max_norm: float,
) -> Step:
    """Returns a step: forward, backward, clipping if `max_norm` is above 0, and an update.

    Args:
        plan: the worker's plan, for device and precision.
        model: the model, which is changed in place: frozen parameters get the plan's precision.
        make_optimizer: trained parameters -> their optimizer.
        loss_of: batch -> its loss.
        max_norm: the largest norm of the gradient.
    """
    set_up_device()
    cast_frozen(model, getattr(torch, plan["weights"]))
    model.to(plan["device"]).train()
    precision = Precision(getattr(torch, plan["autocast"] or "float32"), plan["device"])
    if plan["device"] == "cpu":
        choose_products(frozen_weights(model), precision.dtype, world_size=1)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])

    def add_gradients(batch: Batch) -> Tensor:
        with precision.autocast():
            loss = loss_of(batch)
        precision.backward(loss)
        return loss.detach()

    loss_and_gradients = GraphedStep(add_gradients, model) if plan["graphs"] else add_gradients

    def step(batch: Batch) -> Tensor:
        loss = loss_and_gradients(batch)
        precision.step(optimizer, max_norm)
        optimizer.zero_grad()
        return loss

    return step
