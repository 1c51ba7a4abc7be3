"""Extractive question answering: from examples to rows of tokens, and from logits to answers.

    question, text ─ rows_of ─> rows of tokens, several if the text is long ─ model ─>
    logits of each token as the answer's start and end ─ answers_of ─> n best answers per question

A row is <s> question </s></s> part of the text </s>. ``offsets`` locate the part in the text: they
are each token's characters there, (-1, -1) if it is not one of the text's. The row's first token
stands for "no answer here": in rows that do not contain their answer, it is start and end.

Source: Devlin et al. 2018, sections 4.2 and 4.3 (BERT), for rows, answers and null answers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..tokenization_utils_base import PreTrainedTokenizerBase

# The entries of a row beside those that the model takes.
EXAMPLE, OFFSETS = "example", "offsets"
NO_ANSWER = 0
"""The index of the token whose start and end logits stand for "no answer": a row's first."""


class Span(NamedTuple):
    """An answer in its text.

    Args:
        start, end: its first character, and the one after its last.
    """

    start: int
    end: int


def rows_of(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    texts: Sequence[str],
    spans: Sequence[Sequence[int] | None] | None,
    max_length: int,
    stride: int,
    pad_to_max_length: bool = False,
) -> dict[str, list]:
    """Makes rows of tokens; a long text takes several.

    Args:
        tokenizer: the model's tokenizer.
        questions, texts: one question and one text per example.
        spans: each example's answer, with the fields of `Span`, or None if it has no answer; None
            instead of a list if answers are to be predicted. Spaces around an answer are dropped.
        max_length: tokens per row, special ones included.
        stride: how many of the text's tokens a row shares with the next one.
        pad_to_max_length: pad all rows to `max_length`.

    Returns:
        What the model takes, with ``start_positions`` and ``end_positions`` if spans are given; and
        `EXAMPLE`, the index of the row's example in the batch, and `OFFSETS`.
    """
    encoded = tokenizer(
        list(questions),
        list(texts),
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length" if pad_to_max_length else False,
    )
    rows = {name: list(encoded[name]) for name in tokenizer.model_input_names}
    rows[EXAMPLE] = list(encoded["overflow_to_sample_mapping"])
    rows[OFFSETS] = [
        [
            list(offset) if part == 1 else [-1, -1]
            for offset, part in zip(offsets, encoded.sequence_ids(row), strict=True)
        ]
        for row, offsets in enumerate(encoded["offset_mapping"])
    ]
    if spans is not None:
        inner = [
            span and _without_spaces(text, Span(*span))
            for text, span in zip(texts, spans, strict=True)
        ]
        found = [
            positions_of(inner[example], offsets)
            for example, offsets in zip(rows[EXAMPLE], rows[OFFSETS], strict=True)
        ]
        rows["start_positions"] = [start for start, _ in found]
        rows["end_positions"] = [end for _, end in found]
    return rows


def _without_spaces(text: str, span: Span) -> Span:
    """Returns an answer's span without the spaces around it."""
    answer = text[span.start : span.end]
    start = span.start + len(answer) - len(answer.lstrip())
    return Span(start, start + len(answer.strip()))


