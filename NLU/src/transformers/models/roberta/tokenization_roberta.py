"""RoBERTa's tokenizer: GPT-2's byte-level BPE between RoBERTa's special tokens.

<s> A </s>      or, for a pair,      <s> A </s></s> B </s>
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from loralib.io.atomic import atomic_write_text

from ...batch_encoding import BatchEncoding
from ...special_tokens import Token
from ...tokenization_files import prefixed, write_json
from ...tokenization_inputs import Inputs
from ...tokenization_utils import PreTrainedTokenizer
from ...tokenization_utils_fast import TOKENIZER_FILE, TokenizersBackend, read_tokenizer_file
from ...utils import logging

logger = logging.get_logger(__name__)

VOCAB_FILE = "vocab.json"
MERGES_FILE = "merges.txt"
VOCAB_FILES_NAMES = {"vocab_file": VOCAB_FILE, "merges_file": MERGES_FILE}


class RobertaBackend(TokenizersBackend):
    """Byte-level BPE: any text has ids, and the ids give the text back.

    A space belongs to the word after it, so a word at the start of a text is a different token from
    the same word later on; `add_prefix_space` makes them the same.

    Args:
        vocab_file: ``vocab.json``: the id of each token.
        merges_file: ``merges.txt``: the pairs to merge, in order of priority.
        tokenizer_file: ``tokenizer.json``, which holds both and takes precedence over them.
        errors: how `decode` treats bytes that are not UTF-8; only "replace" is supported.
        mask_token: if given as a string, it absorbs the space before it.
        add_prefix_space: put a space before each text.
        trim_offsets: leave the space before a word out of a fast tokenizer's character offsets.
        added_tokens, settings: as in `TokenizersBackend`.

    Raises:
        OSError: a file cannot be read.
        ValueError: files are missing, or their model is not BPE.
    """

    config_names = (*TokenizersBackend.config_names, "add_prefix_space", "trim_offsets")
    model_input_names: list[str] = ["input_ids", "attention_mask"]  # noqa: RUF012
    max_model_input_sizes: Mapping[str, int] = dict.fromkeys(
        (
            "roberta-base",
            "roberta-large",
            "roberta-large-mnli",
            "distilroberta-base",
            "roberta-base-openai-detector",
            "roberta-large-openai-detector",
        ),
        512,
    )

    def __init__(
        self,
        vocab_file: str | os.PathLike | None = None,
        merges_file: str | os.PathLike | None = None,
        tokenizer_file: str | os.PathLike | None = None,
        errors: str = "replace",
        *,
        bos_token: Token = "<s>",
        eos_token: Token = "</s>",
        unk_token: Token = "<unk>",
        sep_token: Token = "</s>",
        pad_token: Token = "<pad>",
        cls_token: Token = "<s>",
        mask_token: Token = "<mask>",
        add_prefix_space: bool = False,
        trim_offsets: bool = True,
        added_tokens: Mapping[int, Token] | None = None,
        **settings: Any,
    ):
        if errors != "replace":
            raise ValueError(f"errors={errors!r}: bytes that are not UTF-8 are always replaced")
        self.errors = errors
        self.add_prefix_space = add_prefix_space
        self.trim_offsets = trim_offsets
        if tokenizer_file is not None:
            backend = read_tokenizer_file(tokenizer_file)
        elif vocab_file is not None and merges_file is not None:
            backend = _read_bpe(vocab_file, merges_file)
        else:
            raise ValueError(f"RoBERTa needs {TOKENIZER_FILE}, or {VOCAB_FILE} with {MERGES_FILE}")
        if not isinstance(backend.model, BPE):
            kind = type(backend.model).__name__
            raise ValueError(f"{tokenizer_file}: holds a {kind} model, but RoBERTa's is BPE")
        if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
            backend.pre_tokenizer.add_prefix_space = add_prefix_space
        if isinstance(mask_token, str):
            mask_token = AddedToken(mask_token, lstrip=True, special=True)
        super().__init__(
            backend,
            # A token that tokenizer.json does not list is not in its vocabulary.
            added_tokens=added_tokens if tokenizer_file is None else None,
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            sep_token=sep_token,
            pad_token=pad_token,
            cls_token=cls_token,
            mask_token=mask_token,
            **settings,
        )
        self._set_frame()

    def _role_changed(self, name: str) -> None:
        if name in ("cls_token", "sep_token") and "_tokenizer" in vars(self):
            self._set_frame()

    def _set_frame(self) -> None:
        """Tells the backend which special tokens frame a row, once both are known."""
        ends = [
            (token, token and self._token_to_id(token))
            for token in (self.sep_token, self.cls_token)
        ]
        if all(index is not None for _, index in ends):
            self._tokenizer.post_processor = processors.RobertaProcessing(
                *ends, trim_offsets=self.trim_offsets, add_prefix_space=self.add_prefix_space
            )

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Puts a text's ids, or a pair's, between ``<s>`` and ``</s>``."""
        start, end = [self.cls_token_id], [self.sep_token_id]
        row = start + token_ids_0 + end
        return row if token_ids_1 is None else row + end + token_ids_1 + end

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Returns zeros: RoBERTa has one token type."""
        return [0] * len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))

    def _save_tokens(
        self, folder: Path, legacy_format: bool | None, prefix: str | None
    ) -> tuple[str, ...]:
        flagged = [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if not token.special and (token.lstrip or token.rstrip or token.single_word)
        ]
        if flagged and (legacy_format or not self.is_fast):
            logger.warning(
                "lstrip, rstrip and single_word of added tokens are recorded only in %s, which "
                "the fast tokenizer writes: %s",
                TOKENIZER_FILE,
                ", ".join(flagged),
            )
        return super()._save_tokens(folder, legacy_format, prefix)

    def save_vocabulary(
        self, save_directory: str | os.PathLike, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Writes ``vocab.json`` and ``merges.txt``; returns their paths."""
        vocab_path = prefixed(save_directory, VOCAB_FILE, filename_prefix)
        merges_path = prefixed(save_directory, MERGES_FILE, filename_prefix)
        model = json.loads(self._tokenizer.to_str())["model"]
        write_json(vocab_path, model["vocab"])
        lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
        atomic_write_text(merges_path, "\n".join(lines) + "\n")
        return str(vocab_path), str(merges_path)


