"""Tokenizers that give ids alone: upstream's "slow" ones, which are not slow here."""

from typing import Any

from tokenizers import AddedToken  # noqa: F401 - importable from here, too

from .batch_encoding import BatchEncoding
from .tokenization_inputs import RowSettings
from .tokenization_utils_base import PreTrainedTokenizerBase


class PreTrainedTokenizer(PreTrainedTokenizerBase):
    """A tokenizer whose tokens are not aligned with the text.

    `build_inputs_with_special_tokens`, `create_token_type_ids_from_sequences` and
    `get_special_tokens_mask` make rows from a text's ids. A subclass implements `_ids_of`, which
    returns these ids, and the abstract methods of `PreTrainedTokenizerBase`.
    """

    def encode_plus(
        self, text: Any, text_pair: Any = None, *positional: Any, **settings: Any
    ) -> BatchEncoding:
        """Encodes one text, or one pair, each given as a string, or as a list of tokens or ids."""
        words = settings.get("is_split_into_words", len(positional) > 5 and positional[5])
        if not words and isinstance(text, list | tuple):
            ids, pair = self._known_ids(text), text_pair and self._known_ids(text_pair)
            settings.setdefault("prepend_batch_axis", True)
            return self.prepare_for_model(ids, pair, *positional, **settings)
        return super().encode_plus(text, text_pair, *positional, **settings)

    def _known_ids(self, tokens: Any) -> list[int]:
        """Returns the ids of a text that is given as a string, or as a list of tokens or ids."""
        if isinstance(tokens, str):
            return self._ids_of([tokens])[0]
        return [
            self.convert_tokens_to_ids(each) if isinstance(each, str) else each for each in tokens
        ]

    def _encode_batch(
        self, firsts: list[Any], seconds: list[Any] | None, settings: RowSettings
    ) -> tuple[dict[str, list[Any]], None]:
        ids = self._ids_of_words if settings.words else self._ids_of
        return self._rows_of_ids(ids(firsts), None if seconds is None else ids(seconds), settings)

    def _ids_of_words(self, texts: list[list[str]]) -> list[list[int]]:
        """Returns the ids of each text, given as words, without special tokens."""
        rows = iter(self._ids_of(self._spaced([word for words in texts for word in words])))
        return [[index for _ in words for index in next(rows)] for words in texts]

    def _spaced(self, texts: list[str]) -> list[str]:
        """Puts a space before each text or word, if its ids depend on that."""
        return texts

    @property
    def added_tokens_decoder(self) -> dict[int, str]:
        """Id -> token, for the tokens added to the vocabulary."""
        return {index: token for token, index in self.get_added_vocab().items()}

    def _decode(
        self,
        ids: list[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Returns the text of ids.

        Args:
            ids: a row's ids.
            skip_special_tokens: leave out special tokens.
            spaces_between_special_tokens: put a space before and after each added token.
        """
        added = self.get_added_vocab()
        parts: list[str | list[str]] = []
        for token in self.convert_ids_to_tokens(ids, skip_special_tokens):
            if token in added:
                parts.append(token)
            elif parts and isinstance(parts[-1], list):
                parts[-1].append(token)
            else:
                parts.append([token])
        texts = [p if isinstance(p, str) else self.convert_tokens_to_string(p) for p in parts]
        return (" " if spaces_between_special_tokens else "").join(texts)

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, without special tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _ids_of")
