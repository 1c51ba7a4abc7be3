"""The question-answering pipeline, which finds the span of a text that answers a question.

A text that is too long is read in overlapping parts, each with the question before it:

    question + part ─ model ─> start and end logits of each token ─ softmax over the part's tokens
      ─> start · end for all short spans ─> the best spans of all parts
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Encoding

from ..data.processors.squad import SquadExample
from ..file_utils import ModelOutput
from ..modeling_utils import PreTrainedModel
from ..tokenization_utils_base import PreTrainedTokenizerBase
from .base import ArgumentHandler, Pipeline, rows_of, softmax, without_padding

Answer = dict[str, Any]  # score, start, end (characters of the text), answer
# The logit of a token at which no answer can start or end.
_IMPOSSIBLE = -10_000.0


class QuestionAnsweringArgumentHandler(ArgumentHandler):
    """Converts questions with their contexts to `SquadExample`s, from any of these forms.

    Two arguments, by position or as ``question`` and ``context``, are two strings or two lists of
    strings; a single context may stand for all questions. One argument, by position or as ``X`` or
    ``data``, is a dict of question and context, a `SquadExample`, or a list of these.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> list[SquadExample]:
        """Returns the examples.

        Raises:
            KeyError: a dict lacks a question or a context.
            ValueError: a question or context is empty, or the arguments have none of these forms.
        """
        named = {"question", "context"} & kwargs.keys()
        if len(args) == 2:
            given = _pairs(*args)
        elif len(args) == 1:
            given = args[0]
        elif len(named) == 2:
            given = _pairs(kwargs["question"], kwargs["context"])
        elif "X" in kwargs or "data" in kwargs:
            given = kwargs.get("X", kwargs.get("data"))
        else:
            raise ValueError("a question and a context are needed, or a dict of them")
        if isinstance(given, Mapping | SquadExample):
            given = [given]
        if not isinstance(given, list | tuple):
            raise ValueError(f"a question and its context are two texts, not {given!r:.40}")
        return [self.normalize(item) for item in given]

    def normalize(self, item: SquadExample | Mapping[str, Any]) -> SquadExample:
        """Converts one item to an example.

        Raises:
            KeyError, ValueError: as in `__call__`.
        """
        if isinstance(item, SquadExample):
            return item
        if not isinstance(item, Mapping):
            raise ValueError(f"a question and its context are in a dict, not {item!r:.40}")
        for name in ("question", "context"):
            if name not in item:
                raise KeyError(f"a question needs 'question' and 'context'; there is no '{name}'")
            if not isinstance(item[name], str) or not item[name]:
                raise ValueError(
                    f"the {name} must be a text, and not empty: it is {item[name]!r:.40}"
                )
        return SquadExample(None, item["question"], item["context"])


def _pairs(question: Any, context: Any) -> list[dict[str, Any]]:
    """Pairs questions with their contexts, as dicts."""
    questions = [question] if isinstance(question, str | None) else question
    if not isinstance(questions, list):
        raise ValueError(f"question is a text or a list of texts, not {question!r:.40}")
    contexts = context if isinstance(context, list) else [context] * len(questions)
    if len(questions) != len(contexts):
        raise ValueError(f"there are {len(questions)} questions, but {len(contexts)} contexts")
    return [
        {"question": one, "context": other} for one, other in zip(questions, contexts, strict=True)
    ]


