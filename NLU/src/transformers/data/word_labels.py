"""Converts the tags of words to labels of tokens, and logits back to tags.

Tokenizers split words. A word's tag becomes the label of its first token, and the loss ignores the
word's other tokens, unless all of them are to get its tag.
"""

from collections.abc import Sequence

import numpy as np

from ..modeling_losses import IGNORED_LABEL

# Stands in predictions for a word that the model has not seen: it was cut off, or has no tokens.
UNSEEN = "_"


def label_tokens(
    word_ids: Sequence[int | None], labels: Sequence[int], all_tokens: bool = False
) -> list[int]:
    """Returns the labels of a row's tokens.

    Args:
        word_ids: the word of each token; None for special tokens and padding.
        labels: the label of each word.
        all_tokens: label all of a word's tokens, not only the first.
    """
    firsts = set(first_tokens(word_ids).values())
    return [
        labels[word] if word is not None and (all_tokens or token in firsts) else IGNORED_LABEL
        for token, word in enumerate(word_ids)
    ]


def first_tokens(word_ids: Sequence[int | None]) -> dict[int, int]:
    """Returns word -> its first token, for the words that a row has tokens of."""
    firsts: dict[int, int] = {}
    for token, word in enumerate(word_ids):
        if word is not None:
            firsts.setdefault(word, token)
    return firsts


def labels_of_words(labels: np.ndarray, firsts: Sequence[Sequence[int]]) -> np.ndarray:
    """Keeps the labels of words' first tokens, and sets those of all other tokens to -100.

    Args:
        labels: (rows, tokens), -100 where there is none.
        firsts: for each row, each word's first token, -1 if it has none.
    """
    kept = np.full_like(labels, IGNORED_LABEL)
    for row, tokens in enumerate(firsts):
        seen = [token for token in tokens if token >= 0]
        kept[row, seen] = labels[row, seen]
    return kept


def tags_of_labels(
    logits: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the predicted and the true tags of all tokens that have a label.

    Args:
        logits: (rows, tokens, labels).
        labels: (rows, tokens), -100 where there is none.
        names: the labels' names.

    Returns:
        Predictions and truth, each with one list per row.
    """
    numbers = logits.argmax(axis=-1)
    both = ([], [])
    for row, known in enumerate(labels != IGNORED_LABEL):
        for tags, values in zip(both, (numbers[row], labels[row]), strict=True):
            tags.append([names[number] for number in values[known]])
    return both


def tags_of_words(
    logits: np.ndarray, firsts: Sequence[Sequence[int]], names: Sequence[str]
) -> list[list[str]]:
    """Returns the tags of each row's words, `UNSEEN` for a word without tokens.

    Args:
        logits: (rows, tokens, labels).
        firsts: for each row, each word's first token, -1 if it has none.
        names: the labels' names.
    """
    numbers = logits.argmax(axis=-1)
    return [
        [UNSEEN if token < 0 else names[row[token]] for token in tokens]
        for row, tokens in zip(numbers, firsts, strict=True)
    ]
