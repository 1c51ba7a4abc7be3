"""The token-classification pipeline, which finds named entities, token by token or grouped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from ..file_utils import ModelOutput
from ..modeling_utils import PreTrainedModel
from ..tokenization_utils_base import PreTrainedTokenizerBase
from .base import ArgumentHandler, Pipeline, as_list, rows_of, softmax, without_padding

Offsets = list[tuple[int, int]]


class Entity(TypedDict, total=False):
    """A token labeled ``entity``, or a group of tokens labeled ``entity_group``.

    ``start`` and ``end`` are characters of the text, or None if the tokenizer does not know them.
    ``index`` is the token's position in its row.
    """

    entity: str
    entity_group: str
    score: float
    index: int
    word: str
    start: int | None
    end: int | None
    is_subword: bool


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text.

    Args:
        text, ids: the text and its tokens' ids.
        is_special: 1 for each special token.
        offsets: each token's start and end characters, or None if unknown.
        words: the index of each token's word, or None if unknown.
    """

    text: str
    ids: list[int]
    is_special: Sequence[int]
    offsets: Offsets | None
    words: Sequence[int | None] | None

    def place(self, index: int) -> tuple[int, int] | tuple[None, None]:
        """Returns a token's characters, without the space that SentencePiece puts before a word."""
        if self.offsets is None:
            return None, None
        start, end = map(int, self.offsets[index])
        characters = self.text[start:end]
        return end - len(characters.lstrip() or characters), end  # some tokens are only a space

    def goes_on(self, index: int) -> bool:
        """Returns whether a token continues the word of the token before it."""
        return self.words is not None and index > 0 and self.words[index] == self.words[index - 1]

    def labels_by_word(self, labels: list[int]) -> list[int]:
        """Returns the tokens' labels, with each word's first label for all of its tokens."""
        of_words: list[int] = []
        for index, label in enumerate(labels):
            of_words.append(of_words[-1] if self.goes_on(index) else label)
        return of_words


class TokenClassificationArgumentHandler(ArgumentHandler):
    """Converts texts, and their tokens' offsets if given, to lists."""

    def __call__(
        self, inputs: str | list[str], offset_mapping: Any = None
    ) -> tuple[list[str], list[Offsets] | None]:
        """Returns the texts and the offsets (or None) as lists of equal length.

        Raises:
            ValueError: there is no text, or not one list of offsets for each text.
        """
        texts = as_list(inputs, "input")
        if offset_mapping:
            offsets = [offset_mapping] if isinstance(offset_mapping[0], tuple) else offset_mapping
            if len(offsets) != len(texts):
                raise ValueError(f"there are {len(texts)} texts, and offsets for {len(offsets)}")
            return texts, offsets
        return texts, None


