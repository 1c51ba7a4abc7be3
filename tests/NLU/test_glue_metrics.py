"""GLUE's metrics against their formulas, written out."""

import math

import numpy as np
import pytest

from transformers.data.metrics import (
    acc_and_f1,
    classification_metrics,
    glue_compute_metrics,
    pearson_and_spearman,
    regression_metrics,
    simple_accuracy,
)

LABELS = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 1])
PREDS = np.array([1, 1, 1, 0, 0, 1, 1, 0, 0, 1])
SCORES = np.array([0.0, 1.5, 2.0, 2.0, 5.0, 3.2])
GUESSES = np.array([0.4, 1.0, 2.5, 2.0, 4.0, 3.9])


def confusion(preds, labels):
    pairs = list(zip(preds, labels, strict=True))
    return [pairs.count(pair) for pair in ((1, 1), (0, 0), (1, 0), (0, 1))]


def correlation(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum())


def ranks(x):
    return np.array([(x < v).sum() + ((x == v).sum() + 1) / 2 for v in x])


@pytest.mark.parametrize("name", ["sst2", "SST-2", "mnli", "mnli-mm", "qnli", "rte", "wnli"])
def test_accuracy_tasks(name):
    assert glue_compute_metrics(name, PREDS, LABELS) == {"accuracy": 0.6}
    assert simple_accuracy(PREDS, LABELS) == 0.6


def test_cola():
    tp, tn, fp, fn = confusion(PREDS, LABELS)
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    metrics = glue_compute_metrics("CoLA", PREDS, LABELS)
    assert metrics == {"matthews_correlation": pytest.approx((tp * tn - fp * fn) / root)}


@pytest.mark.parametrize("name", ["mrpc", "qqp"])
def test_accuracy_and_f1(name):
    tp, _, fp, fn = confusion(PREDS, LABELS)
    f1 = 2 * tp / (2 * tp + fp + fn)
    expected = {"accuracy": 0.6, "f1": f1, "combined_score": (0.6 + f1) / 2}
    assert glue_compute_metrics(name, PREDS, LABELS) == pytest.approx(expected)
    assert acc_and_f1(PREDS, LABELS) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["stsb", "sts-b"])
def test_correlations(name):
    pearson, spearman = correlation(GUESSES, SCORES), correlation(ranks(GUESSES), ranks(SCORES))
    expected = {
        "pearson": pearson,
        "spearmanr": spearman,
        "combined_score": (pearson + spearman) / 2,
    }
    assert pearson != pytest.approx(spearman)
    assert glue_compute_metrics(name, GUESSES, SCORES) == pytest.approx(expected)
    assert pearson_and_spearman(GUESSES, SCORES) == pytest.approx(expected)


@pytest.mark.filterwarnings("error")
def test_a_constant_class_scores_without_warnings():
    nothing = np.zeros_like(LABELS)
    assert glue_compute_metrics("cola", nothing, LABELS) == {"matthews_correlation": 0.0}
    assert glue_compute_metrics("mrpc", nothing, LABELS) == {
        "accuracy": 0.4,
        "f1": 0.0,
        "combined_score": 0.2,
    }
    assert glue_compute_metrics("mrpc", nothing, nothing)["f1"] == 0.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("preds", "labels", "what"),
    [(np.ones(6), SCORES, "predictions"), (GUESSES, np.ones(6), "labels")],
)
def test_a_constant_score_has_zero_correlation_and_a_warning(caplog, preds, labels, what):
    metrics = glue_compute_metrics("stsb", preds, labels)
    assert metrics == {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}
    assert f"All {what} are equal" in caplog.text


@pytest.mark.parametrize("name", ["cola", "mrpc", "stsb", "rte"])
def test_values_are_plain_floats(name):
    metrics = glue_compute_metrics(name, PREDS.tolist(), LABELS.tolist())
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize(
    ("name", "preds", "labels", "message"),
    [
        ("snli", PREDS, LABELS, "unknown GLUE task 'snli'"),
        ("rte", PREDS[:1], LABELS, r"rte: .* got shapes \(1,\) and \(10,\)"),
        ("rte", PREDS[:, None], LABELS[:, None], r"got shapes \(10, 1\) and \(10, 1\)"),
        ("rte", PREDS[:0], LABELS[:0], r"got shapes \(0,\) and \(0,\)"),
        ("stsb", [1.0, math.nan, math.inf], [1.0, 2.0, 3.0], "2 of 3 predictions are not finite"),
        ("stsb", [1.0, 2.0], [1.0, math.nan], "1 of 2 labels are not finite"),
    ],
)
def test_unusable_input_is_refused(name, preds, labels, message):
    with pytest.raises(ValueError, match=message):
        glue_compute_metrics(name, preds, labels)


def f1_of(number, preds, labels):
    true = sum((preds == number) & (labels == number))
    return 2 * true / (sum(preds == number) + sum(labels == number))


@pytest.mark.parametrize("metrics", [classification_metrics, regression_metrics])
def test_unusable_input_of_own_tasks_is_refused(metrics):
    with pytest.raises(ValueError, match=r"got shapes \(1,\) and \(10,\)"):
        metrics(PREDS[:1], LABELS)


def test_accuracy_of_labels_in_a_column_is_refused():
    """NumPy would compare each prediction with each label."""
    with pytest.raises(ValueError, match=r"got shapes \(2,\) and \(2, 1\)"):
        simple_accuracy([0, 1], [[0], [1]])


def test_metrics_of_own_classes():
    """F1 does not depend on the classes' numbers; classes that do not occur do not count."""
    preds, labels = np.array([0, 1, 2, 2, 1, 0, 4]), np.array([0, 2, 2, 1, 1, 0, 0])
    expected = np.mean([f1_of(number, preds, labels) for number in (0, 1, 2, 4)])
    found = classification_metrics(preds, labels)
    assert found == {"accuracy": 4 / 7, "f1_macro": pytest.approx(expected)}
    assert classification_metrics(5 - preds, 5 - labels) == found
    two = (f1_of(0, PREDS, LABELS) + f1_of(1, PREDS, LABELS)) / 2
    assert classification_metrics(PREDS, LABELS)["f1_macro"] == pytest.approx(two)


def test_metrics_of_own_scores():
    found = regression_metrics(GUESSES, SCORES)
    assert found["mse"] == pytest.approx(np.mean((GUESSES - SCORES) ** 2))
    assert found["pearson"] == pytest.approx(correlation(GUESSES, SCORES))
    assert found["spearmanr"] == pytest.approx(correlation(ranks(GUESSES), ranks(SCORES)))
    with pytest.raises(ValueError, match="1 of 6 predictions are not finite"):
        regression_metrics(np.where(GUESSES == 2.5, np.nan, GUESSES), SCORES)


@pytest.mark.parametrize("kind", [np.uint8, np.float16])
def test_scores_of_a_narrow_dtype_do_not_overflow(kind):
    low, high = np.array([0, 100], kind), np.array([255, 155], kind)
    assert regression_metrics(low, high)["mse"] == (255**2 + 55**2) / 2
