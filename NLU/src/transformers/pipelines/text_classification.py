"""The text-classification pipeline, for texts or pairs of texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import Pipeline, as_list, rows_of, softmax


class TextClassificationPipeline(Pipeline):
    """Classifies texts; the logistic function maps the output of a regression model to a score.

    Args:
        return_all_scores: return all labels instead of the likeliest one.
        kwargs: arguments of `Pipeline`.
    """

    head = "sequence_classification"

    def __init__(self, return_all_scores: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.return_all_scores = return_all_scores

    def __call__(self, inputs: Any) -> list[Any]:
        """Returns the label of each text.

        Args:
            inputs: a text, a list of texts, or a list of pairs of texts (lists of two).

        Returns:
            For each text ``{"label", "score"}``, or with `return_all_scores` a list of these.

        Raises:
            ValueError: there is no text, something is not a string, or the inputs are single texts
                although the model was trained on pairs, or the reverse.
        """
        texts = _texts_or_pairs(inputs)
        _check_number(texts[0], self.model.config.text_columns)
        rows = rows_of(self.encode(texts))
        return [self._answer(logits) for (logits,) in self.forward(rows)]

    def _answer(self, logits: np.ndarray) -> dict[str, Any] | list[dict[str, Any]]:
        names = self.model.config.id2label
        scores = 1 / (1 + np.exp(-logits)) if len(names) == 1 else softmax(logits)
        answers = [{"label": names[i], "score": score.item()} for i, score in enumerate(scores)]
        return answers if self.return_all_scores else answers[int(scores.argmax())]


def _texts_or_pairs(inputs: Any) -> list[Any]:
    """Returns the inputs as a list of texts or of pairs."""
    if not isinstance(inputs, list | tuple) or not any(isinstance(x, list | tuple) for x in inputs):
        return as_list(inputs, "input")
    for index, pair in enumerate(inputs):
        is_pair = isinstance(pair, list | tuple) and [type(text) for text in pair] == [str, str]
        if not is_pair:
            raise ValueError(f"input {index} is {pair!r:.40}, not a pair of texts as others are")
    return list(inputs)


def _check_number(first: Any, columns: Sequence[str] | None) -> None:
    """Checks that a text or pair has as many texts as the model's training data, if known."""
    count = 1 if isinstance(first, str) else 2
    if columns is not None and len(columns) != count:
        raise ValueError(
            f"the inputs are {'texts' if count == 1 else 'pairs of texts'}, but the model was "
            f"trained on rows of {' and '.join(columns)}"
        )
