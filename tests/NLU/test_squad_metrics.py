"""SQuAD's scores follow their definitions."""

import random

import pytest

from transformers.data.metrics.squad_metrics import (
    compute_exact,
    compute_f1,
    normalize_answer,
    squad_metrics,
    squad_v2_metrics,
)


def test_normalizing_drops_case_articles_punctuation_and_spaces():
    assert normalize_answer("  The Cat,  an owl & a\tdog! ") == "cat owl dog"
    assert normalize_answer("Theatre a-b") == "theatre ab"
    assert normalize_answer("the") == ""


@pytest.mark.parametrize(
    ("answer", "prediction", "exact", "f1"),
    [
        ("the Eiffel Tower", "Eiffel tower.", 1, 1),
        ("Eiffel Tower", "tower", 0, 2 / 3),
        ("one one two", "one one one", 0, 2 / 3),
        ("Paris", "Rome", 0, 0),
        ("", "Rome", 0, 0),
        ("", "", 1, 1),
        ("the", "a", 1, 1),
    ],
)
def test_scores_of_one_answer(answer, prediction, exact, f1):
    assert compute_exact(answer, prediction) == exact
    assert compute_f1(answer, prediction) == pytest.approx(f1)
    assert compute_f1(prediction, answer) == pytest.approx(f1)


def test_the_best_of_several_true_answers_counts():
    predictions = {"1": "in Paris", "2": "no"}
    answers = {"1": ["Lyon", "Paris"], "2": ["yes"]}
    assert squad_metrics(predictions, answers) == {
        "exact_match": 0,
        "f1": pytest.approx(100 * (2 / 3) / 2),
    }
    predictions["1"] = "PARIS"
    assert squad_metrics(predictions, answers) == {"exact_match": 50, "f1": 50}


def test_answers_of_articles_alone():
    """As in the official scripts: 1.1 finds no common words in them, and 2.0 no answer."""
    assert squad_metrics({"1": "the"}, {"1": ["a"]}) == {"exact_match": 100, "f1": 0}
    scores = squad_v2_metrics({"1": "the"}, {"1": ["a"]})
    assert (scores["exact"], scores["f1"]) == (100, 100)
    scores = squad_v2_metrics({"1": "the"}, {"1": ["a", "cat"]})
    assert (scores["exact"], scores["f1"]) == (0, 0)


def test_scores_with_questions_that_have_no_answer():
    predictions = {"1": "Paris", "2": "", "3": "Rome", "4": ""}
    answers = {"1": ["Paris"], "2": ["Lyon"], "3": [], "4": []}
    assert squad_v2_metrics(predictions, answers) == {
        **{"exact": 50, "f1": 50, "total": 4},
        **{"HasAns_exact": 50, "HasAns_f1": 50, "HasAns_total": 2},
        **{"NoAns_exact": 50, "NoAns_f1": 50, "NoAns_total": 2},
    }
    only = squad_v2_metrics({"1": "Paris"}, {"1": ["Paris"]})
    assert not [name for name in only if name.startswith("NoAns")]


def test_the_lowest_of_equally_good_thresholds_is_given():
    """As in SQuAD's script, where only a better threshold replaces an earlier one."""
    predictions, answers = {"1": "a", "2": "b", "3": "c"}, {"1": ["a"], "2": [], "3": ["c"]}
    scores = squad_v2_metrics(predictions, answers, {"1": -1.0, "2": 0.5, "3": 1.0})
    for score in ("exact", "f1"):
        assert scores[f"best_{score}"] == pytest.approx(100 * 2 / 3)
        assert scores[f"best_{score}_thresh"] == -1


@pytest.mark.parametrize("seed", range(5))
def test_best_thresholds_are_the_best_of_all(seed):
    """Compared with every possible threshold; odds above it mean no answer."""
    chance = random.Random(seed)
    words = ["red", "green", "blue"]
    answers, predictions, odds = {}, {}, {}
    for number in range(12):
        name = str(number)
        answers[name] = [" ".join(chance.choices(words, k=2))] if chance.random() < 0.6 else []
        predictions[name] = " ".join(chance.choices(words, k=2)) if chance.random() < 0.8 else ""
        odds[name] = chance.uniform(-5, 5)
    scores = squad_v2_metrics(predictions, answers, odds)
    for score in ("exact", "f1"):
        tried = {}
        for threshold in (min(odds.values()) - 1, *odds.values()):
            answered = {n: "" if odds[n] > threshold else text for n, text in predictions.items()}
            tried[threshold] = squad_v2_metrics(answered, answers)[score]
        assert scores[f"best_{score}"] == pytest.approx(max(tried.values()))
        threshold = scores[f"best_{score}_thresh"]
        if threshold:  # SQuAD's script gives 0 if no threshold is better than answering nothing
            assert tried[threshold] == pytest.approx(scores[f"best_{score}"])


def test_the_search_for_a_threshold_counts_answers_of_articles_as_answers():
    """As in SQuAD's script, which here looks at whether there are answers, not at their words.

    The search begins with the point of "4", which has no answer. "1" adds a point, as its answer is
    empty once normalized and "" is predicted; "2" adds none, "3" adds one, and "4" loses its point.
    """
    answers = {"1": ["the"], "2": ["..."], "3": ["Paris"], "4": []}
    predictions = {"1": "", "2": "Rome", "3": "Paris", "4": "Rome"}
    odds = {"1": -2.0, "2": -1.0, "3": 0.5, "4": 1.0}
    scores = squad_v2_metrics(predictions, answers, odds)
    for score in ("exact", "f1"):
        assert (scores[f"best_{score}"], scores[f"best_{score}_thresh"]) == (75, 0.5)
    assert (scores["HasAns_total"], scores["NoAns_total"]) == (3, 1)


@pytest.mark.parametrize(
    ("predictions", "answers", "message"),
    [
        ({}, {}, "no questions"),
        ({"1": "a"}, {"1": ["a"], "2": ["b"]}, "1 questions have no prediction, such as 2"),
        ({"1": "a"}, {"1": []}, "question 1 has no answer; SQuAD 2.0 is for such questions"),
    ],
)
def test_missing_predictions_or_answers_are_errors(predictions, answers, message):
    with pytest.raises(ValueError, match=message):
        squad_metrics(predictions, answers)
