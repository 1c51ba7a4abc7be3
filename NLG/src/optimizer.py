"""Defines the optimizer's flags of the paper's GPT-2 experiments, and the learning rates.

The optimizer itself, with its formula, is `loralib.training.optimizer.AdamW`.
"""

import argparse
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from loralib.training.optimizer import AdamW, decay_groups
from loralib.utils import with_lora_plus

logger = logging.getLogger(__name__)


def add_optimizer_params(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the optimizer and of the learning rate's schedule."""
    add = parser.add_argument_group("optimizer").add_argument
    add("--lr", default=1e-5, type=float, help="peak learning rate (cycle does not use it)")
    add(
        "--lora_plus_ratio",
        default=1.0,
        type=float,
        help="LoRA+ (arXiv 2402.12354): B's learning rate over A's; the paper recommends about 16",
    )
    add("--weight_decay", default=0.01, type=float, help="weight decay, times the rate")
    add("--correct_bias", action="store_true", help="correct Adam's averages for their start at 0")
    add("--adam_epislon", default=1e-6, type=float, help="Adam's epsilon (the release's spelling)")
    add("--no_decay_bias", action="store_true", help="biases and layer norms do not decay")
    add("--adam_beta1", default=0.9, type=float, help="Adam's decay of the gradient's average")
    add("--adam_beta2", default=0.98, type=float, help="Adam's decay of the squares' average")
    add(
        "--scheduler",
        default="linear",
        type=str,
        choices=[*FACTORS, "cycle"],
        help="how the rate changes from step to step, a step being one batch. The release also "
        "lists inv_sqrt and dev_perf, but has no formula for them: they are refused",
    )
    add("--max_step", type=int, help="last step; default: that of --max_epoch")
    add("--max_epoch", type=int, help="number of epochs")
    add("--warmup_step", default=0, type=int, help="steps in which the rate rises from 0 to --lr")
    add(
        "--i_steps",
        default="0",
        type=str,
        help="cycle: steps, separated by commas, between which the rate is linear; the last one "
        "is --max_step, unless it is 0",
    )
    add("--i_lrs", default="0.00025", type=str, help="cycle: the rates at these steps")


def create_adam_optimizer(model: nn.Module, args: argparse.Namespace) -> AdamW:
    """Returns AdamW for a model's trainable parameters, with the flags' hyperparameters.

    Args:
        model: the model; parameters that need no gradient are left out, tied ones come once.
        args: the flags of `add_optimizer_params`.

    Raises:
        ValueError: the model has no trainable parameters.
    """
    groups = decay_groups(model, args.weight_decay, args.no_decay_bias)
    if not groups:
        raise ValueError("the model has nothing to train: all its parameters are frozen")
    groups = with_lora_plus(model, groups, args.lr, args.lora_plus_ratio)
    return AdamW(
        groups,
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epislon,
        correct_bias=args.correct_bias,
    )


def linear(step: int, warmup: int, max_step: int) -> float:
    """Returns a factor that rises from 0 to 1 at `warmup`, falls to 0 at `max_step`, stays 0."""
    if step < warmup:
        return step / warmup
    return max(0.0, (max_step - step) / max(1, max_step - warmup))


def cosine(step: int, warmup: int, max_step: int) -> float:
    """Returns a factor that rises like `linear`, then follows half a cosine wave.

    The wave goes from 1 at step 0, not at `warmup`, to 0 at `max_step`.
    """
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * min(step, max_step) / max_step))


def constant(step: int, warmup: int, max_step: int) -> float:
    """Returns a factor that rises like `linear`, then stays at 1; `max_step` has no effect."""
    return step / warmup if step < warmup else 1.0


def cycle(step: int, steps: Sequence[int], rates: Sequence[float]) -> float:
    """Interpolates the rate linearly between points; outside, the nearest point's rate holds.

    Args:
        step: the step whose rate is returned.
        steps: the steps of the points, increasing.
        rates: the rates at these steps, absolute and not multiplied by `--lr`.
    """
    return float(np.interp(step, steps, rates))


