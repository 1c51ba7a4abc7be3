"""Learning-rate schedules, factors on the optimizer's rates by step; AdamW and Adafactor."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from loralib.training.optimizer import AdamW  # noqa: F401 - upstream has it here

from .trainer_utils import SchedulerType


def _warmed(step: int, warmup: int, after: Callable[[int], float]) -> float:
    """A linear rise from 0 over `warmup` steps, then `after`, which counts from the rise's end."""
    return step / max(1, warmup) if step < warmup else after(step - warmup)


def _linear(step: int, steps: int) -> float:
    return max(0.0, (steps - step) / max(1, steps))


def _cosine(step: int, steps: int) -> float:
    return max(0.0, 0.5 * (1 + math.cos(math.pi * step / max(1, steps))))


def _cosine_with_restarts(step: int, steps: int) -> float:
    # One cycle: upstream's default number of restarts, which its Trainer never changes.
    return _cosine(step, steps) if step < steps else 0.0


_POLYNOMIAL_END = 1e-7  # upstream's end rate, in absolute terms


def _polynomial(step: int, steps: int, lr: float) -> float:
    """To the first power, and down to the end rate."""
    end = _POLYNOMIAL_END
    return end / lr if step > steps else ((lr - end) * (1 - step / max(1, steps)) + end) / lr


def _constant(step: int, steps: int) -> float:
    return 1.0


_SHAPES: dict[SchedulerType, Callable[..., float]] = {
    SchedulerType.LINEAR: _linear,
    SchedulerType.COSINE: _cosine,
    SchedulerType.COSINE_WITH_RESTARTS: _cosine_with_restarts,
    SchedulerType.POLYNOMIAL: _polynomial,
    SchedulerType.CONSTANT: _constant,
    SchedulerType.CONSTANT_WITH_WARMUP: _constant,
}


def get_scheduler(
    name: str | SchedulerType,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
) -> LambdaLR:
    """The schedule of that name over an optimizer's rates, as upstream defines it.

    Args:
        name: linear, cosine, cosine_with_restarts, polynomial, constant or constant_with_warmup.
        optimizer: whose groups' rates are the peak.
        num_warmup_steps: steps of the linear rise from 0; "constant" has none.
        num_training_steps: all steps, those of the rise included.

    Raises:
        ValueError: the schedule needs one of the numbers and does not have it.
    """
    name = SchedulerType(name)
    needs_total = name not in (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP)
    if needs_total and num_training_steps is None:
        raise ValueError(f"the {name.value} schedule needs num_training_steps")
    if name is not SchedulerType.CONSTANT and num_warmup_steps is None:
        raise ValueError(f"the {name.value} schedule needs num_warmup_steps")
    warmup = 0 if name is SchedulerType.CONSTANT else num_warmup_steps
    after = partial(_SHAPES[name], steps=(num_training_steps or 0) - warmup)
    if name is SchedulerType.POLYNOMIAL:
        if optimizer.defaults["lr"] <= _POLYNOMIAL_END:
            raise ValueError(
                f"the polynomial schedule ends at {_POLYNOMIAL_END}, which is not below the "
                f"learning rate {optimizer.defaults['lr']}"
            )
        after = partial(after, lr=optimizer.defaults["lr"])
    return LambdaLR(optimizer, partial(_warmed, warmup=warmup, after=after))


class Adafactor(Optimizer):
    """Adafactor at a given rate: second moments by row and column, no first moment.

    `torch.optim.Adafactor` scales its rate by the size of a parameter, and so would hardly move
    LoRA's B, which starts at zero. Here, as the release's Trainer asks for it, the rate is `lr`.

    Args:
        params: parameters or groups of them.
        lr: the learning rate.
        weight_decay: decoupled decay.

    Source: Shazeer and Stern, arXiv 1804.04235, algorithm 4 without relative step sizes.
    """

    _EPSILON = 1e-30  # added to squared gradients
    _DECAY = -0.8  # exponent of the step in the decay of second moments
    _CLIP = 1.0  # root mean square that an update is cut to

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])
        return loss

    def _update(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        fresh = state["step"] ** self._DECAY  # weight of the new square
        square = parameter.grad.float().square() + self._EPSILON
        if parameter.dim() < 2:
            update = parameter.grad * _moving(state, "square", square, fresh).rsqrt()
        else:
            row = _moving(state, "row", square.mean(dim=-1), fresh)
            column = _moving(state, "column", square.mean(dim=-2), fresh)
            row = (row / row.mean(dim=-1, keepdim=True)).rsqrt()
            update = parameter.grad * row.unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
        update.div_((update.square().mean().sqrt() / self._CLIP).clamp(min=1.0))
        parameter.mul_(1 - lr * weight_decay).sub_(update, alpha=lr)


def _moving(state: dict[str, Any], name: str, value: Tensor, fresh: float) -> Tensor:
    """The moving mean `name` after `value` has come in with weight `fresh`."""
    state[name] = state[name].lerp_(value, fresh) if name in state else value.clone()
    return state[name]
