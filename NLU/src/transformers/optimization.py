"""Learning-rate schedules: factors on the optimiser's rates, a function of the step."""

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

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


def _polynomial(step: int, steps: int, lr: float) -> float:
    """To the first power, and down to upstream's end rate, 1e-7 in absolute terms."""
    end = 1e-7
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
    """The schedule of that name over an optimiser's rates, as upstream draws it.

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
        after = partial(after, lr=optimizer.defaults["lr"])
    return LambdaLR(optimizer, partial(_warmed, warmup=warmup, after=after))
