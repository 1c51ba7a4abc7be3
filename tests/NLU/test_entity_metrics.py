"""Scores of entities are seqeval's; other schemes of tags are converted, or reported as unread."""

import json

import pytest
from paths import FIXTURES

from transformers.data.metrics.entity_metrics import (
    Entity,
    conll_tags,
    entities_of,
    entity_metrics,
    unread_tags,
)

CASES = json.loads((FIXTURES / "entity_fixture.json").read_text())
NAMES = ("precision", "recall", "f1", "number")


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{c['scheme']}" for n, c in enumerate(CASES)])
def test_scores_are_seqevals(case):
    predictions, labels = (
        [row.split() for row in case[name]] for name in ("predictions", "labels")
    )
    scores = entity_metrics(predictions, labels)
    overall = [scores.pop(f"overall_{name}") for name in NAMES[:3]]
    assert overall == pytest.approx(case["scores"].pop("overall"), abs=1e-12)
    assert scores.pop("overall_accuracy") == pytest.approx(case["accuracy"], abs=1e-12)
    ours = {kind: [values[name] for name in NAMES] for kind, values in scores.items()}
    assert ours == {kind: pytest.approx(v, abs=1e-12) for kind, v in case["scores"].items()}


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("I-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),  # an I- that continues nothing is a start
        ("O I-PER I-PER", [("PER", 1, 3)]),
        ("B-PER E-PER S-PER E-PER", [("PER", 0, 2), ("PER", 2, 3), ("PER", 3, 4)]),
        ("B I O I", [("_", 0, 2), ("_", 3, 4)]),
        ("NOUN NOUN VERB SYM", [("NOUN", 0, 2), ("VERB", 2, 3), ("SYM", 3, 4)]),
        ("B-work-of-art", [("work-of-art", 0, 1)]),
        ("O O", []),
    ],
)
def test_entities_of_tags(tags, entities):
    assert entities_of(tags.split()) == [Entity(*each) for each in entities]


# Five entities, some right after others, to be written in each scheme.
ROW = "B-PER I-PER E-PER S-PER O B-LOC E-LOC S-PER O S-LOC"
SCHEMES = {"BILOU": ("I", "L", "U"), "BMES": ("M", "E", "S"), "BMEWO": ("M", "E", "W")}


@pytest.mark.parametrize("separator", "-_")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_schemes_are_read(scheme, separator):
    letters = dict(zip("BIESO", ["B", *SCHEMES[scheme], "O"], strict=True))
    tags = [letters[tag[0]] + tag[1:].replace("-", separator) for tag in ROW.split()]
    assert conll_tags(tags) == ROW.split()
    assert unread_tags(tags) == []
    read = [tag.partition(separator)[0] for tag in tags]
    assert conll_tags(read) == [tag.partition("-")[0] for tag in ROW.split()]


def test_a_scheme_without_a_beginning_is_read_by_its_types():
    assert conll_tags(["O", "I_PER", "L_PER"]) == ["O", "I-PER", "E-PER"]


@pytest.mark.parametrize(
    "tags",
    [
        "O B-PER I-PER E-PER S-PER",
        "NOUN VERB M U LS",  # every scheme has a B
        "O I L",
        "B-PER I-PER M-PER O",  # I-PER and M-PER would become the same
        "B-PER B_PER O",
    ],
)
def test_tags_of_no_known_scheme_stay_as_they_are(tags):
    assert conll_tags(tags.split()) == tags.split()


@pytest.mark.parametrize(
    ("tags", "unread"),
    [
        ("O B-PER I-PER", ""),
        ("NOUN VERB SYM . O", ""),
        ("O PER LOC", ""),
        ("B M E S", ""),
        ("O PER-B PER-I", "PER-B PER-I"),
        ("o b-per i-per", "b-per i-per"),
        ("O B.PER I/PER", "B.PER I/PER"),
        ("O U-PER L-PER", "U-PER L-PER"),
        ("B-PER I-PER other [CLS]", "other [CLS]"),
    ],
)
def test_tags_that_look_like_a_scheme_but_are_not_read_are_reported(tags, unread):
    assert unread_tags(tags.split()) == unread.split()


def test_an_entity_that_is_found_in_part_does_not_count():
    scores = entity_metrics([["B-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "B-LOC"]])
    assert scores["PER"] == {"precision": 0, "recall": 0, "f1": 0, "number": 1}
    assert scores["LOC"] == {"precision": 1, "recall": 1, "f1": 1, "number": 1}
    assert scores["overall_f1"] == 1 / 2
    assert scores["overall_accuracy"] == 2 / 3


@pytest.mark.parametrize("swapped", [False, True])
def test_a_type_in_predictions_or_labels_alone_scores_zero(swapped):
    rows = [[["B-PER", "O"]], [["O", "O"]]]
    scores = entity_metrics(*rows[:: -1 if swapped else 1])
    assert scores["PER"] == {"precision": 0, "recall": 0, "f1": 0, "number": int(swapped)}


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        ([["O"]], [["O", "O"]], "row 0: 1 predictions for 2 labels"),
        ([[]], [[]], "no words to score"),
        ([["O"]], [], "shorter"),
    ],
)
def test_rows_that_do_not_match_are_refused(predictions, labels, message):
    with pytest.raises(ValueError, match=message):
        entity_metrics(predictions, labels)