class TokenClassificationPipeline(Pipeline):
    """Finds named entities.

    Args:
        ignore_labels: the labels of tokens outside entities.
        grouped_entities: group the tokens of each entity.
        ignore_subwords: when grouping, a word's later tokens belong to its first one, whatever
            their label, and do not count in the score. Needs a fast tokenizer. (Transformers 4.4
            took some of RoBERTa's first tokens for later ones.)
        others: see `Pipeline`.

    Raises:
        ValueError: `ignore_subwords` with a tokenizer that is not fast.
    """

    default_input_names = "sequences"
    head = "token_classification"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        modelcard: Any = None,
        framework: str | None = None,
        args_parser: ArgumentHandler | None = None,
        device: int = -1,
        binary_output: bool = False,
        ignore_labels: Sequence[str] = ("O",),
        task: str = "",
        grouped_entities: bool = False,
        ignore_subwords: bool = False,
    ):
        super().__init__(
            model, tokenizer, modelcard, framework, task, args_parser, device, binary_output
        )
        if ignore_subwords and not tokenizer.is_fast:
            raise ValueError("ignore_subwords needs a fast tokenizer, which knows a token's place")
        self._args_parser = args_parser or TokenClassificationArgumentHandler()
        self.ignore_labels = list(ignore_labels)
        self.grouped_entities = grouped_entities
        self.ignore_subwords = ignore_subwords

    def __call__(self, inputs: str | list[str], **kwargs: Any) -> list[Entity] | list[list[Entity]]:
        """Returns a list of entities for each text, or that list itself for a single text.

        Args:
            inputs: one text or several.
            kwargs: ``offset_mapping``: for each text, its tokens' start and end characters, instead
                of the tokenizer's.

        Raises:
            ValueError: there is no text, or something is not a string.
        """
        texts, offsets = self._args_parser(inputs, **kwargs)
        is_fast = self.tokenizer.is_fast
        encoded = self.encode(
            texts, return_special_tokens_mask=True, return_offsets_mapping=is_fast
        )
        offsets = offsets or encoded.get("offset_mapping") or [None] * len(texts)
        answers = []
        rows = rows_of(encoded)
        for number, (logits,) in enumerate(self.forward(rows)):
            tokens = Tokens(
                texts[number],
                rows[number]["input_ids"],
                encoded["special_tokens_mask"][number],
                offsets[number],
                encoded.encodings[number].word_ids if is_fast else None,
            )
            entities = self._entities(tokens, softmax(logits))
            answers.append(self.group_entities(entities) if self.grouped_entities else entities)
        return answers[0] if len(answers) == 1 else answers

    def by_row(self, output: ModelOutput, lengths: list[int]) -> tuple[list[np.ndarray], ...]:
        """Returns a batch's logits (tokens, labels), row by row, without padding."""
        return (without_padding(output.logits, lengths),)

    def _entities(self, tokens: Tokens, scores: np.ndarray) -> list[Entity]:
        """Returns a text's tokens that have an entity's label; `scores` is (tokens, labels)."""
        entities: list[Entity] = []
        by_word = self.grouped_entities and self.ignore_subwords
        labels = scores.argmax(axis=-1).tolist()
        # Models are trained on words' first tokens, so their outputs for others have no meaning.
        for index, label in enumerate(tokens.labels_by_word(labels) if by_word else labels):
            name = self.model.config.id2label[label]
            if name in self.ignore_labels or tokens.is_special[index]:
                continue
            start, end = tokens.place(index)
            word = self.tokenizer.convert_ids_to_tokens(tokens.ids[index])
            if tokens.ids[index] == self.tokenizer.unk_token_id and start is not None:
                word = tokens.text[start:end]
            entity: Entity = {
                "word": word,
                "score": scores[index, label].item(),
                "entity": name,
                "index": index,
                "start": start,
                "end": end,
            }
            if by_word:
                entity["is_subword"] = tokens.goes_on(index)
            entities.append(entity)
        return entities

    def group_entities(self, entities: list[Entity]) -> list[Entity]:
        """Groups neighboring tokens of the same kind of entity; a label with B- begins a group."""
        groups: list[list[Entity]] = []
        for entity in entities:
            if groups and self._continues(groups[-1][-1], entity):
                groups[-1].append(entity)
            else:
                groups.append([entity])
        return [self.group_sub_entities(group) for group in groups]

    def _continues(self, last: Entity, entity: Entity) -> bool:
        if entity["index"] != last["index"] + 1:
            return False
        if self.ignore_subwords and entity["is_subword"]:
            return True
        begins = entity["entity"].split("-")[0] == "B"
        return not begins and _kind(entity) == _kind(last)

    def group_sub_entities(self, entities: list[Entity]) -> Entity:
        """Makes one entity of several neighboring tokens, with the mean of their scores.

        With `ignore_subwords`, only the scores of words' first tokens count.
        """
        first, *others = entities
        counted = [e for e in others if not (self.ignore_subwords and e["is_subword"])]
        return {
            "entity_group": _kind(first),
            "score": float(np.mean([entity["score"] for entity in (first, *counted)])),
            "word": self.tokenizer.convert_tokens_to_string([each["word"] for each in entities]),
            "start": first["start"],
            "end": entities[-1]["end"],
        }


def _kind(entity: Entity) -> str:
    """Returns the kind of entity in a label: "PER" for "B-PER"."""
    return entity["entity"].split("-")[-1]


NerPipeline = TokenClassificationPipeline