class RobertaTokenizer(RobertaBackend, PreTrainedTokenizer):
    """RoBERTa's tokenizer that gives ids alone, the same ids as `RobertaTokenizerFast`.

    Words (``is_split_into_words``) get a space before them whatever `add_prefix_space` is, unless
    they start with an added token. A call with ``add_prefix_space=True`` does so with its texts.

    Args:
        settings: as in `RobertaBackend`.
    """

    vocab_files = (VOCAB_FILES_NAMES, {"tokenizer_file": TOKENIZER_FILE})

    @property
    def byte_encoder(self) -> dict[int, str]:
        """The character that stands for each byte in the vocabulary, such as "Ġ" for a space."""
        # Bytes that Latin-1 prints stand for themselves; the others get the characters from 256 on.
        visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
        hidden = [byte for byte in range(256) if byte not in visible]
        return {byte: chr(byte) for byte in visible} | {
            byte: chr(256 + place) for place, byte in enumerate(hidden)
        }

    @property
    def byte_decoder(self) -> dict[str, int]:
        """The byte that each character of the vocabulary stands for."""
        return {letter: byte for byte, letter in self.byte_encoder.items()}

    def _encode(
        self,
        inputs_of: Callable[[bool], Inputs],
        *positional: Any,
        add_prefix_space: bool = False,
        **settings: Any,
    ) -> BatchEncoding:
        def spaced(words: bool) -> Inputs:
            firsts, seconds, batched = inputs_of(words)
            if words:  # they get their spaces one by one
                return Inputs(firsts, seconds, batched)
            return Inputs(self._spaced(firsts), seconds and self._spaced(seconds), batched)

        return super()._encode(spaced if add_prefix_space else inputs_of, *positional, **settings)

    def _decode(
        self,
        ids: list[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = False,
    ) -> str:
        # 4.4.2 puts spaces there by default, as its encoding drops them; here the ids keep them.
        return super()._decode(ids, skip_special_tokens, spaces_between_special_tokens)

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _spaced(self, texts: list[str]) -> list[str]:
        """Puts a space before each text or word that starts with neither one nor an added token."""
        if getattr(self._tokenizer.pre_tokenizer, "add_prefix_space", False):  # it does that
            return texts
        added = self._tokenizer.get_added_tokens_decoder().values()
        apart = tuple(token.content for token in added if not token.single_word)
        return [
            text if not text or text[0].isspace() or text.startswith(apart) else f" {text}"
            for text in texts
        ]


def _read_bpe(vocab_file: str | os.PathLike, merges_file: str | os.PathLike) -> Tokenizer:
    """Reads GPT-2's byte-level BPE from its two files."""
    try:
        backend = Tokenizer(BPE.from_file(os.fspath(vocab_file), os.fspath(merges_file)))
    except Exception as error:  # the package raises no narrower class
        raise OSError(f"{vocab_file}, {merges_file}: not a BPE vocabulary ({error})") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    return backend
