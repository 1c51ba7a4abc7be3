"""Question answering: a question and a text -> the span of the text that answers it.

A text that is too long is read in overlapping parts, each with the question before it:

    question + part ─ model ─> start and end of each token ─ softmax over the part's own tokens
      ─> the products of all short spans ─> the best of all parts
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Encoding

from ..data.processors.squad import SquadExample
from ..file_utils import ModelOutput
from .base import ArgumentHandler, Pipeline, rows_of, softmax

Answer = dict[str, Any]  # score, start, end (characters of the text), answer
# The logit of a token that no answer has.
_IMPOSSIBLE = -10_000.0


class QuestionAnsweringArgumentHandler(ArgumentHandler):
    """Questions with their texts, in whatever form they are given, as `SquadExample`s.

    By position, or as ``question`` and ``context``: two texts, or lists of them, where one text may
    stand for all questions. By position, or as ``X`` or ``data``: a dict of these two, an example,
    or a list of such.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> list[SquadExample]:
        """The examples.

        Raises:
            KeyError: a dict without a question or without a context.
            ValueError: one of them is empty, or it is none of these forms.
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
        """One example.

        Raises:
            KeyError, ValueError: as on a call.
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
    """Questions and texts as dicts."""
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
        others: see `Pipeline`; the tokenizer is a fast one.

    Raises:
        ValueError: the tokenizer is not fast, and so does not know where its tokens are in a text.
    """

    default_input_names = "question,context"
    head = "question_answering"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
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
        """An example of a question and its text, or one of each."""
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
        """The best answers to each question, in one list; a single one as it is.

        Args:
            args: see `QuestionAnsweringArgumentHandler`.
            topk: answers to a question.
            doc_stride: tokens that neighbouring parts of a text share; half of a part where a part
                has no more than these.
            max_answer_len: tokens of an answer at most.
            max_seq_len: tokens of the question with a part; at most those the model takes.
            max_question_len: without effect, as in 4.4 with a fast tokenizer: only texts are cut.
            handle_impossible_answer: an empty answer, "there is none", may be among them.
            padding: without effect, as no padding is computed.
            kwargs: see `QuestionAnsweringArgumentHandler`.

        Returns:
            ``score``, ``start`` and ``end`` (characters) and ``answer``, whole words of the text.

        Raises:
            KeyError, ValueError: as in `QuestionAnsweringArgumentHandler`; a number is too small;
                a question leaves no room for a text.
        """
        examples = self._args_parser(*args, **kwargs)
        for name, value in (("topk", topk), ("max_answer_len", max_answer_len)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        answers: list[Answer] = []
        limits = (max_seq_len, doc_stride)
        for example, parts in self._parts(examples, *limits, handle_impossible_answer):
            found: list[Answer] = []
            no_answer = 1.0
            for part in parts:
                no_answer = min(no_answer, part.no_answer)
                found += self._answers(part, example.context_text, topk, max_answer_len)
            if handle_impossible_answer:
                found.append({"score": no_answer, "start": 0, "end": 0, "answer": ""})
            answers += sorted(found, key=lambda answer: -answer["score"])[:topk]
        return answers[0] if len(answers) == 1 else answers

    def _parts(
        self, examples: list[SquadExample], max_seq_len: int, doc_stride: int, may_be_none: bool
    ) -> Iterator[tuple[SquadExample, list["_Part"]]]:
        """Each example with the parts of its text, in their order.

        The softmax is over the text's tokens, and over the first one, which stands for "no answer".
        As in 4.4, RoBERTa's, whose id is 0, is left out where there has to be an answer.
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
        """The rows of each question with the parts of its text: the example's number, row, tokens.

        Raises:
            ValueError: a question leaves no room for a text.
        """
        limit = max_seq_len if self.longest is None else min(max_seq_len, self.longest)
        frame = self.tokenizer.num_special_tokens_to_add(pair=True)
        for number, example in enumerate(examples):
            length = len(self.tokenizer.tokenize(example.question_text))
            room = limit - frame - length
            if room < 1:
                raise ValueError(
                    f"question {number} has {length} tokens, which leaves no room for its text "
                    f"among {limit}"
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
        """A batch's logits of start and end, row by row, without padding."""
        both = (output.start_logits, output.end_logits)
        return tuple(
            [
                row[:length]
                for row, length in zip(logits.float().cpu().numpy(), lengths, strict=True)
            ]
            for logits in both
        )

    def decode(
        self, start: np.ndarray, end: np.ndarray, topk: int, max_answer_len: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The likeliest spans: their first and last tokens, and their scores.

        Args:
            start, end: (tokens,), probabilities.
            topk: how many spans, fewer where there are not as many.
            max_answer_len: tokens of a span at most.
        """
        start, end = start.reshape(-1), end.reshape(-1)
        # Of span (first, length - 1) the probability of its end, 0 beyond the row.
        ends = sliding_window_view(np.pad(end, (0, max_answer_len - 1)), max_answer_len)
        scores = start[:, None] * ends
        best = np.argsort(-scores, axis=None, kind="stable")[:topk]
        firsts, more = np.unravel_index(best, scores.shape)
        inside = firsts + more < len(end)
        firsts, more, best = firsts[inside], more[inside], best[inside]
        return firsts, firsts + more, scores.reshape(-1)[best]

    def _answers(self, part: "_Part", text: str, topk: int, max_answer_len: int) -> list[Answer]:
        """The best answers in a part of `text`, widened to whole words."""
        start, end = part.start.copy(), part.end.copy()
        start[0] = end[0] = 0.0  # "no answer" is none
        spans = zip(*self.decode(start, end, topk, max_answer_len), strict=True)
        answers = []
        for first, last, score in spans:
            if score > 0:
                begin, after = part.word(first)[0], part.word(last)[1]
                word = text[begin:after]
                answer = word.lstrip() or word  # in SentencePiece, a word has the space before
                begin = after - len(answer)
                values = {"score": float(score), "start": begin, "end": after, "answer": answer}
                answers.append(values)
        return answers


@dataclass(frozen=True)
class _Part:
    """A part of a text, and what the model says of it.

    Args:
        encoding: the question and the part.
        start, end: (tokens,), probabilities that an answer starts and ends there.
    """

    encoding: Encoding
    start: np.ndarray
    end: np.ndarray

    @property
    def no_answer(self) -> float:
        """How likely it is that the part has no answer."""
        return self.start[0].item() * self.end[0].item()

    def word(self, token: int) -> tuple[int, int]:
        """The characters of a token's word."""
        return self.encoding.word_to_chars(self.encoding.token_to_word(int(token)), 1)
