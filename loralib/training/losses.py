"""Keeps the losses of a run's steps on the device until they are needed."""

import math

import torch
from torch import Tensor


class PendingLosses:
    """Losses that the device may not have computed yet.

    Reading a loss waits for its step. A loop that reads every loss never has the next step queued
    when a GPU finishes one. So losses stay on the device until the loop reads them, before it logs,
    evaluates or saves. On a CPU, where there is nothing to wait for, they are read at once.

    Attributes:
        last: the last loss that has been read; NaN before the first.
    """

    # Losses are read after this many at the latest, so that a run that never logs keeps no more.
    _MOST = 1000

    def __init__(self) -> None:
        self._held: list[tuple[int, Tensor]] = []
        self.last = math.nan

    def add(self, step: int, loss: Tensor) -> None:
        """Adds the loss of a step, a tensor of one number, of any shape."""
        self._held.append((step, loss.detach().reshape(())))

    @property
    def are_due(self) -> bool:
        """Whether the losses should be read now, even if the loop does not need them."""
        if not self._held:
            return False
        return self._held[-1][1].device.type == "cpu" or len(self._held) >= self._MOST

    def read(self) -> list[tuple[int, float]]:
        """Returns the losses since the last call, each with its step; waits for the last one."""
        held, self._held = self._held, []
        if not held:
            return []
        steps, losses = zip(*held, strict=True)
        values = torch.stack(losses).tolist()
        self.last = values[-1]
        return list(zip(steps, values, strict=True))
