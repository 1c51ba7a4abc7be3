"""Tokenizers that the `tokenizers` package does the work for."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from loralib.io.atomic import atomic_write

from .tokenization_utils_base import (
    SPECIAL_TOKENS_ATTRIBUTES,
    PreTrainedTokenizerBase,
    text_of,
)
from .utils import logging

logger = logging.get_logger(__name__)

TOKENIZER_FILE = "tokenizer.json"

# The names that `tokenizers.Encoding` gives the rows.
_ENCODING_NAMES = {
    "input_ids": "ids",
    "token_type_ids": "type_ids",
    "attention_mask": "attention_mask",
    "special_tokens_mask": "special_tokens_mask",
}


class PreTrainedTokenizerFast(PreTrainedTokenizerBase):
    """A tokenizer over a `tokenizers.Tokenizer`, which holds vocabulary, splitting and framing.

    A call leaves nothing behind in the backend, so that two equal tokenizers pickle to the same
    bytes at any time: that is what `datasets` keys its caches by.

    Args:
        tokenizer_object: the backend; it is taken over, not copied.
        tokenizer_file: a ``tokenizer.json`` to read the backend from.
        added_tokens: further tokens by their ids, which continue the vocabulary's.
        settings: special tokens and the rest of `PreTrainedTokenizerBase`'s. Special tokens that
            the backend does not know as such are added; those it knows keep their flags there.

    Raises:
        OSError: `tokenizer_file` cannot be read.
        ValueError: there is no backend, or it gives an added token another id.
    """

    vocab_files = ({"tokenizer_file": TOKENIZER_FILE},)
    is_fast = True

    def __init__(
        self,
        tokenizer_object: Tokenizer | None = None,
        tokenizer_file: str | os.PathLike | None = None,
        added_tokens: Mapping[int, str | AddedToken] | None = None,
        **settings: Any,
    ):
        super().__init__(**settings)
        if tokenizer_object is None:
            if tokenizer_file is None:
                raise ValueError(f"{type(self).__name__} needs tokenizer_object or tokenizer_file")
            tokenizer_object = read_tokenizer_file(tokenizer_file)
        self._tokenizer = tokenizer_object
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        roles = [settings.get(name) for name in SPECIAL_TOKENS_ATTRIBUTES]
        roles += settings.get("additional_special_tokens") or []
        self._add_tokens(added_tokens or {}, [token for token in roles if token is not None])

    def _add_tokens(
        self, added: Mapping[int, str | AddedToken], roles: Sequence[str | AddedToken]
    ) -> None:
        """Adds what the files add, then the special tokens that are still missing."""
        special = {text_of(token): _as_special(token) for token in roles}
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        for index, token in sorted(added.items()):
            text = text_of(token)
            if text not in known:
                # A token without flags takes those of its role.
                flagged = special.get(text, token) if isinstance(token, str) else token
                self._tokenizer.add_tokens([flagged])
                known.add(text)
            if self._tokenizer.token_to_id(text) != index:
                raise ValueError(
                    f"the added token {text!r} has the id {index} in the files, but "
                    f"{self._tokenizer.token_to_id(text)} in the vocabulary"
                )
        missing = [token for text, token in special.items() if text not in known]
        grown = [token.content for token in missing if self._token_to_id(token.content) is None]
        self._tokenizer.add_special_tokens(missing)
        if grown:
            logger.warning(
                "special tokens missing from the vocabulary are added at its end, where the model "
                "may have no embedding: %s",
                ", ".join(grown),
            )

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The `tokenizers.Tokenizer`."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens, without added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """All tokens, added ones included, with their ids."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once; among them those that only the backend marks as such."""
        marked = self._tokenizer.get_added_tokens_decoder().values()
        others = [token.content for token in marked if token.special]
        return list(dict.fromkeys([*super().all_special_tokens, *others]))

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many special tokens frame a text, or a pair of texts."""
        return self._tokenizer.num_special_tokens_to_add(pair)

    def _encode_batch(
        self,
        texts: list[str],
        pairs: list[str] | None,
        columns: Sequence[str],
        add_special_tokens: bool,
        truncation: str,
        max_length: int | None,
    ) -> tuple[dict[str, list[list[int]]], list[Encoding]]:
        inputs = texts if pairs is None else list(zip(texts, pairs, strict=True))
        if truncation:
            self._tokenizer.enable_truncation(
                max_length, strategy=truncation, direction=self.truncation_side
            )
        try:
            encodings = self._tokenizer.encode_batch(inputs, add_special_tokens=add_special_tokens)
        except Exception as error:  # the package raises no narrower class
            how = f"truncation={truncation!r}, max_length={max_length}"
            raise ValueError(f"the texts cannot be encoded ({how}): {error}") from error
        finally:
            self._tokenizer.no_truncation()
        rows = {
            name: [getattr(encoding, _ENCODING_NAMES[name]) for encoding in encodings]
            for name in columns
        }
        return rows, encodings

    def _token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def _id_to_token(self, index: int) -> str | None:
        return self._tokenizer.id_to_token(index)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def save_vocabulary(self, save_directory: str | os.PathLike) -> tuple[str, ...]:
        """Writes ``tokenizer.json``, which holds all of the backend; returns its path."""
        path = Path(save_directory, TOKENIZER_FILE)
        with atomic_write(path) as temporary:
            # Not by its own `save`, which does not raise OSError when the disk is full.
            temporary.write_text(self._tokenizer.to_str(pretty=True), "utf-8")
        return (str(path),)

    def _special_tokens_to_save(self) -> dict[str, Any]:
        """The special tokens by role; those with flags as dicts, which keep these."""
        flagged = {
            token.content: {
                "content": token.content,
                "lstrip": token.lstrip,
                "normalized": token.normalized,
                "rstrip": token.rstrip,
                "single_word": token.single_word,
            }
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.lstrip or token.rstrip or token.single_word
        }
        return {
            role: token if isinstance(token, list) else flagged.get(token, token)
            for role, token in self.special_tokens_map.items()
        }


def read_tokenizer_file(path: str | os.PathLike) -> Tokenizer:
    """The backend in a ``tokenizer.json``.

    Raises:
        OSError: the file is missing or damaged.
    """
    try:
        return Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the package raises no narrower class
        raise OSError(f"{path}: not a tokenizer file ({error})") from error


def _as_special(token: str | AddedToken) -> AddedToken:
    return token if isinstance(token, AddedToken) else AddedToken(token, special=True)
