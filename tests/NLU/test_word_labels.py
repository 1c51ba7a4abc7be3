"""Tags of words as labels of tokens, and back."""

import numpy as np
import pytest

from transformers.data.word_labels import (
    first_tokens,
    label_tokens,
    labels_of_words,
    tags_of_labels,
    tags_of_words,
)

NAMES = ["O", "B-PER", "I-PER"]
# <s>, four words, </s> and padding: the second word has three tokens, and the third has none.
WORD_IDS = [None, 0, 1, 1, 1, 3, None, None]
LABELS = [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("all_tokens", "expected"),
    [
        (False, [-100, 0, 1, -100, -100, 0, -100, -100]),
        (True, [-100, 0, 1, 1, 1, 0, -100, -100]),
    ],
)
def test_a_word_s_first_token_or_all_of_its_tokens_are_labeled(all_tokens, expected):
    assert label_tokens(WORD_IDS, LABELS, all_tokens) == expected


def test_first_tokens():
    assert first_tokens(WORD_IDS) == {0: 1, 1: 2, 3: 5}
    assert first_tokens([None]) == {}


def logits_of(numbers: list[list[int]]) -> np.ndarray:
    """Makes logits, (rows, tokens, labels), that are largest at these labels."""
    return np.eye(len(NAMES))[np.array(numbers)]


def test_only_first_tokens_keep_the_words_labels():
    labels = np.array([[-100, 0, 1, 1, 1, 0], [-100, 2, 2, -100, -100, -100]])
    words = labels_of_words(labels, [[1, 2, -1, 5], [1]])
    assert words.tolist() == [[-100, 0, 1, -100, -100, 0], [-100, 2, *[-100] * 4]]


def test_only_labeled_tokens_have_tags():
    logits = logits_of([[2, 0, 1, 2], [1, 1, 1, 1]])
    labels = np.array([[-100, 0, 2, -100], [1, -100, -100, 0]])
    predicted, true = tags_of_labels(logits, labels, NAMES)
    assert predicted == [["O", "B-PER"], ["B-PER", "B-PER"]]
    assert true == [["O", "I-PER"], ["B-PER", "O"]]


def test_each_word_has_a_tag():
    """Words without tokens, such as those that were cut off, have the tag "_"."""
    logits = logits_of([[0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 0, 0]])
    tags = tags_of_words(logits, [[1, 2, -1, 5], [1]], NAMES)
    assert tags == [["O", "B-PER", "_", "I-PER"], ["B-PER"]]
