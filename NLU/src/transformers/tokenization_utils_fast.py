"""Tokenizers that use the `tokenizers` package as their backend."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

from loralib.io.atomic import atomic_write_text

from .batch_encoding import Encoding
from .special_tokens import ADDITIONAL, ROLES, Token, as_special, text_of
from .tokenization_files import prefixed
from .tokenization_inputs import RowSettings, check_stride, cut_lengths
from .tokenization_utils_base import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"

# A column -> the name of its attribute in an `Encoding`; the ids are not listed.
_ENCODING_NAMES = {
    "token_type_ids": "type_ids",
    "attention_mask": "attention_mask",
    "special_tokens_mask": "special_tokens_mask",
    "offset_mapping": "offsets",
}

# Pairs of texts that both have more characters than this, for each token of a row, are long.
_LONG = 16
# How many more tokens such a text keeps beforehand than a row has room for: where it is cut, its
# last tokens may become others.
_MORE = 8

# Held during a call of a backend: for the call's time, the backend has its truncation, which
# another thread's call would change. One lock for all, because tokenizers may share a backend.
# A thread may take it again, as in a signal handler that calls a tokenizer.
_one_thread = RLock()


def _unlock() -> None:
    """Makes a new lock in a forked process."""
    global _one_thread
    _one_thread = RLock()


# A process is forked between calls, not during one: the copy of a backend in the middle of a call
# would wait forever for a thread that the new process lacks, or cut texts as that call did.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=lambda: _one_thread.acquire(),
        after_in_parent=lambda: _one_thread.release(),
        after_in_child=_unlock,
    )


class TokenizersBackend(PreTrainedTokenizerBase):
    """A tokenizer over a `tokenizers.Tokenizer`, which holds the vocabulary and splits texts.

    A call leaves no state in the backend, so equal tokenizers always pickle to the same bytes.
    These are the keys of the caches of `datasets`.

    Args:
        backend: the backend, which is not copied.
        added_tokens: id -> token, for tokens whose ids follow the vocabulary's.
        settings: special tokens, and the other settings of `PreTrainedTokenizerBase`. Special
            tokens that the backend does not mark as special are added; the others keep their flags.

    Raises:
        ValueError: the backend gives an added token a different id.
    """

    def __init__(
        self,
        backend: Tokenizer,
        added_tokens: Mapping[int, Token] | None = None,
        **settings: Any,
    ):
        super().__init__(**settings)
        self._tokenizer = backend
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        roles = [settings.get(name) for name in ROLES]
        roles += settings.get(ADDITIONAL) or []
        self._add_from_files(added_tokens or {}, [token for token in roles if token is not None])

    def _add_from_files(self, added: Mapping[int, Token], roles: Sequence[Token]) -> None:
        """Adds the tokens that the files add, then special tokens that are still missing."""
        special = {text_of(token): as_special(token) for token in roles}
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
        self._warn_of_growth(grown)

    def _add(self, tokens: list[Token], special: bool) -> None:
        if special:
            self._tokenizer.add_special_tokens([as_special(token) for token in tokens])
        else:
            self._tokenizer.add_tokens(tokens)

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
        """Returns all tokens, added ones included, with their ids."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the tokens added to the vocabulary, with their ids."""
        decoder = self._tokenizer.get_added_tokens_decoder()
        model = self._tokenizer.model
        return {
            token.content: index
            for index, token in sorted(decoder.items())
            if model.token_to_id(token.content) is None
        }

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once, including those that only the backend marks as special."""
        marked = self._tokenizer.get_added_tokens_decoder().values()
        others = [token.content for token in marked if token.special]
        return list(dict.fromkeys([*super().all_special_tokens, *others]))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Returns the text of consecutive tokens."""
        decoder = self._tokenizer.decoder
        return decoder.decode(list(tokens)) if decoder is not None else " ".join(tokens)

    def _encodings(
        self,
        firsts: list[Any],
        seconds: list[Any] | None,
        settings: RowSettings,
    ) -> list[Encoding]:
        """Returns the backend's encoding of each row."""
        inputs = firsts if seconds is None else list(zip(firsts, seconds, strict=True))
        cuts_both = settings.truncation == "longest_first" and self.truncation_side == "right"
        with _one_thread:
            if seconds is not None and cuts_both and not settings.overflow and not settings.words:
                inputs = [self._cut_beforehand(pair, settings) for pair in inputs]
            encodings = self._encoded(inputs, settings)
        if settings.truncation and settings.overflow and not _keeps_what_is_cut_off():
            longest = max(map(len, encodings), default=0)
            if longest >= settings.max_length:
                raise ValueError(
                    f"tokenizers {tokenizers.__version__} loses most of what it cuts off from long "
                    "texts: install another version, such as 0.23.3"
                )
        return encodings

    def _cut_beforehand(self, pair: tuple[str, str], settings: RowSettings) -> tuple[str, str]:
        """Returns two long texts without most of what a row has no room for; others as they are.

        The backend combines each part that it cuts off one text with each part that it cuts off the
        other, even if nobody asks for them: gigabytes for two texts of some thousand words.
        """
        first, second = pair
        if min(len(first), len(second)) <= _LONG * (settings.max_length or 0):
            return pair
        frame = self._tokenizer.num_special_tokens_to_add(True) * settings.add_special_tokens
        room = (settings.max_length or 0) - frame
        whole, kept = self._kept(pair, room)
        # The longer text stays the longer one.
        more = (2 * _MORE, _MORE) if len(whole[0]) > len(whole[1]) else (_MORE, 2 * _MORE)
        stops = [
            max((stop for _, stop in each.offsets[: len(ids) + extra]), default=0)
            for each, ids, extra in zip(whole, kept, more, strict=True)
        ]
        shorter = first[: stops[0]], second[: stops[1]]
        return shorter if self._kept(shorter, room)[1] == kept else pair

    def _kept(self, pair: tuple[str, str], room: int) -> tuple[list[Encoding], list[list[int]]]:
        """Returns the encodings of a pair's texts, and of each, the ids that a row has room for."""
        whole = self._encoded(list(pair), RowSettings((), add_special_tokens=False))
        counts = cut_lengths(len(whole[0]), len(whole[1]), "longest_first", room)
        return whole, [each.ids[:count] for each, count in zip(whole, counts, strict=True)]

    def _encoded(self, inputs: list[Any], settings: RowSettings) -> list[Encoding]:
        """Returns the backend's encodings, cut as the settings say."""
        if settings.truncation:
            self._tokenizer.enable_truncation(
                settings.max_length,
                stride=settings.stride if settings.overflow else 0,
                strategy=settings.truncation,
                direction=self.truncation_side,
            )
        try:
            return self._tokenizer.encode_batch(
                inputs,
                is_pretokenized=settings.words,
                add_special_tokens=settings.add_special_tokens,
            )
        except Exception as error:  # the package raises no narrower class
            how = f"truncation={settings.truncation!r}, max_length={settings.max_length}"
            raise ValueError(f"the texts cannot be encoded ({how}): {error}") from error
        finally:
            self._tokenizer.no_truncation()

    def _token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def _id_to_token(self, index: int) -> str | None:
        with suppress(OverflowError):  # negative, as the -100 of labels, or too large
            return self._tokenizer.id_to_token(index)
        return None


