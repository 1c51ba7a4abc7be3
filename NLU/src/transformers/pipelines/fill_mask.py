"""The fill-mask pipeline, which finds the likeliest tokens for a masked one."""

from typing import Any, ClassVar

import numpy as np

from ..modeling_losses import IGNORED_LABEL
from ..modeling_utils import PreTrainedModel
from ..tokenization_utils_base import PreTrainedTokenizerBase
from ..utils import logging
from .base import ArgumentHandler, Pipeline, as_list, rows_of, softmax

logger = logging.get_logger(__name__)


class FillMaskPipeline(Pipeline):
    """Finds tokens for a text's mask.

    Args:
        top_k: the number of tokens.
        others: see `Pipeline`.
    """

    head = "masked_lm"
    forward_settings: ClassVar[dict[str, Any]] = {"targets_only": True}  # only the masks' logits

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
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
        """Returns the likeliest tokens for the mask of each text.

        Args:
            inputs: a text with one mask token, or several texts.
            targets: the words to choose from. All are returned, regardless of `top_k`. For a word
                of several tokens, the first token is used, with a warning.
            top_k: the number of tokens, if other than the pipeline's.
            kwargs: without effect, as in transformers 4.4.

        Returns:
            For each text, a list of dicts, the likeliest first: ``sequence`` (the text with the
            token), ``score``, ``token`` (its id) and ``token_str``. For a single text, its list.

        Raises:
            PipelineException: a text has no mask, or several.
            ValueError: there is no text, or no target.
        """
        rows = rows_of(self.encode(as_list(inputs, "input")))
        for row in rows:
            self.ensure_exactly_one_mask_token(row["input_ids"])
            row["labels"] = [
                0 if self._is_mask(index) else IGNORED_LABEL for index in row["input_ids"]
            ]
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
        """Checks that a row has exactly one mask.

        Raises:
            PipelineException: it has none, or several.
        """
        count = sum(map(self._is_mask, input_ids))
        if count != 1:
            found = "no mask" if count == 0 else f"{count} masks"
            raise self._exception(f"a text has {found}: write {self.tokenizer.mask_token} once")

    def _target_ids(self, targets: str | list[str]) -> np.ndarray:
        """Returns the ids of the words' first tokens.

        Raises:
            ValueError: there is no word, or an empty one.
        """
        words = [targets] if isinstance(targets, str) else list(targets)
        tokens_of_words = list(map(self.tokenizer.tokenize, words))
        if not all(tokens_of_words) or not words:
            raise ValueError("targets needs at least one word, and none may be empty")
        ids = []
        for word, tokens in zip(words, tokens_of_words, strict=True):
            if len(tokens) > 1:
                logger.warning("the target %r is several tokens: %r is taken", word, tokens[0])
            ids.append(self.tokenizer.convert_tokens_to_ids(tokens[0]))
        return np.array(ids)

    def _answer(
        self, ids: list[int], scores: np.ndarray, wanted: np.ndarray | None, count: int
    ) -> list[dict[str, Any]]:
        if wanted is None:
            # A model may have more rows than there are tokens, as DeBERTa-v2 does.
            best = np.argsort(-scores[: len(self.tokenizer)], kind="stable")[:count]
        else:
            best = wanted[np.argsort(-scores[wanted], kind="stable")]
        answers = []
        for token in best.tolist():
            filled = [token if self._is_mask(index) else index for index in ids]
            answers.append(
                {
                    "sequence": self.tokenizer.decode(filled, skip_special_tokens=True),
                    "score": scores[token].item(),
                    "token": token,
                    "token_str": self.tokenizer.decode(token),
                }
            )
        return answers
