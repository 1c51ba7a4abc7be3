"""Reads, checks and scores questions whose answers are spans of a context, from files or the hub.

A row has SQuAD's columns: id, question, context, and answers, such as {"text": ["Paris"],
"answer_start": [17]}. A file holds such rows as JSON lines, as {"data": [rows]}, in SQuAD's own
nested format, or as CSV with JSON in the answers' cells.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loralib.io.encoding import refuse_utf16_file

from ..data.metrics.squad_metrics import squad_metrics, squad_v2_metrics
from ..data.question_answering import Answer, Span
from ..data.text_columns import warn_of_empty_texts
from ..data.text_files import check_is_file, read_table
from ..tokenization_files import write_json
from ..tokenization_utils_base import PreTrainedTokenizerBase
from .data_sets import Table

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

COLUMNS = ("question", "context")
ANSWERS = "answers"


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Args:
        name: its id.
        question, context: the two strings.
        answers: its answers' strings; empty if it has none, or they are unknown.
        span: where the first answer is in the context, or None.
    """

    name: str
    question: str
    context: str
    answers: tuple[str, ...] = ()
    span: Span | None = None


def read_questions(path: str, cache_dir: str | None = None) -> Dataset:
    """Reads the rows of a file.

    Args:
        path: the file.
        cache_dir: as for `read_table`.

    Raises:
        OSError, ValueError: as `read_table`, or the file lacks a part of SQuAD's nested format.
    """
    whole = None if path.endswith(".csv") else _object_in(path)
    if whole is None:
        return read_table(path, ("id", *COLUMNS), cache_dir)
    from datasets import Dataset

    data = whole["data"]
    rows = list(_flat(path, data)) if data and "paragraphs" in data[0] else data
    if not rows:
        raise ValueError(f"{path}: holds no examples")
    # Dataset.from_list takes the columns from the first row alone.
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return Dataset.from_list([{name: row.get(name) for name in names} for row in rows])
    except (OverflowError, TypeError, ValueError) as error:  # pyarrow's errors are among them
        raise ValueError(f"{path}: cannot be read ({error})") from error


def _object_in(path: str) -> dict[str, Any] | None:
    """Returns the object {"data": […]} that a file holds, or None if it holds anything else."""
    check_is_file(path)
    refuse_utf16_file(path)
    try:
        with open(path, encoding="utf-8-sig") as file:
            whole = json.load(file)
    except (ValueError, RecursionError):
        return None  # several lines, or an error that read_table reports
    is_one = isinstance(whole, dict) and isinstance(whole.get("data"), list)
    return whole if is_one and all(isinstance(each, dict) for each in whole["data"]) else None