class QuestionAnsweringPipeline(Pipeline):
    """Finds answers in texts.

    Args:
        others: see `Pipeline`. The tokenizer has to be a fast one.

    Raises:
        ValueError: the tokenizer is not fast, so it cannot map tokens to characters.
    """

    default_input_names = "question,context"
    head = "question_answering"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        modelcard: Any = None,
        framework: str | None = None,
        device: int = -1,
        task: str = "",
        **kwargs: Any,
    ):
        super().__init__(model, tokenizer, modelcard, framework, task, device=device, **kwargs)
        if not tokenizer.is_fast:
            raise ValueError("question answering needs a fast tokenizer: leave out use_fast=False")
        self._args_parser = QuestionAnsweringArgumentHandler()

    @staticmethod
    def create_sample(
        question: str | list[str], context: str | list[str]
    ) -> SquadExample | list[SquadExample]:
        """Returns an example for a question and its context, or a list of examples for lists."""
        examples = QuestionAnsweringArgumentHandler()(question, context)
        return examples if isinstance(question, list) else examples[0]

    def __call__(
        self,
        *args: Any,
        topk: int = 1,
        doc_stride: int = 128,
        max_answer_len: int = 15,
        max_seq_len: int = 384,
        max_question_len: int = 64,
        handle_impossible_answer: bool = False,
        padding: str = "longest",
        **kwargs: Any,
    ) -> Answer | list[Answer]:
        """Returns the best answers to all questions in one list, or a single answer by itself.

        Args:
            args: see `QuestionAnsweringArgumentHandler`.
            topk: the number of answers per question.
            doc_stride: the number of tokens that neighboring parts of a text share. If a part has
                no more tokens than that, they share half a part.
            max_answer_len: the maximum number of tokens in an answer.
            max_seq_len: the number of tokens of the question and a part, at most what the model
                takes.
            max_question_len: without effect, as in transformers 4.4 with a fast tokenizer:
                questions are not truncated.
            handle_impossible_answer: allow an empty answer, which means that there is none.
            padding: without effect, because the model skips padding.
            kwargs: see `QuestionAnsweringArgumentHandler`.

        Returns:
            For each answer ``score``, ``start`` and ``end`` (in characters) and ``answer``, which
            has whole words of the text; it is empty if the text has no tokens, such as a blank one.

        Raises:
            KeyError, ValueError: as in `QuestionAnsweringArgumentHandler`; or a number is too
                small, or a question leaves no room for its text.
        """
        examples = self._args_parser(*args, **kwargs)
        for name, value in (("topk", topk), ("max_answer_len", max_answer_len)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        answers: list[Answer] = []
        rows = self._parts(examples, max_seq_len, doc_stride, handle_impossible_answer)
        for example, parts in rows:
            found: list[Answer] = []
            no_answer = 1.0
            for part in parts:
                no_answer = min(no_answer, part.no_answer)
                found += self._answers(part, example.context_text, topk, max_answer_len)
            if handle_impossible_answer or not found:
                found.append({"score": no_answer, "start": 0, "end": 0, "answer": ""})
            answers += sorted(found, key=lambda answer: -answer["score"])[:topk]
        return answers[0] if len(answers) == 1 else answers

    def _parts(
        self, examples: list[SquadExample], max_seq_len: int, doc_stride: int, may_be_none: bool
    ) -> Iterator[tuple[SquadExample, list["_Part"]]]:
        """Yields each example with the parts of its text, in order.

        The softmax is over the text's tokens and the first token, which stands for "no answer". If
        there has to be an answer, the first token is left out for RoBERTa, whose id for it is 0, as
        in transformers 4.4.
        """
        windows = list(self._windows(examples, max_seq_len, doc_stride))
        said = self.forward([row for _, row, _ in windows])
        parts: list[list[_Part]] = [[] for _ in examples]
        for (number, _, encoding), (start, end) in zip(windows, said, strict=True):
            possible = np.array([each == 1 for each in encoding.sequence_ids])
            possible[0] = may_be_none or bool(self.tokenizer.cls_token_id)
            probabilities = (
                softmax(np.where(possible, logits, _IMPOSSIBLE)) for logits in (start, end)
            )
            parts[number].append(_Part(encoding, *probabilities))
        yield from zip(examples, parts, strict=True)

    def _windows(
        self, examples: list[SquadExample], max_seq_len: int, doc_stride: int
    ) -> Iterator[tuple[int, dict[str, list[int]], Encoding]]:
        """Yields, for each part of each example's text, the example's number, the row, the tokens.

        Raises:
            ValueError: a question leaves no room for its text.
        """
        limit = max_seq_len if self.longest is None else min(max_seq_len, self.longest)
        frame = self.tokenizer.num_special_tokens_to_add(pair=True)
        for number, example in enumerate(examples):
            length = len(self.tokenizer.tokenize(example.question_text))
            room = limit - frame - length
            if room < 1:
                raise ValueError(
                    f"question {number} has {length} tokens, which leaves no room for its context "
                    f"in a row of {limit}"
                )
            encoded = self.tokenizer(
                [example.question_text],
                [example.context_text],
                truncation="only_second",
                max_length=limit,
                stride=doc_stride if doc_stride < room else room // 2,
                return_overflowing_tokens=True,
            )
            for row, encoding in zip(rows_of(encoded), encoded.encodings, strict=True):
                yield number, row, encoding

    def by_row(self, output: ModelOutput, lengths: list[int]) -> tuple[list[np.ndarray], ...]:
        """Returns a batch's start and end logits, row by row, without padding."""
        both = (output.start_logits, output.end_logits)
        return tuple(without_padding(logits, lengths) for logits in both)

    def decode(
        self, start: np.ndarray, end: np.ndarray, topk: int, max_answer_len: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the first tokens, the last tokens and the scores of the likeliest spans.

        Args:
            start, end: (tokens,), probabilities.
            topk: the number of spans; fewer are returned if there are not as many.
            max_answer_len: the maximum number of tokens in a span.
        """
        start, end = start.reshape(-1), end.reshape(-1)
        # ends[i, n] is the probability that a span from token i ends at i + n; 0 beyond the row.
        ends = sliding_window_view(np.pad(end, (0, max_answer_len - 1)), max_answer_len)
        scores = start[:, None] * ends
        best = np.argsort(-scores, axis=None, kind="stable")[:topk]
        firsts, more = np.unravel_index(best, scores.shape)
        inside = firsts + more < len(end)
        firsts, more, best = firsts[inside], more[inside], best[inside]
        return firsts, firsts + more, scores.reshape(-1)[best]

    def _answers(self, part: "_Part", text: str, topk: int, max_answer_len: int) -> list[Answer]:
        """Returns the best answers in a part of `text`, widened to whole words."""
        start, end = part.start.copy(), part.end.copy()
        start[0] = end[0] = 0.0  # the first token stands for "no answer"
        spans = zip(*self.decode(start, end, topk, max_answer_len), strict=True)
        answers = []
        for first, last, score in spans:
            if score > 0:
                begin, after = part.word(first)[0], part.word(last)[1]
                word = text[begin:after]
                answer = word.lstrip() or word  # SentencePiece's words include the space before
                begin = after - len(answer)
                values = {"score": float(score), "start": begin, "end": after, "answer": answer}
                answers.append(values)
        return answers


@dataclass(frozen=True)
class _Part:
    """A part of a text, and the model's predictions for it.

    Args:
        encoding: the question and the part.
        start, end: (tokens,), the probabilities that the answer starts and ends at each token.
    """

    encoding: Encoding
    start: np.ndarray
    end: np.ndarray

    @property
    def no_answer(self) -> float:
        """The probability that the part has no answer."""
        return self.start[0].item() * self.end[0].item()

    def word(self, token: int) -> tuple[int, int]:
        """Returns the start and end characters of a token's word."""
        return self.encoding.word_to_chars(self.encoding.token_to_word(int(token)), 1)
