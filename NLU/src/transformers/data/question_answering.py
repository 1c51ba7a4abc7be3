"""Questions to texts in which the answers are: from examples to rows, and from logits to answers.

    question, text ─ rows_of ─> rows of tokens, several where the text is long ─ model ─>
    logits of each token as the answer's start and end ─ answers_of ─> n best answers a question

A row is <s> question </s></s> part of the text </s>. Its part is found again by ``offsets``: each
token's characters in the text, (-1, -1) where it is none of the text's. The row's first token
stands for "no answer here": rows that do not hold their answer have it as start and end.

Source: Devlin et al. 2018, sections 4.2 and 4.3 (BERT), for rows, answers and null answers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..tokenization_utils_base import PreTrainedTokenizerBase

# What a row has of its own, beside what the model takes.
EXAMPLE, OFFSETS = "example", "offsets"
NO_ANSWER = 0
"""The token whose start and end logits speak for no answer: a row's first."""


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
    """Rows of tokens, each text in as many as it takes.

    Args:
        tokenizer: of the model.
        questions, texts: one each an example.
        spans: where the answers are, as `Span` has it; None for an example without one. None for
            all of them: the rows are to be predicted. Spaces around an answer are none of it.
        max_length: tokens a row, special ones included.
        stride: tokens of the text that a row and the next one share.
        pad_to_max_length: fill all rows up to `max_length`.

    Returns:
        What the model takes, with ``start_positions`` and ``end_positions`` where spans are given;
        and `EXAMPLE`, the example's number in the batch, and `OFFSETS`.
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
    """An answer without the spaces around it."""
    answer = text[span.start : span.end]
    start = span.start + len(answer) - len(answer.lstrip())
    return Span(start, start + len(answer.strip()))


def positions_of(span: Span | None, offsets: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The tokens of a row that an answer begins and ends with.

    Args:
        span: the answer; None for none.
        offsets: each token's characters, see this module's head.

    Returns:
        The smallest range of tokens that covers it; `NO_ANSWER` twice where the row does not hold
        all of it.
    """
    inside = [token for token, (start, _) in enumerate(offsets) if start >= 0]
    if span is None or not inside:
        return NO_ANSWER, NO_ANSWER
    starts, ends = ([offsets[token][side] for token in inside] for side in (0, 1))
    if span.start < starts[0] or span.end > ends[-1]:
        return NO_ANSWER, NO_ANSWER
    # A character may be several tokens; between tokens there may be spaces, which are of none.
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
    """What a question is answered with.

    Args:
        text: the answer, "" for none.
        best: the n best candidates, the best one first; no answer where there is none.
        null_odds: the score of no answer less that of the best candidate that is one; None where
            there always is an answer.
    """

    text: str
    best: tuple[Candidate, ...]
    null_odds: float | None = None

    def as_rows(self) -> list[dict[str, Any]]:
        """The candidates for a file, with their probabilities among each other."""
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
    """The answers that logits speak for, one a text.

    A candidate's start is among the `n_best_size` best of its row, and so is its end. No answer is
    scored by each row's first token, and counts as the least of its rows does.

    Args:
        texts: one an example.
        examples: each row's example.
        offsets: each row's, see this module's head.
        start_logits, end_logits: (rows, tokens); columns beyond a row's tokens are not looked at.
        n_best_size: candidates to keep.
        max_answer_length: the most tokens of an answer.
        may_be_none: questions may have no answer.
        null_score_diff_threshold: there is none where its score is higher than the best answer's
            by more than this.
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
    """The candidates of one row, whose tokens' characters are (tokens, 2)."""
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
    """A part of a text; without the space before it that SentencePiece's first token has."""
    return text[start:end].lstrip() or text[start:end]


def _or_none(best: list[Candidate], none: Candidate, count: int, threshold: float) -> Answer:
    """The answer to a question that may have none."""
    if not best:
        return Answer("", (none,), none.score)
    odds = none.score - best[0].score
    kept = sorted([*best, none], key=lambda each: -each.score)[:count]
    if none not in kept:
        kept.append(none)
    return Answer("" if odds > threshold else best[0].text, tuple(kept), odds)
