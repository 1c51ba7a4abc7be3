"""The metrics of GLUE, by task.

scikit-learn and scipy take a second to import, so a metric imports them when it is computed.
"""

import logging

import numpy as np
from numpy.typing import ArrayLike

from ..processors.glue import glue_task

logger = logging.getLogger(__name__)


def simple_accuracy(preds: ArrayLike, labels: ArrayLike) -> float:
    """Returns the share of predictions that equal their labels.

    Args:
        preds: class indices, shape (rows,).
        labels: class indices, shape (rows,).

    Raises:
        ValueError: arrays of unequal shape, which NumPy would compare each with each.
    """
    preds, labels = np.asarray(preds), np.asarray(labels)
    if preds.shape != labels.shape:
        raise ValueError(
            f"accuracy needs as many predictions as labels; got shapes {preds.shape} and "
            f"{labels.shape}"
        )
    return float((preds == labels).mean())


def acc_and_f1(preds: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Computes accuracy, F1 of class 1, and their mean (`combined_score`).

    Args:
        preds: class indices 0 or 1, shape (rows,).
        labels: class indices 0 or 1, shape (rows,).
    """
    from sklearn.metrics import f1_score

    accuracy = simple_accuracy(preds, labels)
    f1 = float(f1_score(labels, preds, zero_division=0.0))
    return {"accuracy": accuracy, "f1": f1, "combined_score": (accuracy + f1) / 2}


def pearson_and_spearman(preds: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Computes Pearson's and Spearman's correlation, and their mean (`combined_score`).

    Neither is defined if all predictions, or all labels, are equal. All three are then 0.0, and a
    warning is logged.

    Args:
        preds: scores, shape (rows,).
        labels: scores, shape (rows,).
    """
    from scipy.stats import pearsonr, spearmanr

    for what, values in (("predictions", preds), ("labels", labels)):
        if np.ptp(values) == 0:
            logger.warning("All %s are equal: the correlation is undefined and reported as 0", what)
            return {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}
    pearson = float(pearsonr(preds, labels).statistic)
    spearman = float(spearmanr(preds, labels).statistic)
    return {"pearson": pearson, "spearmanr": spearman, "combined_score": (pearson + spearman) / 2}


def classification_metrics(preds: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Computes accuracy, and F1 as the mean over classes (`f1_macro`), for any number of classes.

    Classes that are neither predicted nor true for any row do not count.

    Args:
        preds: class indices, shape (rows,).
        labels: class indices, shape (rows,).

    Raises:
        ValueError: as `glue_compute_metrics`.
    """
    from sklearn.metrics import f1_score

    preds, labels = _checked("classification", preds, labels)
    f1 = float(f1_score(labels, preds, average="macro", zero_division=0.0))
    return {"accuracy": simple_accuracy(preds, labels), "f1_macro": f1}


def regression_metrics(preds: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Computes the mean squared error, and both correlations, see `pearson_and_spearman`.

    Args:
        preds: scores, shape (rows,).
        labels: scores, shape (rows,).

    Raises:
        ValueError: as `glue_compute_metrics`.
    """
    preds, labels = _checked("regression", preds, labels)
    both = pearson_and_spearman(preds, labels)
    # In the dtype of both, small integers and half precision would overflow.
    mse = float(np.mean(np.subtract(preds, labels, dtype=np.float64) ** 2))
    return {"mse": mse, "pearson": both["pearson"], "spearmanr": both["spearmanr"]}


def glue_compute_metrics(task_name: str, preds: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Computes the metrics that GLUE defines for a task.

    Args:
        task_name: the task, in any spelling that `glue_task` knows.
        preds: class indices, or scores for STS-B; shape (rows,).
        labels: the true class indices or scores; shape (rows,).

    Returns:
        CoLA: `matthews_correlation`; MRPC, QQP: `accuracy`, `f1`, `combined_score`; STS-B:
        `pearson`, `spearmanr`, `combined_score`; the others: `accuracy`.

    Raises:
        ValueError: unknown task; arrays of unequal shape, of more than one dimension or without
            rows; predictions or labels that are not finite.
    """
    name = glue_task(task_name).name
    preds, labels = _checked(name, preds, labels)
    if name == "cola":
        from sklearn.metrics import matthews_corrcoef

        return {"matthews_correlation": float(matthews_corrcoef(labels, preds))}
    if name in ("mrpc", "qqp"):
        return acc_and_f1(preds, labels)
    if name == "stsb":
        return pearson_and_spearman(preds, labels)
    return {"accuracy": simple_accuracy(preds, labels)}


def _checked(name: str, preds: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns both as arrays of finite numbers, one per row."""
    preds, labels = np.asarray(preds), np.asarray(labels)
    if preds.shape != labels.shape or preds.ndim != 1 or not preds.size:
        raise ValueError(
            f"{name}: metrics need as many predictions as labels, one per row; "
            f"got shapes {preds.shape} and {labels.shape}"
        )
    for what, values in (("predictions", preds), ("labels", labels)):
        bad = values.size - np.isfinite(values).sum()
        if bad:
            raise ValueError(f"{name}: {bad} of {values.size} {what} are not finite")
    return preds, labels