def positions_of(span: Span | None, offsets: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Returns the tokens of a row that an answer starts and ends with.

    Args:
        span: the answer; None for none.
        offsets: each token's characters, see this module's docstring.

    Returns:
        The smallest range of tokens that covers the answer; `NO_ANSWER` twice if the row does not
        contain all of it.
    """
    inside = [token for token, (start, _) in enumerate(offsets) if start >= 0]
    if span is None or not inside:
        return NO_ANSWER, NO_ANSWER
    starts, ends = ([offsets[token][side] for token in inside] for side in (0, 1))
    if span.start < starts[0] or span.end > ends[-1]:
        return NO_ANSWER, NO_ANSWER
    # A character may be several tokens, and a space between tokens may belong to none.
    first, last = bisect_right(ends, span.start), bisect_left(starts, span.end) - 1
    return (inside[first], inside[last]) if first <= last else (NO_ANSWER, NO_ANSWER)


@dataclass(frozen=True)
class Candidate:
    """A part of a text that may be the answer.

    Args:
        text: the part, "" for no answer.
        start_logit, end_logit: of its first and last token.
    """

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """The sum of its logits."""
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Args:
        text: the answer, "" for none.
        best: the n best candidates, the best one first; "no answer" if there are no others.
        null_odds: the score of "no answer" minus that of the best other candidate; None if all
            questions have an answer.
    """

    text: str
    best: tuple[Candidate, ...]
    null_odds: float | None = None

    def as_rows(self) -> list[dict[str, Any]]:
        """Returns the candidates for a file, with the softmax of their scores."""
        scores = np.array([each.score for each in self.best])
        shares = np.exp(scores - scores.max())
        return [
            {
                "text": each.text,
                "probability": float(share),
                "start_logit": each.start_logit,
                "end_logit": each.end_logit,
            }
            for each, share in zip(self.best, shares / shares.sum(), strict=True)
        ]


def answers_of(
    texts: Sequence[str],
    examples: Sequence[int],
    offsets: Sequence[Sequence[Sequence[int]]],
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best_size: int = 20,
    max_answer_length: int = 30,
    may_be_none: bool = False,
    null_score_diff_threshold: float = 0.0,
) -> list[Answer]:
    """Returns the answers that logits predict, one per text.

    A candidate's start is among the `n_best_size` best starts of its row, and its end among the
    best ends. "No answer" is scored by each row's first token; the lowest score of a text's rows
    counts.

    Args:
        texts: one per example.
        examples: the index of each row's example.
        offsets: each row's offsets, see this module's docstring.
        start_logits, end_logits: (rows, tokens); columns beyond a row's tokens are not read.
        n_best_size: how many candidates to keep.
        max_answer_length: the most tokens of an answer.
        may_be_none: questions may have no answer.
        null_score_diff_threshold: predict "no answer" if its score exceeds the best answer's by
            more than this.
    """
    found: list[list[Candidate]] = [[] for _ in texts]
    null: list[Candidate | None] = [None] * len(texts)
    for row, example in enumerate(examples):
        starts, ends = start_logits[row], end_logits[row]
        none = Candidate("", float(starts[NO_ANSWER]), float(ends[NO_ANSWER]))
        if null[example] is None or none.score < null[example].score:
            null[example] = none
        found[example] += _candidates(
            texts[example],
            np.asarray(offsets[row]).reshape(-1, 2),
            starts,
            ends,
            n_best_size,
            max_answer_length,
        )
    answers = []
    for candidates, none in zip(found, null, strict=True):
        best = sorted(candidates, key=lambda each: -each.score)[:n_best_size]
        if not may_be_none:
            best = best or [none]
            answers.append(Answer(best[0].text, tuple(best)))
        else:
            answers.append(_or_none(best, none, n_best_size, null_score_diff_threshold))
    return answers


def _candidates(
    text: str,
    offsets: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    count: int,
    max_answer_length: int,
) -> list[Candidate]:
    """Returns the candidates of one row; `offsets`, its tokens' characters, are (tokens, 2)."""
    tokens = len(offsets)
    first = np.argsort(-starts[:tokens], kind="stable")[:count]
    last = np.argsort(-ends[:tokens], kind="stable")[:count]
    first, last = first[offsets[first, 0] >= 0], last[offsets[last, 0] >= 0]
    length = last[None, :] - first[:, None] + 1
    start, end = np.nonzero((length >= 1) & (length <= max_answer_length))
    start, end = first[start], last[end]
    order = np.argsort(-(starts[start] + ends[end]), kind="stable")[:count]
    return [
        Candidate(_answer(text, *offsets[[i, j], [0, 1]]), float(starts[i]), float(ends[j]))
        for i, j in zip(start[order], end[order], strict=True)
        if offsets[i, 0] < offsets[j, 1]
    ]


def _answer(text: str, start: int, end: int) -> str:
    """Returns a part of a text, without the leading space that SentencePiece's tokens include."""
    return text[start:end].lstrip() or text[start:end]


def _or_none(best: list[Candidate], none: Candidate, count: int, threshold: float) -> Answer:
    """Returns the answer to a question that may have none."""
    if not best:
        return Answer("", (none,), none.score)
    odds = none.score - best[0].score
    kept = sorted([*best, none], key=lambda each: -each.score)[:count]
    if none not in kept:
        kept.append(none)
    return Answer("" if odds > threshold else best[0].text, tuple(kept), odds)
