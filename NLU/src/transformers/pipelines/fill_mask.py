"""Filling a mask: a text with one hidden token -> the tokens that it may be."""

from typing import Any, ClassVar

import numpy as np

from ..utils import logging
from .base import ArgumentHandler, Pipeline, as_list, rows_of, softmax

logger = logging.get_logger(__name__)


class FillMaskPipeline(Pipeline):
    """Finds tokens for a text's mask.

    Args:
        top_k: how many.
        others: see `Pipeline`.
    """

    head = "masked_lm"
    forward_settings: ClassVar[dict[str, Any]] = {"targets_only": True}  # the masks' logits alone

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        modelcard: Any = None,
        framework: str | None = None,
        args_parser: ArgumentHandler | None = None,
        device: int = -1,
        top_k: int = 5,
        task: str = "",
    ):
        super().__init__(model, tokenizer, modelcard, framework, task, args_parser, device)
        self.top_k = top_k

    def __call__(
        self,
        inputs: str | list[str],
        targets: str | list[str] | None = None,
        top_k: int | None = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]] | list[list[dict[str, Any]]]:
        """The likeliest tokens of each text's mask; those of a single text as they are.

        Args:
            inputs: a text with one mask token, or several texts.
            targets: words to choose from; of one that is several tokens, the first is taken, which
                is warned of. All are given, whatever `top_k`.
            top_k: how many tokens, where other than the pipeline's.
            kwargs: without effect, as in 4.4.

        Returns:
            For each text, from the likeliest on, ``sequence`` (the text with the token), ``score``,
            ``token`` (its id) and ``token_str``.

        Raises:
            PipelineException: a text has no mask, or several.
            ValueError: there is no text, or no target.
        """
        rows = rows_of(self.encode(as_list(inputs, "input")))
        for row in rows:
            self.ensure_exactly_one_mask_token(row["input_ids"])
            row["labels"] = [0 if self._is_mask(index) else -100 for index in row["input_ids"]]
        wanted = None if targets is None else self._target_ids(targets)
        count = self.top_k if top_k is None else top_k
        answers = [
            self._answer(row["input_ids"], softmax(logits), wanted, count)
            for row, (logits,) in zip(rows, self.forward(rows), strict=True)
        ]
        return answers[0] if len(answers) == 1 else answers

    def _is_mask(self, index: int) -> bool:
        return index == self.tokenizer.mask_token_id

    def ensure_exactly_one_mask_token(self, input_ids: list[int]) -> None:
        """Checks that a row has one mask.

        Raises:
            PipelineException: it has none, or several.
        """
        count = sum(map(self._is_mask, input_ids))
        if count != 1:
            found = "no mask" if count == 0 else f"{count} masks"
            raise self._exception(f"a text has {found}: write {self.tokenizer.mask_token} once")

    def _target_ids(self, targets: str | list[str]) -> np.ndarray:
        """The words' ids.

        Raises:
            ValueError: there is none.
        """
        words = [targets] if isinstance(targets, str) else list(targets)
        if not words or not all(words):
            raise ValueError("targets needs at least one word, and none may be empty")
        ids = []
        for word in words:
            tokens = self.tokenizer.tokenize(word)
            if len(tokens) > 1:
                logger.warning("the target %r is several tokens: %r is taken", word, tokens[0])
            ids.append(self.tokenizer.convert_tokens_to_ids(tokens[0]))
        return np.array(ids)

    def _answer(
        self, ids: list[int], scores: np.ndarray, wanted: np.ndarray | None, count: int
    ) -> list[dict[str, Any]]:
        if wanted is None:
            best = np.argsort(-scores, kind="stable")[:count]
        else:
            best = wanted[np.argsort(-scores[wanted], kind="stable")]
        answers = []
        for token in best.tolist():
            filled = [token if self._is_mask(index) else index for index in ids]
            answers.append(
                {
                    "sequence": self._decode(filled),
                    "score": scores[token].item(),
                    "token": token,
                    "token_str": self._decode([token]),
                }
            )
        return answers

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=True
        )
