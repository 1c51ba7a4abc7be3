"""Tagged words: from words and their tags to rows of tokens, and from logits to tags.

Tokenizers split words: a word's tag is its first token's, the other tokens have no part in the
loss, unless all of a word's tokens are to have its tag.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .data_collator import IGNORED_LABEL

# In a line of predictions, a word that the model has not seen: cut off, or without tokens.
UNSEEN = "_"


def label_tokens(
    word_ids: Sequence[int | None], labels: Sequence[int], all_tokens: bool = False
) -> list[int]:
    """The labels of a row's tokens.

    Args:
        word_ids: the word of each token; None for special tokens and padding.
        labels: of each word.
        all_tokens: label all of a word's tokens, not the first alone.
    """
    firsts = set(first_tokens(word_ids).values())
    return [
        labels[word] if word is not None and (all_tokens or token in firsts) else IGNORED_LABEL
        for token, word in enumerate(word_ids)
    ]


def first_tokens(word_ids: Sequence[int | None]) -> dict[int, int]:
    """The words that a row has tokens of -> their first tokens."""
    firsts: dict[int, int] = {}
    for token, word in enumerate(word_ids):
        if word is not None:
            firsts.setdefault(word, token)
    return firsts


def labels_of_words(labels: np.ndarray, firsts: Sequence[Sequence[int]]) -> np.ndarray:
    """The labels of words alone: -100 at all other tokens than their first.

    Args:
        labels: (rows, tokens), -100 where there is none.
        firsts: each word's first token by row, -1 where it has none.
    """
    kept = np.full_like(labels, IGNORED_LABEL)
    for row, tokens in enumerate(firsts):
        seen = [token for token in tokens if token >= 0]
        kept[row, seen] = labels[row, seen]
    return kept


def tags_of_labels(
    logits: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> tuple[list[list[str]], list[list[str]]]:
    """The tags predicted and the true ones, of all tokens that have a label.

    Args:
        logits: (rows, tokens, labels).
        labels: (rows, tokens), -100 where there is none.
        names: of the labels.

    Returns:
        Predictions and truth, a list each a row.
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
    """The tags of each row's words, `UNSEEN` where a word has no token.

    Args:
        logits: (rows, tokens, labels).
        firsts: each word's first token by row, -1 where it has none.
        names: of the labels.
    """
    numbers = logits.argmax(axis=-1)
    return [
        [UNSEEN if token < 0 else names[row[token]] for token in tokens]
        for row, tokens in zip(numbers, firsts, strict=True)
    ]
