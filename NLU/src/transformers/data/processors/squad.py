"""A question and its text, as SQuAD has them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SquadExample:
    """A question on a text.

    Args:
        qas_id: the question's name.
        question_text, context_text: both as texts.
        answer_text: the answer in training; None elsewhere.
        start_position_character: where it starts in the text.
        title: the text's.
        answers: all that people gave, for evaluation.
        is_impossible: the text has no answer.
    """

    qas_id: str | None
    question_text: str
    context_text: str
    answer_text: str | None = None
    start_position_character: int | None = None
    title: str | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    is_impossible: bool = False
