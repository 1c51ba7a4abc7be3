"""The losses of a run's steps, which are read from the device when somebody needs them."""

import math

import torch
from torch import Tensor


class PendingLosses:
    """Losses that the device may not have computed yet.

    Reading a loss waits for its step: a loop that reads each never has the next step ready when a
    GPU ends one. So they stay on the device until the loop reads them, before it logs, evaluates or
    saves; on a CPU, where there is nothing to wait for, at once.

    Attributes:
        last: the last loss that has been read; NaN before.
    """

    # A run that never logs does not keep them all.
    _MOST = 1000

    def __init__(self) -> None:
        self._held: list[tuple[int, Tensor]] = []
        self.last = math.nan

    def add(self, step: int, loss: Tensor) -> None:
        """Takes the loss of a step, a tensor of one number."""
        self._held.append((step, loss.detach()))

    @property
    def are_due(self) -> bool:
        """Whether they should be read now, whatever else there is to do."""
        if not self._held:
            return False
        return self._held[-1][1].device.type == "cpu" or len(self._held) >= self._MOST

    def read(self) -> list[tuple[int, float]]:
        """The losses since the last reading, each with its step; waits for the last one."""
        held, self._held = self._held, []
        if not held:
            return []
        steps, losses = zip(*held, strict=True)
        values = torch.stack(losses).tolist()
        self.last = values[-1]
        return list(zip(steps, values, strict=True))