class PreTrainedTokenizerFast(TokenizersBackend):
    """A tokenizer over a `tokenizers.Tokenizer` that aligns tokens with words and characters.

    Args:
        tokenizer_object: the backend, which also adds the special tokens; it is not copied.
        tokenizer_file: a ``tokenizer.json`` to read the backend from.
        added_tokens, settings: as in `TokenizersBackend`.

    Raises:
        OSError: `tokenizer_file` cannot be read.
        ValueError: there is no backend, or it gives an added token a different id.
    """

    vocab_files: tuple[dict[str, str], ...] = ({"tokenizer_file": TOKENIZER_FILE},)
    is_fast = True

    def __init__(
        self,
        tokenizer_object: Tokenizer | None = None,
        tokenizer_file: str | os.PathLike | None = None,
        added_tokens: Mapping[int, Token] | None = None,
        **settings: Any,
    ):
        if tokenizer_object is None:
            if tokenizer_file is None:
                raise ValueError(f"{type(self).__name__} needs tokenizer_object or tokenizer_file")
            tokenizer_object = read_tokenizer_file(tokenizer_file)
        super().__init__(tokenizer_object, added_tokens, **settings)

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Returns how many special tokens are added to a text, or to a pair of texts."""
        return self._tokenizer.num_special_tokens_to_add(pair)

    def _encode_batch(
        self, firsts: list[Any], seconds: list[Any] | None, settings: RowSettings
    ) -> tuple[dict[str, list[Any]], list[Encoding]]:
        if seconds is not None and settings.overflow and settings.stride and settings.truncation:
            self._check_strides(firsts, seconds, settings)
        return columns_of(self._encodings(firsts, seconds, settings), settings)

    def _check_strides(self, firsts: list[Any], seconds: list[Any], settings: RowSettings) -> None:
        """Checks that in each pair, a text leaves the other one more room than the stride.

        The backend would panic, which prints its stack and is not an Exception.
        """
        alone = RowSettings((), add_special_tokens=False, words=settings.words)
        lengths = [map(len, self._encodings(texts, None, alone)) for texts in (firsts, seconds)]
        frame = self.num_special_tokens_to_add(pair=True) if settings.add_special_tokens else 0
        for index, (first, second) in enumerate(zip(*lengths, strict=True)):
            try:
                check_stride(
                    settings.stride, settings.max_length, frame, first, second, settings.truncation
                )
            except ValueError as error:
                raise ValueError(f"row {index}: {error}") from error

    def _decode(self, ids: list[int], skip_special_tokens: bool, **_: Any) -> str:
        try:
            with _one_thread:
                return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            self.convert_ids_to_tokens(ids)  # names the id
            raise

    def _save_tokens(
        self, folder: Path, legacy_format: bool | None, prefix: str | None
    ) -> tuple[str, ...]:
        written = ()
        if legacy_format is not False:
            written = super()._save_tokens(folder, legacy_format, prefix)
        if legacy_format and written:
            return written
        path = prefixed(folder, TOKENIZER_FILE, prefix)
        # Not by its own `save`, which does not raise OSError when the disk is full.
        atomic_write_text(path, self._tokenizer.to_str(pretty=True))
        return (*written, str(path))

    def save_vocabulary(
        self, save_directory: str | os.PathLike, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Writes nothing: ``tokenizer.json``, which `save_pretrained` writes, holds all of it."""
        return ()


