"""DeBERTa-v2's tokenizer: SentencePiece's unigram pieces in BERT's frame.

[CLS] A [SEP]      or, for a pair,      [CLS] A [SEP] B [SEP]
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import regex
import sentencepiece
from tokenizers import AddedToken

from loralib.io.atomic import atomic_write

from ...tokenization_utils_base import PreTrainedTokenizerBase, text_of
from ...utils import logging

logger = logging.get_logger(__name__)

VOCAB_FILE = "spm.model"
# Unicode's punctuation, and what else ASCII has that is neither letter, digit nor space.
_PUNCTUATION = regex.compile(r"([\p{P}$+<=>^`|~])")


class DebertaV2Tokenizer(PreTrainedTokenizerBase):
    """SentencePiece's unigram model, which also normalizes the text.

    Special and added tokens are taken out of a text first, whatever they touch; each part between
    them is split as a text of its own. Those that the model has no piece for come after its pieces:
    [MASK] does in the published files.

    Args:
        vocab_file: ``spm.model``.
        do_lower_case: texts are put into lower case first.
        split_by_punct: punctuation is split off before the pieces are looked for.
        added_tokens: further tokens by their ids, beyond those of the pieces.
        settings: special tokens and the rest of `PreTrainedTokenizerBase`'s.

    Raises:
        OSError: the file is missing or damaged.
        ValueError: an added token has the id of another one, or another id than its piece.
    """

    vocab_files = ({"vocab_file": VOCAB_FILE},)
    config_names = (*PreTrainedTokenizerBase.config_names, "do_lower_case", "split_by_punct")

    def __init__(
        self,
        vocab_file: str | os.PathLike,
        *,
        bos_token: str | AddedToken = "[CLS]",
        eos_token: str | AddedToken = "[SEP]",
        unk_token: str | AddedToken = "[UNK]",
        sep_token: str | AddedToken = "[SEP]",
        pad_token: str | AddedToken = "[PAD]",
        cls_token: str | AddedToken = "[CLS]",
        mask_token: str | AddedToken = "[MASK]",
        do_lower_case: bool = False,
        split_by_punct: bool = False,
        added_tokens: Mapping[int, str | AddedToken] | None = None,
        **settings: Any,
    ):
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
        self._added: dict[str, int] = {}
        for index, token in (added_tokens or {}).items():
            self._add(text_of(token), index)
        for token in self.all_special_tokens:
            self._add_special(token)
        self._separator = _any_of([*self._added, *self.all_special_tokens])

    def _add(self, token: str, index: int) -> None:
        """Gives `token`, which the files name, its id."""
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

    def _add_special(self, token: str) -> None:
        """Puts a special token after all others, where it has no id yet."""
        if self._token_to_id(token) is not None:
            return
        self._added[token] = max([self.vocab_size - 1, *self._added.values()]) + 1
        if token != self.mask_token:
            logger.warning(
                "the special token %s is missing from the vocabulary and added at its end, where "
                "the model may have no embedding",
                token,
            )

    @property
    def vocab_size(self) -> int:
        """The number of pieces, without added tokens."""
        return self._pieces.get_piece_size()

    def get_vocab(self) -> dict[str, int]:
        """All tokens, added ones included, with their ids."""
        return {self._pieces.id_to_piece(i): i for i in range(self.vocab_size)} | self._added

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many special tokens frame a text, or a pair of texts."""
        return 3 if pair else 2

    # -- From text to ids --------------------------------------------------------------------------

    def _encode_batch(
        self,
        texts: list[str],
        pairs: list[str] | None,
        columns: Sequence[str],
        add_special_tokens: bool,
        truncation: str,
        max_length: int | None,
    ) -> tuple[dict[str, list[list[int]]], None]:
        rows: dict[str, list[list[int]]] = {name: [] for name in columns}
        firsts = self._ids(texts)
        seconds = [None] * len(texts) if pairs is None else self._ids(pairs)
        frame = self.num_special_tokens_to_add(pairs is not None) if add_special_tokens else 0
        for first, second in zip(firsts, seconds, strict=True):
            if truncation:
                first, second = self._cut(first, second, truncation, max_length - frame)
            row = self._row(first, second, add_special_tokens)
            for name in columns:
                rows[name].append(row[name])
        return rows, None

    def _ids(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, without a frame."""
        # All parts go to the backend at once; a text's parts at odd indices are added tokens.
        split = [self._separator.split(text) if self._separator else [text] for text in texts]
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

    def _words(self, text: str) -> list[str]:
        """What the backend is given of a text: all of it, or it split at punctuation."""
        text = text.lower() if self.do_lower_case else text
        return _PUNCTUATION.split(text) if self.split_by_punct else [text]

    def _cut(
        self, first: list[int], second: list[int] | None, strategy: str, room: int
    ) -> tuple[list[int], list[int] | None]:
        """Both texts' ids with at most `room` in all.

        Raises:
            ValueError: the text to be cut is too short for that.
        """
        lengths = [len(first), len(second or ())]
        excess = sum(lengths) - room
        if excess <= 0:
            return first, second
        if second is None or strategy == "longest_first":
            lengths = _shortened(*lengths, room)
        else:
            cut = 0 if strategy == "only_first" else 1
            if lengths[cut] <= excess:
                raise ValueError(
                    f"the texts cannot be encoded (truncation={strategy!r}): {excess} tokens are "
                    f"too many, and the text to be cut has {lengths[cut]}"
                )
            lengths[cut] -= excess
        if self.truncation_side == "left":
            first = first[len(first) - lengths[0] :]
            return first, None if second is None else second[len(second) - lengths[1] :]
        return first[: lengths[0]], None if second is None else second[: lengths[1]]

    def _row(
        self, first: list[int], second: list[int] | None, framed: bool
    ) -> dict[str, list[int]]:
        """The row of a text or a pair, under the names that calls return."""
        start, end = ([self.cls_token_id], [self.sep_token_id]) if framed else ([], [])
        head = start + first + end
        tail = [] if second is None else second + end
        special = [1] * len(start) + [0] * len(first) + [1] * len(end)
        if second is not None:
            special += [0] * len(second) + [1] * len(end)
        return {
            "input_ids": head + tail,
            "token_type_ids": [0] * len(head) + [1] * len(tail),
            "attention_mask": [1] * (len(head) + len(tail)),
            "special_tokens_mask": special,
        }

    # -- Between tokens, ids and text --------------------------------------------------------------

    def _token_to_id(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        # The backend gives what it does not know the id of its own unknown piece.
        index = self._pieces.piece_to_id(token)
        return index if self._pieces.id_to_piece(index) == token else None

    def _id_to_token(self, index: int) -> str | None:
        if 0 <= index < self.vocab_size:
            return self._pieces.id_to_piece(index)
        return next((token for token, each in self._added.items() if each == index), None)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        tokens = self.convert_ids_to_tokens(ids, skip_special_tokens)
        text = "".join(tokens).replace("▁", " ")
        return text[1:] if tokens and tokens[0].startswith("▁") else text

    # -- Files and pickles -------------------------------------------------------------------------

    def save_vocabulary(self, save_directory: str | os.PathLike) -> tuple[str, ...]:
        """Writes ``spm.model`` as it was read; returns its path."""
        path = Path(save_directory, VOCAB_FILE)
        with atomic_write(path) as temporary:
            temporary.write_bytes(self._model)
        return (str(path),)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pieces"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pieces = _read_pieces(self._model)


def _read_pieces(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """The backend; it raises RuntimeError for bytes that are not a model."""
    pieces = sentencepiece.SentencePieceProcessor()
    pieces.load_from_serialized_proto(model)
    return pieces


def _any_of(tokens: Iterable[str]) -> regex.Pattern | None:
    """What finds each of `tokens`, the longest one where several begin at a place."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    if not longest_first:
        return None
    return regex.compile(f"({'|'.join(map(regex.escape, longest_first))})")


def _shortened(first: int, second: int, room: int) -> list[int]:
    """Lengths of two texts that share `room`: the longer one is cut, and then both evenly.

    Of an odd number of tokens the longer text has one more; the second of equally long ones.
    """
    short, long = sorted((first, second))
    short = min(short, room // 2)
    long = room - short
    return [long, short] if first > second else [short, long]
