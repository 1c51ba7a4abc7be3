"""`SquadExample`: a question and its text, with SQuAD's fields."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SquadExample:
    """A question about a text.

    Args:
        qas_id: the question's id.
        question_text, context_text: the question, and the text that it is about.
        answer_text: the answer in training; None elsewhere.
        start_position_character: the answer's first character in the text.
        title: the text's title.
        answers: all answers that people gave, for evaluation.
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
