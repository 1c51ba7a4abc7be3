"""SQuAD's scores against their definitions."""

import random

import pytest

from transformers.data.metrics.squad_metrics import (
    compute_exact,
    compute_f1,
    normalize_answer,
    squad_metrics,
    squad_v2_metrics,
)


def test_what_does_not_count_in_an_answer():
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
def test_one_answer(answer, prediction, exact, f1):
    assert compute_exact(answer, prediction) == exact
    assert compute_f1(answer, prediction) == pytest.approx(f1)
    assert compute_f1(prediction, answer) == pytest.approx(f1)


def test_of_several_true_answers_the_best_counts():
    predictions = {"1": "in Paris", "2": "no"}
    answers = {"1": ["Lyon", "Paris"], "2": ["yes"]}
    assert squad_metrics(predictions, answers) == {
        "exact_match": 0,
        "f1": pytest.approx(100 * (2 / 3) / 2),
    }
    predictions["1"] = "PARIS"
    assert squad_metrics(predictions, answers) == {"exact_match": 50, "f1": 50}


def test_articles_alone_as_in_either_script():
    """An answer of articles has no words to share in 1.1; in 2.0 it is no answer."""
    assert squad_metrics({"1": "the"}, {"1": ["a"]}) == {"exact_match": 100, "f1": 0}
    scores = squad_v2_metrics({"1": "the"}, {"1": ["a"]})
    assert (scores["exact"], scores["f1"]) == (100, 100)
    scores = squad_v2_metrics({"1": "the"}, {"1": ["a", "cat"]})
    assert (scores["exact"], scores["f1"]) == (0, 0)


def test_with_questions_that_have_no_answer():
    predictions = {"1": "Paris", "2": "", "3": "Rome", "4": ""}
    answers = {"1": ["Paris"], "2": ["Lyon"], "3": [], "4": []}
    assert squad_v2_metrics(predictions, answers) == {
        **{"exact": 50, "f1": 50, "total": 4},
        **{"HasAns_exact": 50, "HasAns_f1": 50, "HasAns_total": 2},
        **{"NoAns_exact": 50, "NoAns_f1": 50, "NoAns_total": 2},
    }
    only = squad_v2_metrics({"1": "Paris"}, {"1": ["Paris"]})
    assert not [name for name in only if name.startswith("NoAns")]


def test_of_thresholds_that_are_as_good_the_least_is_given():
    """As SQuAD's script does: only a better one replaces it."""
    predictions, answers = {"1": "a", "2": "b", "3": "c"}, {"1": ["a"], "2": [], "3": ["c"]}
    scores = squad_v2_metrics(predictions, answers, {"1": -1.0, "2": 0.5, "3": 1.0})
    for score in ("exact", "f1"):
        assert scores[f"best_{score}"] == pytest.approx(100 * 2 / 3)
        assert scores[f"best_{score}_thresh"] == -1


@pytest.mark.parametrize("seed", range(5))
def test_best_thresholds_are_the_best_there_are(seed):
    """Every threshold is tried: odds above it become no answer."""
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
            kept = {n: "" if odds[n] > threshold else text for n, text in predictions.items()}
            tried[threshold] = squad_v2_metrics(kept, answers)[score]
        assert scores[f"best_{score}"] == pytest.approx(max(tried.values()))
        threshold = scores[f"best_{score}_thresh"]
        if threshold:  # 0 is what SQuAD's script gives where none is better than no answer at all
            assert tried[threshold] == pytest.approx(scores[f"best_{score}"])


def test_an_answer_of_articles_is_one_in_the_search_for_a_threshold():
    """As in SQuAD's script, which asks there whether a question has answers, whatever they are.

    It begins with the one question that has none. "1" then adds its point, as its answer is none
    once normalized and "" was predicted; "2" adds none, "3" a point, and "4" loses the first.
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
def test_what_cannot_be_scored(predictions, answers, message):
    with pytest.raises(ValueError, match=message):
        squad_metrics(predictions, answers)
