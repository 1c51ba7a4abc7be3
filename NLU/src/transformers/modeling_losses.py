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

    Raises:
        ValueError: a label is not the number of a class.
    """
    labels = labels.flatten()
    if packed_rows is not None and packed_rows.is_filled:
        logits, labels = logits[:-1], labels[:-1]
    logits = at_least_float32(logits)
    if logits.shape[-1] == 1:
        scores = logits.squeeze(-1)
        return F.mse_loss(scores, labels.to(scores.dtype).view_as(scores))  # one is not for all
    return _cross_entropy(logits, labels, "mean")


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the rows whose label is not -100; zero if there are none.

    Args:
        logits: (rows, classes).
        labels: (rows,).

    Raises:
        ValueError: a label is not the number of a class.
    """
    loss = _cross_entropy(at_least_float32(logits), labels, "sum")
    return loss / (labels != IGNORED_LABEL).sum().clamp(min=1)


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Returns the cross-entropy; on a CPU, its errors about labels say which there can be."""
    try:
        return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction=reduction)
    except (IndexError, RuntimeError) as error:
        last = logits.shape[-1] - 1
        is_wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels > last))
        if labels.is_floating_point():
            found = f"labels are {labels.dtype}".replace("torch.", "")
        elif is_wrong.any():
            found = f"a label is {labels[is_wrong][0]}"
        else:
            raise
        raise ValueError(
            f"{found}, but the model takes whole numbers from 0 to {last}: leave hidden labels, "
            "such as -1, out; a classifier of others needs their num_labels (1 for scores)"
        ) from error


def at_least_float32(logits: Tensor) -> Tensor:
    """Returns logits in float32, in which a loss of those in half precision is computed, or wider.

    A model in float64 has its loss in float64.
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
