"""Question answering: answers as token positions, texts as rows, and logits as answers."""

import math
from itertools import pairwise

import numpy as np
import pytest

from transformers import AutoTokenizer
from transformers.data.question_answering import (
    Answer,
    Candidate,
    Span,
    answers_of,
    positions_of,
    rows_of,
)

NONE = [-1, -1]
TEXT = "Ann saw a red house"
#        <s> who </s> | Ann     saw     a       red       house     </s>
OFFSETS = [NONE, NONE, NONE, [0, 3], [4, 7], [8, 9], [10, 13], [14, 19], NONE]


# ---- answers as tokens ----


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("Ann", (3, 3)),
        ("a red house", (5, 7)),
        (TEXT, (3, 7)),
        ("ed hou", (6, 7)),  # tokens that cover more than the words
        (" red", (6, 6)),  # a space belongs to no token
        ("Ann ", (3, 3)),
    ],
)
def test_an_answer_is_the_smallest_range_of_tokens_that_covers_it(words, tokens):
    start = TEXT.index(words)
    assert positions_of(Span(start, start + len(words)), OFFSETS) == tokens


@pytest.mark.parametrize(
    ("span", "offsets"),
    [
        (None, OFFSETS),
        (Span(0, 3), [NONE, *OFFSETS[4:]]),  # the answer is in an earlier row
        (Span(4, 19), OFFSETS[:-2]),  # its end is in a later row
        (Span(0, 3), [NONE, NONE]),  # a row with the question alone
    ],
)
def test_a_row_without_the_whole_answer_has_no_answer(span, offsets):
    assert positions_of(span, offsets) == (0, 0)


def test_a_character_of_several_tokens_has_all_of_them():
    offsets = [NONE, [0, 1], [2, 3], [2, 3], [2, 3], [4, 5], NONE]  # a character of three tokens
    assert positions_of(Span(2, 3), offsets) == (2, 4)
    assert positions_of(Span(0, 3), offsets) == (1, 4)
    assert positions_of(Span(1, 2), offsets) == (0, 0)  # a space alone has no token


@pytest.mark.parametrize("answer", ["日", "😀", "é", " dog", "dog ", " 日本 "])
def test_an_answer_s_tokens_cover_its_characters(tokenizer, answer):
    text = f"the {answer} is".replace("  ", " ")
    start = text.index(answer)
    rows = rows_of(tokenizer, ["a"], [text], [(start, start + len(answer))], 40, 3)
    first, last = rows["start_positions"][0], rows["end_positions"][0]
    assert 0 < first <= last
    offsets = rows["offsets"][0]
    assert text[offsets[first][0] : offsets[last][1]].strip() == answer.strip()


# ---- texts as rows ----

TEXT_OF_PARTS = "the warm dog sees a cold river near this quiet house and the cat runs"


@pytest.fixture(params=["tiny_base", "tiny_deberta_base"])
def tokenizer(request):
    return AutoTokenizer.from_pretrained(request.getfixturevalue(request.param))


@pytest.mark.parametrize(("length", "stride"), [(40, 5), (16, 3), (16, 0), (12, 4)])
def test_rows_of_a_text_cover_all_of_it(tokenizer, length, stride):
    texts = [TEXT_OF_PARTS, "a dog"]
    questions = ["the cat", "this"]
    spans = [Span(*range_of(texts[0], "quiet house")), None]
    rows = rows_of(tokenizer, questions, texts, spans, length, stride)
    assert set(map(len, rows["input_ids"])) <= {*range(length + 1)}
    rows_offsets = [[offset for offset in offsets if offset != NONE] for offsets in rows["offsets"]]
    for example, text in enumerate(texts):
        parts = [
            part for part, of in zip(rows_offsets, rows["example"], strict=True) if of == example
        ]
        covered = {place for part in parts for start, end in part for place in range(start, end)}
        assert covered >= {place for place, letter in enumerate(text) if letter != " "}
        for one, next_one in pairwise(parts):
            assert one[len(one) - stride :] == next_one[:stride]
    for row, example in enumerate(rows["example"]):
        first, last = rows["start_positions"][row], rows["end_positions"][row]
        offsets = rows["offsets"][row]
        if first == 0:
            assert last == 0
        else:
            found = texts[example][offsets[first][0] : offsets[last][1]]
            assert (example, found.strip()) == (0, "quiet house")
    # In short rows, the answer may be split, so that no row holds all of it.
    assert length < 40 or max(rows["start_positions"]) > 0


def range_of(text: str, words: str) -> tuple[int, int]:
    start = text.index(words)
    return start, start + len(words)


def test_pad_to_max_length_pads_ids_and_offsets(tokenizer):
    rows = rows_of(tokenizer, ["a"], ["the dog"], None, 20, 3, pad_to_max_length=True)
    assert [len(row) for row in rows["input_ids"] + rows["offsets"]] == [20, 20]
    assert rows["offsets"][0][-1] == NONE
    assert "start_positions" not in rows


# ---- logits as answers ----