FACTORS = {"cosine": cosine, "constant": constant, "linear": linear}


class Scheduler:
    """Sets an optimizer's learning rate, which depends only on the step.

    Args:
        optimizer: the optimizer; a group with another rate than the optimizer's keeps its ratio to
            that (LoRA+).
        lr_at: returns the rate at a step, counted in batches from 0.
        max_step: the number of steps in the run.

    Attributes:
        lr: the rate that was set last; before the first step, the optimizer's own.
        max_step: as given.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr_at: Callable[[int], float], max_step: int
    ):
        self.optimizer = optimizer
        self.lr_at = lr_at
        self.max_step = max_step
        self.lr = optimizer.defaults["lr"]
        self._ratios = [
            1.0 if group["lr"] == self.lr else group["lr"] / self.lr
            for group in optimizer.param_groups
        ]
        self._next = 0

    def step(self) -> None:
        """Sets the rate for the next batch; call it once before each batch."""
        self._set(self.lr_at(self._next))
        self._next += 1

    def _set(self, lr: float) -> None:
        self.lr = lr
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = lr * ratio

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps and the rate, which torch.load reads with weights_only."""
        return {"step": self._next, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of `state_dict`, and sets the optimizer's rates."""
        self._next = state["step"]
        self._set(state["lr"])


def create_optimizer_scheduler(
    optimizer: torch.optim.Optimizer, args: argparse.Namespace
) -> Scheduler:
    """Returns the scheduler that the flags ask for.

    Args:
        optimizer: the optimizer whose rate is set.
        args: the flags of `add_optimizer_params`, which have to say where the schedule ends.

    Raises:
        ValueError: they do not say it, the points of cycle do not fit, or there is no such
            scheduler.
    """
    max_step = end_of_schedule(args)
    if max_step is None:
        raise ValueError("give the length of the training: --max_step or --max_epoch")
    if args.scheduler == "cycle":
        steps, rates = _points(args.i_steps, args.i_lrs)
        return Scheduler(optimizer, partial(cycle, steps=steps, rates=rates), max_step)
    if args.scheduler not in FACTORS:
        known = ", ".join([*FACTORS, "cycle"])
        raise ValueError(f"--scheduler {args.scheduler}: no such scheduler; there are {known}")
    factor, peak = FACTORS[args.scheduler], args.lr
    warmup = args.warmup_step
    if warmup > max_step:
        # Not an error, because recipes are often tried with fewer steps than their warm-up has.
        logger.warning(
            "--warmup_step %d is after the last step, %d: the rate ends at %.3g, below --lr %.3g",
            warmup,
            max_step,
            peak * factor(max_step - 1, warmup, max_step),
            peak,
        )
    return Scheduler(optimizer, lambda step: peak * factor(step, warmup, max_step), max_step)


def end_of_schedule(args: argparse.Namespace) -> int | None:
    """Returns the step at which the rate's schedule ends; None if the flags do not say.

    With cycle, this is the last of `--i_steps`, whatever `--max_step` is. Only if it is 0 (a single
    point: a constant rate), `--max_step` holds.
    """
    if args.scheduler != "cycle":
        return args.max_step
    steps, _ = _points(args.i_steps, args.i_lrs)
    return steps[-1] or args.max_step


def _points(i_steps: str, i_lrs: str) -> tuple[list[int], list[float]]:
    """Reads the points of cycle."""
    steps = _numbers("--i_steps", i_steps, int)
    rates = _numbers("--i_lrs", i_lrs, float)
    if len(steps) != len(rates):
        raise ValueError(
            f"--i_steps has {len(steps)} numbers and --i_lrs has {len(rates)}: "
            "each step needs its rate"
        )
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"--i_steps {i_steps}: each step has to be larger than the one before")
    return steps, rates


def _numbers(flag: str, text: str, kind: type) -> list:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{flag} {text!r}: not {what} separated by commas") from None
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{flag} {text}: has to be at least 0")
    return numbers
