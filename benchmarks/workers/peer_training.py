"""Builds a training step as upstream's Trainer makes it."""

from collections.abc import Callable

import torch
from timing import Batch, Step
from torch import Tensor, nn


def training_step(
    plan: dict,
    model: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    learning_rate: float,
    max_norm: float,
) -> Step:
    """Returns a step: forward, backward, clipping if `max_norm` is above 0, PyTorch's fused AdamW.

    Args:
        plan: the worker's plan, for device and autocast's dtype.
        model: the model in the precision that the plan asks for; it is changed in place.
        loss_of: batch -> its loss.
        learning_rate: AdamW's learning rate.
        max_norm: the largest norm of the gradient.
    """
    model.to(plan["device"]).train()
    device, autocast = plan["device"], plan["autocast"]
    dtype = getattr(torch, autocast) if autocast else None
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, fused=True)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = loss_of(batch)
        scaler.scale(loss).backward()
        if max_norm > 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained, max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step