def logits_of(length: int, **best: tuple[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Start and end logits of one row: 0 except at one token each."""
    rows = np.zeros((2, 1, length), dtype=np.float32)
    for side, name in enumerate(("start", "end")):
        token, value = best[name]
        rows[side, 0, token] = value
    return tuple(rows)


def test_an_answer_excludes_the_space_of_its_first_token():
    """SentencePiece's tokens include the space before them; an answer of spaces alone stays."""
    offsets = [NONE, [0, 3], [3, 7], [7, 8]]
    both = logits_of(4, start=(2, 3.0), end=(2, 2.0))
    (answer,) = answers_of(["the dog  "], [0], [offsets], *both)
    assert answer.text == "dog"
    both = logits_of(4, start=(3, 3.0), end=(3, 2.0))
    assert answers_of(["the dog  "], [0], [offsets], *both)[0].text == " "


def test_the_best_range_of_tokens_is_the_answer():
    (answer,) = answers_of([TEXT], [0], [OFFSETS], *logits_of(9, start=(5, 3.0), end=(7, 2.0)))
    assert answer.text == "a red house"
    assert answer.best[0] == Candidate("a red house", 3.0, 2.0)
    assert answer.null_odds is None


def test_candidates_are_ranked_as_by_brute_force():
    generator = np.random.default_rng(0)
    start, end = generator.normal(size=(2, 1, 9)).astype(np.float32)
    (answer,) = answers_of([TEXT], [0], [OFFSETS], start, end, 100, max_answer_length=3)
    every = [
        (float(start[0, i] + end[0, j]), TEXT[OFFSETS[i][0] : OFFSETS[j][1]])
        for i in range(3, 8)
        for j in range(i, min(i + 3, 8))
    ]
    assert [each.text for each in answer.best] == [text for _, text in sorted(every)[::-1]]
    rows = answer.as_rows()
    assert sum(row["probability"] for row in rows) == pytest.approx(1)
    assert math.log(rows[0]["probability"] / rows[1]["probability"]) == pytest.approx(
        answer.best[0].score - answer.best[1].score, rel=1e-5
    )


def test_probabilities_do_not_overflow():
    answer = Answer("a", tuple(Candidate("a", score, score) for score in (800.0, 0.0, -800.0)))
    assert [row["probability"] for row in answer.as_rows()] == [1, 0, 0]


def test_candidates_are_among_the_best_starts_and_ends():
    """With an n_best_size of 1, an end before the start leaves no candidate."""
    best = {"start": (7, 1.0), "end": (3, 1.0)}
    (answer,) = answers_of([TEXT], [0], [OFFSETS], *logits_of(9, **best), n_best_size=1)
    assert answer == Answer("", (Candidate("", 0.0, 0.0),))
    assert [row["probability"] for row in answer.as_rows()] == [1]


def test_question_and_padding_are_no_answers():
    start, end = np.full((1, 12), 5.0), np.full((1, 12), 5.0)  # the last three columns are padding
    (answer,) = answers_of([TEXT], [0], [OFFSETS], start, end, 100, 100)
    assert len(answer.best) == 5 * 6 / 2


def test_rows_of_one_question_have_one_answer():
    """The best answer of all parts wins; "no answer" has the lowest score of any part."""
    first, second = [NONE, NONE, [0, 3], [4, 7]], [NONE, NONE, [10, 13], [14, 19]]
    start = np.array([[1.0, 0, 2, 0], [5.0, 0, 0, 4]])
    end = np.array([[1.0, 0, 2, 0], [5.0, 0, 0, 4]])
    other = np.array([[0.0, 0, 9, 0]])
    answers = answers_of(
        [TEXT, "Bob"],
        [0, 1, 0],
        [first, [NONE, NONE, [0, 3]], second],
        np.insert(start, 1, other, axis=0),
        np.insert(end, 1, other, axis=0),
        may_be_none=True,
    )
    assert [answer.text for answer in answers] == ["house", "Bob"]
    assert answers[0].null_odds == (1 + 1) - (4 + 4)


@pytest.mark.parametrize(
    ("threshold", "text"), [(0.0, ""), (0.9, ""), (1.0, "Ann"), (1.5, "Ann"), (-1.0, "")]
)
def test_the_empty_answer_wins_if_its_odds_exceed_the_threshold(threshold, text):
    offsets = [NONE, [0, 3]]
    start, end = np.array([[1.5, 1.0]]), np.array([[1.5, 1.0]])
    (answer,) = answers_of(
        [TEXT], [0], [offsets], start, end, may_be_none=True, null_score_diff_threshold=threshold
    )
    assert answer.null_odds == pytest.approx(1.0)
    assert answer.text == text
    assert [each.text for each in answer.best] == ["", "Ann"]


def test_the_empty_answer_stays_among_the_n_best():
    start, end = np.array([[-9.0, 1, 2, 3]]), np.array([[-9.0, 1, 2, 3]])
    offsets = [NONE, [0, 3], [4, 7], [8, 9]]
    (answer,) = answers_of([TEXT], [0], [offsets], start, end, n_best_size=2, may_be_none=True)
    assert [each.text for each in answer.best] == ["a", "saw a", ""]


def test_a_text_without_tokens_has_no_answer():
    start, end = np.array([[1.0, 2.0]]), np.array([[1.0, 2.0]])
    (answer,) = answers_of(["\u200b"], [0], [[NONE, NONE]], start, end, may_be_none=True)
    assert (answer.text, answer.null_odds) == ("", 2.0)
