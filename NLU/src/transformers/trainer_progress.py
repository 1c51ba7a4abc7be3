"""`Progress`: the training loop's position in the data, and the losses that it has not logged."""

import math
from typing import Any

from torch import Tensor

from loralib.training.losses import PendingLosses


class Progress:
    """The loop's position in the data, and the losses that it has not logged yet.

    Losses stay on the device until they are read, because reading one waits for the device.

    Attributes:
        epoch, batches: full epochs done, and batches done in the current one.
        has_ended: False within an epoch; True once the work due at its end has begun.
        is_stopped: whether a callback had ended this epoch when it was last saved.
        step: updates done; logged_step: at the last log.
        loss_since_log, loss_total: sums of the losses that have been read, without those of batches
            that have no target (their loss, 0 or of PyTorch's functions nan, has no meaning).
        weight_since_log, weight_total: the sums of these losses' weights; a batch that is all of an
            update has weight 1.
        first_bad_step: the first step with a loss that is not finite, among those that have been
            read, or -1.
        flos: operations of this process that the Trainer's state does not count yet.
        pending: the losses that have not been read yet.
        epoch_rng: the states of the random generators at the beginning of this epoch, if its
            batches depend on them.
    """

    def __init__(self) -> None:
        self.epoch = self.batches = self.step = self.logged_step = 0
        self.has_ended, self.is_stopped = True, False
        self.loss_since_log = self.loss_total = 0.0
        self.weight_since_log = self.weight_total = 0.0
        self.first_bad_step = -1
        self.flos = 0
        self.pending = PendingLosses()
        self._parts: list[tuple[float, bool | Tensor]] = []  # of the pending losses
        self.epoch_rng: dict[str, Any] | None = None

    def add(self, loss: Tensor, weight: float, has_target: bool | Tensor) -> None:
        """Adds a batch's share of its update's loss.

        Args:
            loss: the share.
            weight: the batch's weight in that loss.
            has_target: whether the batch has a target. A tensor on the device is read together with
                the loss.
        """
        self.pending.add(self.step, loss)
        self._parts.append((weight, has_target))

    def read_losses(self) -> None:
        """Reads the pending losses into the sums; waits for the last one to be computed."""
        parts, self._parts = self._parts, []
        for (step, loss), (weight, has_target) in zip(self.pending.read(), parts, strict=True):
            if not has_target:
                continue
            if not math.isfinite(loss) and self.first_bad_step < 0:
                self.first_bad_step = step
            self.loss_since_log += loss
            self.loss_total += loss
            self.weight_since_log += weight
            self.weight_total += weight

    def note_log(self, step: int) -> None:
        """Resets the sums since the last log, as there is a log at this step."""
        self.loss_since_log = self.weight_since_log = 0.0
        self.logged_step = step

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as plain values, after reading the pending losses."""
        self.read_losses()
        aside = ("flos", "pending", "_parts", "epoch_rng")
        return {name: value for name, value in vars(self).items() if name not in aside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)
