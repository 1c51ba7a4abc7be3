"""A training step of this project."""

from collections.abc import Callable

import torch
from timing import Batch, Step
from torch import Tensor, nn

from loralib.training.determinism import set_up_device
from loralib.training.precision import Precision, hold_frozen_in
from loralib.training.product_choices import choose_products, frozen_weights


def training_step(
    plan: dict,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss_of: Callable[[Batch], Tensor],
    max_norm: float,
) -> Step:
    """Forward, backward, clipping where `max_norm` is above 0, an update.

    Args:
        plan: device and precision.
        model: whose frozen parameters are held in the plan's precision; it is changed in place.
        make_optimizer: trained parameters -> their optimiser.
        loss_of: batch -> its loss.
        max_norm: of the gradient.
    """
    set_up_device()
    hold_frozen_in(model, getattr(torch, plan["weights"]))
    model.to(plan["device"]).train()
    precision = Precision(getattr(torch, plan["autocast"] or "float32"), plan["device"])
    if plan["device"] == "cpu":
        choose_products(frozen_weights(model), precision.dtype, world_size=1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)

    def step(batch: Batch) -> Tensor:
        with precision.autocast():
            loss = loss_of(batch)
        precision.backward(loss)
        precision.step(optimizer, trained, max_norm)
        optimizer.zero_grad()
        return loss.detach()

    return step
