"""The losses of the models' heads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from loralib.nn.packing import PackedRows

# The label of what a loss ignores; torch's cross-entropy skips it.
IGNORED_LABEL = -100
# The first and last token of an answer that a loss ignores: beyond the columns of any batch.
IGNORED_POSITION = 2**31 - 1


def classification_loss(
    logits: Tensor, labels: Tensor, packed_rows: PackedRows | None = None
) -> Tensor:
    """Returns the mean cross-entropy or, if there is one label, the mean squared error.

    Args:
        logits: (batch, labels).
        labels: (batch,), classes or scores.
        packed_rows: the batch's rows. A row that was added to them (`is_filled`) does not count.
    """
    labels = labels.flatten()
    if packed_rows is not None and packed_rows.is_filled:
        logits, labels = logits[:-1], labels[:-1]
    logits = at_least_float32(logits)
    if logits.shape[-1] == 1:
        return F.mse_loss(logits.squeeze(-1), labels.to(logits.dtype))
    return F.cross_entropy(logits, labels)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the rows whose label is not -100; zero if there are none.

    Args:
        logits: (rows, classes).
        labels: (rows,).
    """
    logits = at_least_float32(logits)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss / (labels != IGNORED_LABEL).sum().clamp(min=1)


def at_least_float32(logits: Tensor) -> Tensor:
    """Returns logits in float32, in which a loss of those in half precision is computed, or wider.

    A model in float64 has its loss in float64.
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
