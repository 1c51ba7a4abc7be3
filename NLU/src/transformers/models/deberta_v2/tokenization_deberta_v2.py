"""DeBERTa-v2's tokenizer: SentencePiece's unigram pieces between BERT's special tokens.

[CLS] A [SEP]      or, for a pair,      [CLS] A [SEP] B [SEP]
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import regex
import sentencepiece

from loralib.io.atomic import atomic_write

from ...special_tokens import Token, text_of
from ...tokenization_files import prefixed
from ...tokenization_utils import PreTrainedTokenizer

VOCAB_FILE = "spm.model"
# Unicode's punctuation, and every other ASCII character that is no letter, digit or space.
_PUNCTUATION = regex.compile(r"([\p{P}$+<=>^`|~])")


class DebertaV2Tokenizer(PreTrainedTokenizer):
    """SentencePiece's unigram model, which also normalizes the text.

    Special and added tokens are found first, even inside words. Each part between them is tokenized
    as a text of its own. Tokens that the model has no piece for get the ids after its pieces, as
    [MASK] does in the published files.

    Args:
        vocab_file: ``spm.model``.
        do_lower_case: lower-case texts first, except for special tokens.
        split_by_punct: split off punctuation before the pieces are looked up.
        added_tokens: id -> token, for tokens beyond the pieces.
        settings: special tokens, and the other settings of `PreTrainedTokenizerBase`.

    Raises:
        OSError: the file is missing or damaged.
        ValueError: an added token has the id of another token, or an id that is not its piece's.
    """

    vocab_files = ({"vocab_file": VOCAB_FILE},)
    config_names = (*PreTrainedTokenizer.config_names, "do_lower_case", "split_by_punct")
    max_model_input_sizes: Mapping[str, int] = dict.fromkeys(
        (
            "microsoft/deberta-v2-xlarge",
            "microsoft/deberta-v2-xxlarge",
            "microsoft/deberta-v2-xlarge-mnli",
            "microsoft/deberta-v2-xxlarge-mnli",
        ),
        512,
    )

    def __init__(
        self,
        vocab_file: str | os.PathLike,
        do_lower_case: bool = False,
        split_by_punct: bool = False,
        *,
        bos_token: Token = "[CLS]",
        eos_token: Token = "[SEP]",
        unk_token: Token = "[UNK]",
        sep_token: Token = "[SEP]",
        pad_token: Token = "[PAD]",
        cls_token: Token = "[CLS]",
        mask_token: Token = "[MASK]",
        added_tokens: Mapping[int, Token] | None = None,
        **settings: Any,
    ):
        self._added: dict[str, int] = {}
        self._separator: regex.Pattern | None = None
        super().__init__(
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            sep_token=sep_token,
            pad_token=pad_token,
            cls_token=cls_token,
            mask_token=mask_token,
            **settings,
        )
        self.do_lower_case = do_lower_case
        self.split_by_punct = split_by_punct
        try:
            self._model = Path(vocab_file).read_bytes()
            self._pieces = _read_pieces(self._model)
        except (OSError, RuntimeError) as error:
            raise OSError(f"{vocab_file}: not a SentencePiece model ({error})") from error
        for index, token in (added_tokens or {}).items():
            self._add_from_files(text_of(token), index)
        missing = [t for t in self.all_special_tokens if self._token_to_id(t) is None]
        self._add(missing, special=True)
        self._warn_of_growth([token for token in missing if token != self.mask_token])

    def _add_from_files(self, token: str, index: int) -> None:
        """Gives `token` the id that the files give it."""
        known = self._token_to_id(token)
        holder = self._id_to_token(index)
        if known not in (None, index) or holder not in (None, token):
            was = f"the id {known}" if known is not None else f"{holder!r} there"
            raise ValueError(
                f"the added token {token!r} has the id {index} in the files, but the vocabulary "
                f"has {was}"
            )
        if known is None:
            self._added[token] = index

    def _add(self, tokens: list[Token], special: bool) -> None:
        for token in map(text_of, tokens):
            spelled = token.lower() if self.do_lower_case and not special else token
            if self._token_to_id(spelled) is None:
                self._added[spelled] = max([self.vocab_size - 1, *self._added.values()]) + 1
        self._find_separators()

    def _role_changed(self, name: str) -> None:
        if "_pieces" in vars(self):
            self._find_separators()

    def _find_separators(self) -> None:
        special = [t for t in self.all_special_tokens if self._token_to_id(t) is not None]
        self._separator = _any_of([*self._added, *special])

    @property
    def vocab_size(self) -> int:
        """The number of pieces, without added tokens."""
        return self._pieces.get_piece_size()

    def get_vocab(self) -> dict[str, int]:
        """Returns all tokens, added ones included, with their ids."""
        return {self._pieces.id_to_piece(i): i for i in range(self.vocab_size)} | self._added

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the tokens that the model has no piece for, with their ids."""
        return dict(self._added)

    # -- A row's special tokens --------------------------------------------------------------------

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Adds [CLS] before a text's ids, or a pair's, and [SEP] after each text."""
        end = [self.sep_token_id]
        row = [self.cls_token_id, *token_ids_0, *end]
        return row if token_ids_1 is None else row + token_ids_1 + end

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Returns 0 for the first text and its special tokens, 1 for the second and its [SEP]."""
        first = [0] * (len(token_ids_0) + 2)
        return first if token_ids_1 is None else first + [1] * (len(token_ids_1) + 1)

    # -- From text to ids --------------------------------------------------------------------------

    def _ids_of(self, texts: Iterable[str]) -> list[list[int]]:
        # All parts go to the backend at once; a text's parts at odd indices are added tokens.
        split = [self._parts(text) for text in texts]
        words = [[self._words(part) for part in parts[::2]] for parts in split]
        found = iter(self._pieces.encode([word for row in words for part in row for word in part]))
        ids = []
        for parts, row in zip(split, words, strict=True):
            ids.append([])
            for place, part in enumerate(row):
                if place > 0:
                    ids[-1].append(self._token_to_id(parts[2 * place - 1]))
                for _ in part:
                    ids[-1].extend(next(found))
        return ids

    def _parts(self, text: str) -> list[str]:
        """Splits a text, lower-cased if so set, at added tokens; these have the odd indices."""
        parts = self._separator.split(text) if self._separator else [text]
        if self.do_lower_case:
            # Split again: the text in lower case may contain more added tokens.
            text = "".join(part if i % 2 else part.lower() for i, part in enumerate(parts))
            parts = self._separator.split(text) if self._separator else [text]
        return parts

    def _words(self, text: str) -> list[str]:
        """Returns what the backend gets: the text as a whole, or split at punctuation."""
        return _PUNCTUATION.split(text) if self.split_by_punct else [text]

    # -- Between tokens, ids and text --------------------------------------------------------------

    def _token_to_id(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        # For a token that it does not know, the backend returns the id of its own unknown piece.
        index = self._pieces.piece_to_id(token)
        return index if self._pieces.id_to_piece(index) == token else None

    def _id_to_token(self, index: int) -> str | None:
        if 0 <= index < self.vocab_size:
            return self._pieces.id_to_piece(index)
        return next((token for token, each in self._added.items() if each == index), None)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Returns the text of consecutive tokens."""
        text = "".join(tokens).replace("▁", " ")
        return text[1:] if tokens and tokens[0].startswith("▁") else text

    # -- Files and pickles -------------------------------------------------------------------------

    def save_vocabulary(
        self, save_directory: str | os.PathLike, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Writes ``spm.model`` as it was read; returns its path."""
        path = prefixed(save_directory, VOCAB_FILE, filename_prefix)
        with atomic_write(path) as temporary:
            temporary.write_bytes(self._model)
        return (str(path),)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_pieces"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pieces = _read_pieces(self._model)


def _read_pieces(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Loads the backend; raises RuntimeError for bytes that are not a model."""
    pieces = sentencepiece.SentencePieceProcessor()
    pieces.load_from_serialized_proto(model)
    return pieces


def _any_of(tokens: Iterable[str]) -> regex.Pattern | None:
    """Returns a pattern for any of `tokens`, the longest where several start at the same place."""
    longest_first = sorted({*filter(None, tokens)}, key=lambda token: (-len(token), token))
    if not longest_first:
        return None
    return regex.compile(f"({'|'.join(map(regex.escape, longest_first))})")