@cache
def _keeps_what_is_cut_off() -> bool:
    """Returns whether `overflowing` has all that was cut off; in 0.23.1 and 0.23.2, it has not."""
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(1)
    return len(backend.encode("a a a").overflowing) == 2


def columns_of(
    encodings: list[Encoding], settings: RowSettings
) -> tuple[dict[str, list[Any]], list[Encoding]]:
    """Returns the rows' columns and encodings; those of what was cut off, too, if asked for."""
    samples = []
    if settings.overflow:
        groups = [[encoding, *encoding.overflowing] for encoding in encodings]
        encodings = [encoding for group in groups for encoding in group]
        samples = [index for index, group in enumerate(groups) for _ in group]
    names = [(name, _ENCODING_NAMES.get(name, "ids")) for name in settings.columns]
    columns = {name: [getattr(each, theirs) for each in encodings] for name, theirs in names}
    if settings.overflow:
        columns["overflow_to_sample_mapping"] = samples
    return columns, encodings


def read_tokenizer_file(path: str | os.PathLike) -> Tokenizer:
    """Reads the backend in a ``tokenizer.json``.

    Raises:
        OSError: the file is missing or damaged.
    """
    try:
        return Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the package raises no narrower class
        raise OSError(f"{path}: not a tokenizer file ({error})") from error
