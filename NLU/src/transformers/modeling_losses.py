"""The losses of the models' heads."""

import torch.nn.functional as F
from torch import Tensor

# The label of what a loss ignores; torch's cross-entropy skips it.
IGNORED_LABEL = -100


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy or, if there is one label, the mean squared error.

    Args:
        logits: (batch, labels).
        labels: (batch,), classes or scores.
    """
    labels = labels.flatten()
    if logits.shape[-1] == 1:
        return F.mse_loss(logits.squeeze(-1).float(), labels.float())
    return F.cross_entropy(logits.float(), labels)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the rows whose label is not -100; zero if there are none.

    Args:
        logits: (rows, classes).
        labels: (rows,).
    """
    loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss / (labels != IGNORED_LABEL).sum().clamp(min=1)
