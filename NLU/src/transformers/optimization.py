"""Learning-rate schedules, AdamW and Adafactor."""

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

# ---- schedules ----
# Schedules multiply the optimizer's rates by a factor. It rises from 0 to 1 over the first
# `num_warmup_steps` of all `num_training_steps`. `last_epoch` is the step of a run that is
# continued, or -1 for a new one.


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LambdaLR:
    """Returns a schedule that keeps the optimizer's rates."""
    return _schedule(optimizer, 0, _constant, last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Returns a schedule with a linear rise, then the optimizer's rates."""
    return _schedule(optimizer, num_warmup_steps, _constant, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Returns a schedule with a linear rise, then a linear fall to 0."""
    after = partial(_linear, steps=num_training_steps - num_warmup_steps)
    return _schedule(optimizer, num_warmup_steps, after, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Returns a schedule with a linear rise, then (1 + cos) / 2 over `num_cycles` periods.

    By default, it is half a period, which falls to 0.
    """
    after = partial(_cosine, steps=num_training_steps - num_warmup_steps, cycles=num_cycles)
    return _schedule(optimizer, num_warmup_steps, after, last_epoch)


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: int = 1,
    last_epoch: int = -1,
) -> LambdaLR:
    """Returns a schedule with a linear rise, then `num_cycles` falls from the full rate to 0.

    Each fall is half a period of the cosine.
    """
    after = partial(_falls, steps=num_training_steps - num_warmup_steps, falls=num_cycles)
    return _schedule(optimizer, num_warmup_steps, after, last_epoch)


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Returns a schedule with a linear rise, then a fall to `lr_end` as (1 - progress)^power.

    Raises:
        ValueError: the optimizer's rate is not above `lr_end`.
    """
    lr = optimizer.defaults["lr"]
    if lr <= lr_end:
        raise ValueError(
            f"the polynomial schedule ends at {lr_end}, which is not below the learning rate {lr}"
        )
    steps = num_training_steps - num_warmup_steps
    after = partial(_polynomial, steps=steps, lr=lr, end=lr_end, power=power)
    return _schedule(optimizer, num_warmup_steps, after, last_epoch)


TYPE_TO_SCHEDULER_FUNCTION: dict[SchedulerType, Callable[..., LambdaLR]] = {
    SchedulerType.LINEAR: get_linear_schedule_with_warmup,
    SchedulerType.COSINE: get_cosine_schedule_with_warmup,
    SchedulerType.COSINE_WITH_RESTARTS: get_cosine_with_hard_restarts_schedule_with_warmup,
    SchedulerType.POLYNOMIAL: get_polynomial_decay_schedule_with_warmup,
    SchedulerType.CONSTANT: get_constant_schedule,
    SchedulerType.CONSTANT_WITH_WARMUP: get_constant_schedule_with_warmup,
}


def get_scheduler(
    name: str | SchedulerType,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
) -> LambdaLR:
    """Returns the schedule `name` for an optimizer, with its default settings.

    Args:
        name: linear, cosine, cosine_with_restarts, polynomial, constant or constant_with_warmup.
        optimizer: the optimizer, whose groups' rates are the peak.
        num_warmup_steps: the steps of the linear rise from 0; "constant" has none.
        num_training_steps: all steps, including those of the rise.

    Raises:
        ValueError: the schedule needs a number of steps that is not given.
    """
    name = SchedulerType(name)
    schedule = TYPE_TO_SCHEDULER_FUNCTION[name]
    if name is SchedulerType.CONSTANT:
        return schedule(optimizer)
    if num_warmup_steps is None:
        raise ValueError(f"the {name.value} schedule needs num_warmup_steps")
    if name is SchedulerType.CONSTANT_WITH_WARMUP:
        return schedule(optimizer, num_warmup_steps)
    if num_training_steps is None:
        raise ValueError(f"the {name.value} schedule needs num_training_steps")
    return schedule(optimizer, num_warmup_steps, num_training_steps)


def _schedule(
    optimizer: Optimizer, warmup: int, after: Callable[[int], float], last_epoch: int
) -> LambdaLR:
    # Partial functions, because closures would keep the scheduler from being pickled.
    return LambdaLR(optimizer, partial(_warmed, warmup=warmup, after=after), last_epoch)


def _warmed(step: int, warmup: int, after: Callable[[int], float]) -> float:
    """Returns the factor: a linear rise over `warmup` steps, then `after(step - warmup)`."""
    return step / warmup if step < warmup else after(step - warmup)


def _constant(step: int) -> float:
    return 1.0


def _linear(step: int, steps: int) -> float:
    return max(0.0, (steps - step) / max(1, steps))


def _cosine(step: int, steps: int, cycles: float) -> float:
    return 0.5 * (1 + math.cos(2 * math.pi * cycles * step / max(1, steps)))


def _falls(step: int, steps: int, falls: int) -> float:
    progress = step / max(1, steps)
    return 0.0 if progress >= 1 else 0.5 * (1 + math.cos(math.pi * (falls * progress % 1)))


def _polynomial(step: int, steps: int, lr: float, end: float, power: float) -> float:
    left = 0.0 if step >= steps else 1 - step / steps
    return ((lr - end) * left**power + end) / lr


# ---- optimizers ----


class Adafactor(Optimizer):
    """Adafactor, which stores only row and column means of a matrix's second moments.

    With gradient G of step t, β = 1 - t^decay_rate, and R, C the moving means (with decay β) of
    G² + eps[0] over columns and rows:

        U = G / √(R C / mean(R)),  cut to a root mean square of clip_threshold
        W ← W - rate · (U + weight_decay · W)

    `torch.optim.Adafactor` always scales its rate by a parameter's size, so it would hardly move
    LoRA's B, which starts at zero. Here, `scale_parameter` can turn that off.

    Args:
        params: parameters or groups of them.
        lr: the learning rate; None with `relative_step`.
        eps: a number added to squared gradients, and the smallest root mean square that
            `scale_parameter` uses.
        clip_threshold: updates with a greater root mean square are scaled down to it.
        decay_rate: the exponent of the step in the decay of second moments.
        beta1: the decay of a moving mean of updates, which is then applied instead of the update;
            None to apply the update itself.
        weight_decay: decoupled weight decay.
        scale_parameter: multiply the rate by the parameter's root mean square.
        relative_step: use the rate 1 / √t, at most 0.01, instead of `lr`.
        warmup_init: with `relative_step`, limit the rate to 1e-6 · t.

    Raises:
        ValueError: `lr` with `relative_step`, or neither; `warmup_init` without it.

    Source: Shazeer and Stern, arXiv 1804.04235, algorithms 4 to 6.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ):
        if relative_step and lr is not None:
            raise ValueError("Adafactor takes lr or relative_step: with lr, relative_step=False")
        if not relative_step and lr is None:
            raise ValueError("Adafactor without relative_step needs lr")
        if warmup_init and not relative_step:
            raise ValueError("Adafactor's warmup_init needs relative_step=True")
        settings = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, settings)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned; means stay in float32, whatever the parameters are."""
        super().load_state_dict(state_dict)  # casts them to the parameters' dtype
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device)

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
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        rate = _rate(group, parameter, state["step"])
        fresh = state["step"] ** group["decay_rate"]  # 1 - β, the new square's weight
        square = parameter.grad.float().square() + group["eps"][0]
        if parameter.dim() < 2:
            update = parameter.grad * _moving(state, "square", square, fresh).rsqrt()
        else:
            row = _moving(state, "row", square.mean(dim=-1), fresh)
            column = _moving(state, "column", square.mean(dim=-2), fresh)
            row = (row / row.mean(dim=-1, keepdim=True)).rsqrt()
            update = parameter.grad * row.unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
        update.div_((_root_mean_square(update) / group["clip_threshold"]).clamp(min=1.0))
        update.mul_(rate)
        if group["beta1"] is not None:
            # As in transformers, the mean starts at zero, so the first updates are small.
            mean = state.setdefault("momentum", torch.zeros_like(update))
            update = mean.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        parameter.mul_(1 - rate * group["weight_decay"]).sub_(update)


def _rate(group: dict[str, Any], parameter: Tensor, step: int) -> float | Tensor:
    """Returns Adafactor's learning rate for a parameter at a step."""
    rate = group["lr"]
    if group["relative_step"]:
        rate = min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5)
    if group["scale_parameter"]:
        rate = rate * _root_mean_square(parameter.float()).clamp(min=group["eps"][1])
    return rate


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _moving(state: dict[str, Any], name: str, value: Tensor, fresh: float) -> Tensor:
    """Updates the moving mean `name` with `value`, of weight `fresh`, and returns it."""
    state[name] = state[name].lerp_(value, fresh) if name in state else value.clone()
    return state[name]
