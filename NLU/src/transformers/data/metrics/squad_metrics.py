"""SQuAD's scores: exact match and F1 of answers, as its two evaluation scripts define them.

v1 (Rajpurkar et al. 2016): every question has answers, and the one that matches best counts. v2
(Rajpurkar et al. 2018): some questions have none; "" is then the right prediction. Scores are in
percent.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-cases a text, and removes punctuation, articles and surplus spaces."""
    text = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def compute_exact(answer: str, prediction: str) -> float:
    """Returns 1 if both are the same after normalization, else 0."""
    return float(normalize_answer(answer) == normalize_answer(prediction))


def compute_f1(answer: str, prediction: str) -> float:
    """Returns the F1 of the words that both share; 1 if neither has any, as in SQuAD 2.0."""
    if not normalize_answer(answer) and not normalize_answer(prediction):
        return 1.0
    return _f1_of_words(answer, prediction)


def _f1_of_words(answer: str, prediction: str) -> float:
    """Returns the same, but 0 if neither has any, as in SQuAD 1.1."""
    true, ours = (normalize_answer(text).split() for text in (answer, prediction))
    shared = sum((Counter(true) & Counter(ours)).values())
    return 2 * shared / (len(true) + len(ours)) if shared else 0.0


def squad_metrics(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Computes ``exact_match`` and ``f1`` of SQuAD 1.1.

    Args:
        predictions: question id -> predicted answer.
        answers: question id -> true answers, at least one.

    Raises:
        ValueError: a question has no prediction, or no answer; or there are no questions.
    """
    _check_ids(predictions, answers)
    for name, texts in answers.items():
        if not texts:
            raise ValueError(f"question {name} has no answer; SQuAD 2.0 is for such questions")
    exact = [_best(compute_exact, texts, predictions[name]) for name, texts in answers.items()]
    f1 = [_best(_f1_of_words, texts, predictions[name]) for name, texts in answers.items()]
    return {"exact_match": _percent(exact), "f1": _percent(f1)}


def squad_v2_metrics(
    predictions: Mapping[str, str],
    answers: Mapping[str, Sequence[str]],
    null_odds: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Computes the scores of SQuAD 2.0, in which some questions have no answer.

    Args:
        predictions: question id -> predicted answer, "" for none.
        answers: question id -> true answers, [] for none.
        null_odds: question id -> how much more likely no answer is than the predicted one.

    Returns:
        ``exact``, ``f1``, ``total``; the same of questions that have an answer, ``HasAns_…``, and
        of those that have none, ``NoAns_…``, if there are any. With null_odds also the best scores
        that are possible by changing predictions with odds above a threshold to "", and these
        thresholds: ``best_exact``, ``best_exact_thresh``, ``best_f1``, ``best_f1_thresh``. They are
        those of SQuAD's script on the same files: predictions that already are "" stay so.

    Raises:
        ValueError: a question has no prediction; or there are no questions.
    """
    _check_ids(predictions, answers)
    # Answers that consist only of articles and punctuation do not count.
    true = {
        name: [text for text in texts if normalize_answer(text)] or [""]
        for name, texts in answers.items()
    }
    scores = {
        "exact": {n: _best(compute_exact, texts, predictions[n]) for n, texts in true.items()},
        "f1": {n: _best(compute_f1, texts, predictions[n]) for n, texts in true.items()},
    }
    answered = {name for name, texts in answers.items() if texts}
    parts = {
        "": list(answers),
        "HasAns_": [name for name in answers if name in answered],
        "NoAns_": [name for name in answers if name not in answered],
    }
    metrics: dict[str, float] = {}
    for prefix, names in parts.items():
        if names:
            for score, of_question in scores.items():
                metrics[prefix + score] = _percent([of_question[name] for name in names])
            metrics[f"{prefix}total"] = len(names)
    if null_odds is not None:
        for score, of_question in scores.items():
            best, threshold = _best_threshold(predictions, of_question, null_odds, answered)
            metrics[f"best_{score}"], metrics[f"best_{score}_thresh"] = best, threshold
    return metrics


def _best_threshold(
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    null_odds: Mapping[str, float],
    answered: set[str],
) -> tuple[float, float]:
    """Returns the best score in percent, and the odds above which it predicts no answer."""
    # If no answer is predicted at all, the questions without an answer are right. Then one question
    # after another keeps its prediction, in the order of the odds.
    current = best = float(len(scores) - len(answered))
    threshold = 0.0
    for name in sorted(scores, key=null_odds.__getitem__):
        if name in answered:
            current += scores[name]
        elif predictions[name]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[name]
    return 100 * best / len(scores), threshold


def _check_ids(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> None:
    if not answers:
        raise ValueError("there are no questions to score")
    missing = answers.keys() - predictions.keys()
    if missing:
        raise ValueError(f"{len(missing)} questions have no prediction, such as {min(missing)}")


def _best(score: Callable[[str, str], float], texts: Sequence[str], prediction: str) -> float:
    return max(score(text, prediction) for text in texts)


def _percent(scores: Sequence[float]) -> float:
    return 100 * sum(scores) / len(scores)
