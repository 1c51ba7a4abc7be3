"""Tests the metrics against cases computed by hand, and against plain implementations."""

import math

import pytest
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from scored_rows import PERFECT, REFERENCES, WORSE, WORST, plain_bleu

import metrics

PYTHON_METRICS = {
    "bleu": metrics.bleu,
    "mteval_bleu": metrics.mteval_bleu,
    "nist": metrics.nist,
    "ter": metrics.ter,
    "chrf": metrics.chrf,
}


@pytest.mark.parametrize(
    ("name", "perfect"), [("bleu", 100), ("mteval_bleu", 1), ("ter", 0), ("chrf", 1)]
)
def test_perfect_predictions(name, perfect):
    assert PYTHON_METRICS[name](REFERENCES, PERFECT) == pytest.approx(perfect)


@pytest.mark.parametrize("name", PYTHON_METRICS)
def test_worse_predictions_score_worse(name):
    good, worse, worst, nothing = (
        PYTHON_METRICS[name](REFERENCES, predictions)
        for predictions in (PERFECT, WORSE, WORST, ["", "", ""])
    )
    if name == "ter":
        assert good < worse < worst < nothing
    elif name == "bleu":  # neither of the last two has a matching 4-gram
        assert good > worse > worst == nothing == 0
    else:
        assert good > worse > worst > nothing == 0


@pytest.mark.parametrize("name", PYTHON_METRICS)
def test_order_of_references_does_not_matter(name):
    turned = [row[::-1] for row in REFERENCES]
    metric = PYTHON_METRICS[name]
    assert metric(turned, WORSE) == pytest.approx(metric(REFERENCES, WORSE), rel=1e-12)


@pytest.mark.parametrize("name", PYTHON_METRICS)
def test_order_of_rows_does_not_matter(name):
    # The last row, which has fewer references than the others, becomes the first.
    metric = PYTHON_METRICS[name]
    assert metric(REFERENCES[::-1], WORSE[::-1]) == pytest.approx(metric(REFERENCES, WORSE))


def test_bleu_by_hand():
    # The precisions are 4/5, 3/4, 2/3 and 1/2, and the lengths are equal.
    assert metrics.bleu([["a b c d e"]], ["a b c d f"]) == pytest.approx(100 * 0.2**0.25)
    # All n-grams match, but the reference of the closest length has 6 words.
    brief = metrics.bleu([["a b c d e f", "a b c d e f g h"]], ["a b c d e"])
    assert brief == pytest.approx(100 * math.exp(1 - 6 / 5))


FIVE = "a b c d e"


@pytest.mark.parametrize(
    ("references", "predictions", "closest"),
    [
        ([[FIVE + " f g h i j"]], [FIVE], 10),
        ([[FIVE + " f g h i j", ""]], [FIVE], 0),  # equally close: the shorter
        ([["", FIVE + " f g h i j"]], [FIVE], 0),
        ([[FIVE + " f g h i", ""]], [FIVE], 9),
        ([[FIVE + " f", FIVE[:-2], ""]], [FIVE], 4),
        # An empty reference compensates for a row that is too short.
        ([[FIVE + " " + FIVE + " f", ""], [FIVE + " f g"]], [FIVE, FIVE], 0 + 7),
        ([[FIVE + " " + FIVE + " f"], [FIVE + " f g"]], [FIVE, FIVE], 11 + 7),
    ],
)
def test_bleu_uses_the_closest_length(references, predictions, closest):
    length = 5 * len(predictions)
    by_hand = 100 * math.exp(min(0, 1 - closest / length))
    assert plain_bleu(references, predictions) == pytest.approx(by_hand)
    assert metrics.bleu(references, predictions) == pytest.approx(by_hand)


def test_bleu_ignores_case_only_for_e2e():
    references, predictions = (
        [["The Punter is cheap , isn't it ?"]],
        ["the punter IS cheap, isn't it?"],
    )
    assert metrics.mteval_bleu(references, predictions) == pytest.approx(1)
    assert metrics.bleu(references, predictions) < 90


@pytest.mark.parametrize(
    ("references", "prediction", "expected"),
    [
        (["a b c d"], "a c d", 1 / 4),
        (["a b c d"], "c d a b", 1 / 4),  # one shift of two words
        (["a b c d"], "A b c d", 1 / 4),  # case counts
        (["a b c d", "a b x y z c"], "a b c", 1 / 4),  # the nearest reference counts
        (["a b"], "c d e f", 2),
    ],
)
def test_ter_by_hand(references, prediction, expected):
    assert metrics.ter([references], [prediction]) == pytest.approx(expected)


def test_ter_in_several_processes_is_the_same():
    times = 1 + metrics.TER_POOL_FROM // len(REFERENCES)
    many = metrics.ter(REFERENCES * times, WORSE * times)
    assert many == pytest.approx(metrics.ter(REFERENCES, WORSE), rel=1e-12)


def test_ter_is_the_mean_of_the_rows_lowest_rates():
    """Edits and words are not summed over rows: a short row counts as much as a long one."""
    references = [["a b c d e f g h", "x"], ["a b"]]
    assert metrics.ter(references, ["a b c d e f g h", "c d e f"]) == pytest.approx((0 + 2) / 2)


