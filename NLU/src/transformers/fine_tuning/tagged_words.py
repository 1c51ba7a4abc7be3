"""Finds and checks the columns of sentences of tagged words, from files or the hub.

A row has words and as many tags: {"tokens": ["John", "lives"], "ner_tags": ["B-PER", "O"]}.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loralib.text import as_json, in_short

from .data_sets import Table

if TYPE_CHECKING:
    from datasets import Features

logger = logging.getLogger(__name__)

WORDS, TAGS = "words", "tags"
# Column names that tell words from tags. They serve to notice columns in the wrong order.
_NAMES_OF_WORDS = ("words", "tokens")
_ENDS_WITH_TAGS = re.compile(r"(.*[^a-z])?(tags?|labels?)", re.IGNORECASE)  # and not hashtags
_SAY_OTHERS = "name the columns with --text_column_name and --label_column_name"


@dataclass(frozen=True)
class TaggedWords:
    """Sentences by split.

    Args:
        tables: the sentences. Their columns are `WORDS` and `TAGS` (numbers); a test set may lack
            the latter.
        labels: the tags' names, in the order of their numbers.
    """

    tables: dict[str, Table]
    labels: tuple[str, ...]


def check_sentences(
    tables: Mapping[str, Table],
    words: str | None,
    tags: str | None,
    task: str,
    known: tuple[str, ...],
) -> TaggedWords:
    """Checks the sentences, and returns them with their tags as numbers.

    Args:
        tables: the sentences by split. The test set need not have tags.
        words: the words' column. If None: "tokens" or, without such a column, the first one.
        tags: the tags' column. If None: <task>_tags or, without such a column, the second one.
        task: the task's name, such as "ner".
        known: the tags of an already trained model. They keep their order. Without a training set
            there have to be some.

    Raises:
        ValueError: a column is missing, words and tags cannot be told apart, a word is empty or no
            string, a row has more or fewer tags than words, or a tag is unknown.
    """
    first = next(iter(tables.values()))
    words, tags = _columns(first, words, tags, task)
    sentences: dict[str, Table] = {}
    for split, table in tables.items():
        used = {words: WORDS, tags: TAGS}
        if split == "test" and tags not in table.rows.column_names:
            del used[tags]
        table.check_columns(list(used), f"; {_SAY_OTHERS}")
        table = table.decoded(*used, hint=f" (if this is the wrong column, {_SAY_OTHERS})")
        if split == "test" and tags in used and _are_hidden(table, tags):
            del used[tags]
        _check_words(table, words)
        if TAGS in used.values():
            _check_counts(table, words, tags)
        sentences[split] = table.taking(used)
    labels = _labels(sentences, known)
    logger.info("%s: words from %s; tags from %s: %s", first.source, words, tags, in_short(labels))
    numbered = {
        split: _number(table, labels) if TAGS in table.rows.column_names else table
        for split, table in sentences.items()
    }
    return TaggedWords(numbered, labels)


def _are_hidden(table: Table, name: str) -> bool:
    """Returns whether a test set's tags are hidden: the hub has -1 in their place.

    Next to rows of -1, rows without any tags count as hidden, too.
    """
    rows = table.column(name)
    hidden = [isinstance(tags, list) and -1 in tags for tags in rows]
    if any(hidden):
        hidden = [is_so or _are_none(tags) for is_so, tags in zip(hidden, rows, strict=True)]
    return table.all_hidden(name, hidden)


def _are_none(tags: Any) -> bool:
    return tags is None or (isinstance(tags, list) and all(tag is None for tag in tags))


def _columns(table: Table, words: str | None, tags: str | None, task: str) -> tuple[str, str]:
    """Returns the columns of words and tags: those given, else by usual name, else by position.

    Raises:
        ValueError: both are the same column, or a column's name says that it is the other kind.
    """
    words_at = words or _usual(table, "tokens", 0)
    tags_at = tags or _usual(table, f"{task}_tags", 1)
    if tags is None and tags_at == words_at:
        tags_at = f"{task}_tags"  # missing (which is reported later); the second column has words
    swapped = (words is None and _ENDS_WITH_TAGS.fullmatch(words_at) is not None) or (
        tags is None and tags_at in _NAMES_OF_WORDS
    )
    if words_at == tags_at or swapped:
        raise ValueError(
            f"{table.source}: would take its words from '{words_at}' and its tags from "
            f"'{tags_at}'; {_SAY_OTHERS}"
        )
    return words_at, tags_at


def _usual(table: Table, name: str, place: int) -> str:
    """Returns `name` if there is such a column, else the name of the column at `place`.

    If there is no column at `place` either, returns `name`, which the caller reports as missing.
    """
    names = table.rows.column_names
    return name if name in names or place >= len(names) else names[place]


def _check_words(table: Table, name: str) -> None:
    for row, words in enumerate(table.column(name)):
        if not isinstance(words, list):
            raise table.wrong(row, f"its {name} is not a list of words ({as_json(words)})")
        if not words:
            raise table.wrong(row, f"its {name} holds no words")
        for number, word in enumerate(words, start=1):
            if not isinstance(word, str) or not word.strip():
                what = "empty" if word is None or isinstance(word, str) else "not a text"
                raise table.wrong(row, f"word {number} of its {name} is {what} ({as_json(word)})")


def _check_counts(table: Table, words: str, tags: str) -> None:
    both = zip(table.column(words), table.column(tags), strict=True)
    for row, (row_words, row_tags) in enumerate(both):
        if not isinstance(row_tags, list):
            raise table.wrong(row, f"its {tags} is not a list of tags ({as_json(row_tags)})")
        if len(row_words) != len(row_tags):
            raise table.wrong(
                row, f"has {len(row_words)} words in {words}, but {len(row_tags)} tags in {tags}"
            )
        for number, tag in enumerate(row_tags, start=1):
            # A negative number, such as -1 or -100, stands for no tag.
            if not isinstance(tag, str | int) or tag == "" or (type(tag) is int and tag < 0):
                raise table.wrong(
                    row, f"tag {number} of its {tags} is missing or not a tag ({as_json(tag)})"
                )


def _labels(tables: Mapping[str, Table], known: Sequence[str]) -> tuple[str, ...]:
    """Returns the tags in the model's order, else in the dataset's, else those that occur, sorted.

    With a training set, the model's order is used only if the model knows all of its tags.
    """
    train = tables.get("train")
    if train is None:
        return tuple(known)
    named = _names_in(train.rows.features)
    if named:
        return tuple(known) if {*named} <= {*known} else named
    found = {str(tag) for tags in train.column(TAGS) for tag in tags}
    if found <= set(known):
        return tuple(known)
    of_numbers = all(tag.isdecimal() for tag in found)
    return tuple(sorted(found, key=int if of_numbers else None))


def _names_in(features: Features) -> tuple[str, ...]:
    """Returns the tags' names if the dataset stores tags as numbers (ClassLabel), else ()."""
    inner = getattr(features[TAGS], "feature", None)
    return tuple(getattr(inner, "names", None) or ())


def _number(table: Table, labels: tuple[str, ...]) -> Table:
    """Returns the table with its tags as numbers."""
    named = _names_in(table.rows.features)
    numbers = {label: number for number, label in enumerate(labels)}
    numbered = []
    for row, tags in enumerate(table.column(TAGS)):
        words = [named[tag] if named else str(tag) for tag in tags]
        for place, word in enumerate(words, start=1):
            if word not in numbers:
                raise table.wrong(
                    row, f"tag {place}: unknown tag '{word:.60}' (expected {in_short(labels)})"
                )
        numbered.append([numbers[word] for word in words])
    return table.with_column(TAGS, numbered)