def _flat(path: str, articles: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each question of SQuAD's nested format (articles, paragraphs, questions)."""
    for number, article in enumerate(articles, start=1):
        try:
            for paragraph in article["paragraphs"]:
                yield from (_row(paragraph, question) for question in paragraph["qas"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: article {number} does not have SQuAD's structure: {error}"
            ) from error


def _row(paragraph: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a question about a paragraph.

    The answers are None if the file gives none and does not mark the question as impossible.
    """
    answers = question.get("answers", [] if question.get("is_impossible") else None)
    if answers is not None:  # in SQuAD's nested format, a list of dicts
        answers = {name: [each[name] for each in answers] for name in ("text", "answer_start")}
    return {
        "id": question["id"],
        "question": question["question"],
        "context": paragraph["context"],
        ANSWERS: answers,
    }


def check_questions(tables: Mapping[str, Table], may_have_none: bool) -> dict[str, list[Question]]:
    """Checks the rows, and returns the questions by split.

    Args:
        tables: the rows by split. The test set need not have answers.
        may_have_none: whether questions may have no answer.

    Raises:
        ValueError: a column is missing, an id occurs twice, a question or context is not a string,
            a question has no answer but needs one, or an answer is malformed or lies outside its
            context.
    """
    return {split: _questions(split, table, may_have_none) for split, table in tables.items()}


def _questions(split: str, table: Table, may_have_none: bool) -> list[Question]:
    table.check_columns(COLUMNS)
    for name in COLUMNS:
        table.check_strings(name)
    warn_of_empty_texts(table.source, {name: table.column(name) for name in COLUMNS})
    names = _names(table)
    texts = list(zip(names, *(table.column(name) for name in COLUMNS), strict=True))
    if split == "test" and not _has_answers(table):
        return [Question(*three) for three in texts]
    table.check_columns([ANSWERS])
    table = table.decoded(ANSWERS)
    questions, moved = [], []
    for row, (three, answers) in enumerate(zip(texts, table.column(ANSWERS), strict=True)):
        question = Question(*three, *_answers(table, row, three[-1], answers))
        if not question.answers and not may_have_none and split != "test":
            raise table.wrong(
                row, "has no answer; --version_2_with_negative is for sets with such questions"
            )
        span = question.span
        if span and question.answers[0] != question.context[span.start : span.end]:
            moved.append(row)
        questions.append(question)
    if split == "test" and not may_have_none:
        _check_all_or_none(table, [bool(question.answers) for question in questions])
    if moved:
        logger.warning(
            "%s: %d of %d answers differ from the text at their answer_start, row %d's first",
            *(table.source, len(moved), len(questions), moved[0] + 1),
        )
    return questions


def _check_all_or_none(table: Table, answered: Sequence[bool]) -> None:
    """Refuses a test set in which some questions have answers and others have none.

    Such a set could not be scored.
    """
    if any(answered) and not all(answered):
        raise table.wrong(
            answered.index(False),
            f"has no answer, but row {answered.index(True) + 1} has one: for scores, give answers "
            "in all rows; otherwise, in none; --version_2_with_negative is for sets with "
            "questions that have no answer",
        )


def _has_answers(table: Table) -> bool:
    """Returns whether at least one row of a test set has answers."""
    if ANSWERS not in table.rows.column_names:
        return False
    return any(answers is not None for answers in table.column(ANSWERS))


def _names(table: Table) -> list[str]:
    """Returns the questions' ids or, without an id column, their row numbers."""
    if "id" not in table.rows.column_names:
        return [str(row) for row in range(len(table.rows))]
    for row, name in enumerate(given := table.column("id")):
        if not isinstance(name, str | int | float):
            raise table.wrong(row, f"its id is neither a text nor a number ({name})")
    names = [str(name) for name in given]
    seen: dict[str, int] = {}
    for row, name in enumerate(names):
        if name in seen:
            raise table.wrong(row, f"has the id '{name}', as row {seen[name] + 1} has")
        seen[name] = row
    return names


def _answers(
    table: Table, row: int, context: str, answers: Any
) -> tuple[tuple[str, ...], Span | None]:
    """Returns the strings of a row's answers, and where the first one is in the context."""
    given = answers if isinstance(answers, dict) else {}
    texts, starts = given.get("text"), given.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list):
        shown = json.dumps(answers, ensure_ascii=False, default=str)
        raise table.wrong(
            row,
            f'its {ANSWERS} are not {{"text": […], "answer_start": […]}} ({shown:.40})',
        )
    if len(texts) != len(starts):
        raise table.wrong(row, f"has {len(texts)} answers, but {len(starts)} in answer_start")
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not text.strip() or type(start) is not int:
            raise table.wrong(
                row,
                f"an answer must be a non-empty string with an integer start ({text!r}, {start!r})",
            )
        if start < 0 or start + len(text) > len(context):
            raise table.wrong(
                row,
                f"its answer '{text:.40}' at character {start} is outside its context, which has "
                f"{len(context)} characters",
            )
    return tuple(texts), Span(starts[0], starts[0] + len(texts[0])) if texts else None


def check_room(table: Table, tokenizer: PreTrainedTokenizerBase, length: int, stride: int) -> None:
    """Refuses questions that leave too little room for their contexts.

    Args:
        table: the questions.
        tokenizer: the model's tokenizer.
        length: the number of tokens of a sequence.
        stride: how many tokens of the context a sequence shares with the next one.

    Raises:
        ValueError: a question is too long.
    """
    room = length - stride - tokenizer.num_special_tokens_to_add(True)
    for row, question in enumerate(table.column("question")):
        # Tokenizes only long questions: one of few bytes cannot have many tokens.
        if len(question.encode()) + 1 < room:
            continue
        ids = tokenizer(question, add_special_tokens=False, truncation=True, max_length=length)
        if len(ids["input_ids"]) >= room:
            raise table.wrong(
                row,
                f"its question takes {room} or more tokens, so --max_seq_length {length} minus "
                f"--doc_stride {stride} leaves no room for its context",
            )


def scores_of(
    questions: Sequence[Question], answers: Sequence[Answer], may_have_none: bool
) -> dict[str, float]:
    """Returns SQuAD's scores of predicted answers (SQuAD 2.0's if `may_have_none`).

    Args:
        questions: the questions with their true answers.
        answers: the predicted answers, one for each question.
        may_have_none: whether questions may have no answer.
    """
    names = [question.name for question in questions]
    predictions = {name: answer.text for name, answer in zip(names, answers, strict=True)}
    true = {question.name: question.answers for question in questions}
    if not may_have_none:
        return squad_metrics(predictions, true)
    odds = {name: answer.null_odds for name, answer in zip(names, answers, strict=True)}
    return squad_v2_metrics(predictions, true, odds)


def names_of_scores(may_have_none: bool) -> list[str]:
    """Returns the names of the scores that `scores_of` returns.

    With `may_have_none`, they include those of a set that has questions without an answer.
    """
    if not may_have_none:
        return list(squad_metrics({"a": ""}, {"a": ["a"]}))
    return list(squad_v2_metrics({"a": "", "b": ""}, {"a": ["a"], "b": []}, {"a": 0.0, "b": 0.0}))


def write_answers(
    folder: str | os.PathLike, stage: str, questions: Sequence[Question], answers: Sequence[Answer]
) -> None:
    """Writes the predicted answers by their questions' ids.

    The answers go into ``<stage>_predictions.json``, the n best into
    ``<stage>_nbest_predictions.json``. If questions may have no answer, ``<stage>_null_odds.json``
    says how much likelier "no answer" is; otherwise that file, if left by another run, is removed.
    """
    by_name = dict(zip((question.name for question in questions), answers, strict=True))
    files: dict[str, dict[str, Any]] = {
        "predictions": {name: answer.text for name, answer in by_name.items()},
        "nbest_predictions": {name: answer.as_rows() for name, answer in by_name.items()},
    }
    if any(answer.null_odds is not None for answer in answers):
        files["null_odds"] = {name: answer.null_odds for name, answer in by_name.items()}
    else:
        Path(folder, f"{stage}_null_odds.json").unlink(missing_ok=True)
    for name, content in files.items():
        write_json(Path(folder, f"{stage}_{name}.json"), content, indent=4)