@pytest.mark.parametrize(
    ("references", "predictions", "expected"),
    [
        # In files, a row with fewer references than others has empty ones.
        ([["a b c d", ""]], ["a c d"], 1 / 4),
        ([["a b", ""]], ["c d e f"], 1),  # the other one's rate is 2
        ([["", "a b"]], ["c d e f"], 1),
        ([["a b", " "], ["a b"]], ["c d e f", "c d e f"], (1 + 2) / 2),
        ([[""]], [""], 1),
    ],
)
def test_a_reference_without_words_has_a_rate_of_1(references, predictions, expected):
    assert metrics.ter(references, predictions) == pytest.approx(expected)


def f2(found, predicted, right):
    precision, recall = found / predicted, found / right
    return 5 * precision * recall / (4 * precision + recall)


@pytest.mark.parametrize(
    ("references", "predictions", "expected"),
    [
        # Characters: 2 of 2 (reference: 3), 1 of 1 (2); words: 0 of 1 (1). The other orders are
        # empty, and count as 0.
        ([["abc"]], ["ab"], (f2(2, 2, 3) + f2(1, 1, 2)) / 8),
        # The reference with the highest F2 counts; a full stop is a word.
        ([["xyz", "ab."]], ["ab"], (f2(2, 2, 3) + f2(1, 1, 2) + f2(1, 1, 2)) / 8),
        # The counts of both rows are summed, then divided. An "abc" has 3 + 2 + 1 n-grams of
        # characters and one of words.
        (
            [["abc"], ["abc"]],
            ["ab", "abc"],
            (f2(5, 5, 6) + f2(3, 3, 4) + f2(1, 1, 2) + f2(1, 2, 2)) / 8,
        ),
    ],
)
def test_chrf_by_hand(references, predictions, expected):
    assert metrics.chrf(references, predictions) == pytest.approx(expected)


def test_only_e2es_bleu_smooths_an_order_without_a_match():
    """multi-bleu-detok gives 0; mteval-v13a counts half a match for the first such order."""
    references, predictions = [["a b c d e"]], ["a b c x"]
    assert metrics.bleu(references, predictions) == 0
    by_hand = (3 / 4 * 2 / 3 * 1 / 2 * (1 / 2) / 1) ** 0.25 * math.exp(1 - 5 / 4)
    assert metrics.mteval_bleu(references, predictions) == pytest.approx(by_hand)


def test_nist_of_references_without_words():
    with pytest.raises(ValueError, match="the references hold no words") as caught:
        metrics.nist([["<skipped>"]], ["a b"])
    assert "\n" not in str(caught.value)
    assert metrics.nist([["<skipped>", "a b"]], ["a b"]) > 0


def test_cider_of_references_without_words():
    with pytest.raises(ValueError, match="the references hold no words"):
        metrics.cider([["", ""], [""]], ["a b", ""])


@pytest.mark.parametrize(
    ("references", "prediction", "expected"),
    [
        # Each of three words occurs once, so it is worth log2 3. Longer n-grams are worth 0.
        (["a b c"], "a b c", math.log2(3)),
        (["a b c"], "a b", math.log2(3) / 2),  # 2/3 as long
        # Of six words, a is worth log2(6/3), b and c log2(6/1); the pairs a b and a c log2(3/1).
        # The second a does not match, because no single reference has two.
        (["a b d", "a c", "a"], "a b a c", (1 + 2 * math.log2(6)) / 4 + 2 * math.log2(3) / 3),
        # Of 12 words, f is worth log2 12, the others log2 6. The pair e f is worth log2(2/1), as is
        # each longer n-gram that ends in f. Those of more than five words do not count.
        (
            ["a b c d e f", "a b c d e g"],
            "a b c d e f",
            (5 * math.log2(6) + math.log2(12)) / 6 + 1 / 5 + 1 / 4 + 1 / 3 + 1 / 2,
        ),
    ],
)
def test_nist_by_hand(references, prediction, expected):
    assert metrics.nist([references], [prediction]) == pytest.approx(expected)


def plain_nist(references, predictions):
    """Computes NIST by its definition, one length of n-grams after the other."""
    split = Tokenizer13a()
    rows = [[split(text.lower()).split() for text in row] for row in references]
    systems = [split(text.lower()).split() for text in predictions]
    everything = [reference for row in rows for reference in row]

    def grams(words, n):
        return [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]

    total = 0.0
    for n in range(1, 6):
        gained, possible = 0.0, 0
        for row, system in zip(rows, systems, strict=True):
            found = grams(system, n)
            possible += len(found)
            for gram in set(found):
                most = max(grams(reference, n).count(gram) for reference in row)
                if most == 0:
                    continue
                whole = sum(grams(reference, n).count(gram) for reference in everything)
                if n == 1:
                    start = sum(map(len, everything))
                else:
                    first = gram.rsplit(" ", 1)[0]
                    start = sum(grams(ref, n - 1).count(first) for ref in everything)
                gained += min(found.count(gram), most) * math.log(start / whole, 2)
        if possible:
            total += gained / possible
    ratio = sum(map(len, systems)) / sum(sum(map(len, row)) / len(row) for row in rows)
    if ratio < 1:
        total *= 0.5 ** ((math.log(ratio) / math.log(2 / 3)) ** 2)
    return total


@pytest.mark.parametrize("predictions", [PERFECT, WORSE, WORST])
def test_nist_is_that_of_a_plain_implementation(predictions):
    expected = plain_nist(REFERENCES, predictions)
    assert metrics.nist(REFERENCES, predictions) == pytest.approx(expected, rel=1e-12)
