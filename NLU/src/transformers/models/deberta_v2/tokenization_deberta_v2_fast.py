"""DeBERTa-v2's fast tokenizer, which aligns tokens with words and characters."""

from functools import partial
from itertools import product
from typing import Any

from ...encoded_row import EncodedRow, Piece, windows
from ...tokenization_inputs import RowSettings, check_stride, cut_lengths
from ...tokenization_utils_fast import PreTrainedTokenizerFast, columns_of
from .tokenization_deberta_v2 import DebertaV2Tokenizer

_FIRST, _SECOND = -1, -2  # stand for the texts' tokens between the special ones


@PreTrainedTokenizerFast.register  # for code that asks by isinstance whether a tokenizer is fast
class DebertaV2TokenizerFast(DebertaV2Tokenizer):
    """The ids of `DebertaV2Tokenizer`, and their alignment with words and characters.

    4.4.2 has no such tokenizer; later versions do, under this name. The alignment costs time, so it
    is computed on first use. A word is what follows a space, punctuation that is split off, or an
    added token. The space before a word belongs to its first token.

    Args:
        settings: as in `DebertaV2Tokenizer`.
    """

    is_fast = True

    def _encode_batch(
        self, firsts: list[Any], seconds: list[Any] | None, settings: RowSettings
    ) -> tuple[dict[str, list[Any]], Any]:
        if settings.overflow or "offset_mapping" in settings.columns:
            return columns_of(self._encodings(firsts, seconds, settings), settings)
        columns, _ = super()._encode_batch(firsts, seconds, settings)
        return columns, partial(self._encodings, firsts, seconds, settings)

    def _encodings(
        self, firsts: list[Any], seconds: list[Any] | None, settings: RowSettings
    ) -> list[EncodedRow]:
        """Returns the rows, each with the rows of what was cut off from it."""
        found = self._pieces_of_words if settings.words else self._pieces_of
        first_pieces = found(firsts)
        second_pieces = [None] * len(firsts) if seconds is None else found(seconds)
        rows = []
        for index, pair in enumerate(zip(first_pieces, second_pieces, strict=True)):
            try:
                rows.append(self._encoded(*pair, settings))
            except ValueError as error:
                raise ValueError(f"row {index}: {error}") from error
        return rows

    def _encoded(
        self, first: list[Piece], second: list[Piece] | None, settings: RowSettings
    ) -> EncodedRow:
        framed = settings.add_special_tokens
        if settings.max_length is None:
            return self._framed(first, second, framed)
        frame = self.num_special_tokens_to_add(second is not None) if framed else 0
        stride = settings.stride if settings.overflow else 0
        lengths = len(first), None if second is None else len(second)
        if second is not None and stride:
            check_stride(stride, settings.max_length, frame, *lengths, settings.truncation)
        room = cut_lengths(*lengths, settings.truncation, settings.max_length - frame)
        of_first, of_second = (
            [pieces] if pieces is None else windows(pieces, length, stride, self.truncation_side)
            for pieces, length in zip((first, second), room, strict=True)
        )
        # Each window of the first text is paired with all of the second's. The pairs with the first
        # text's first window come last, except for the row itself, as in the `tokenizers` package.
        pairs = list(product(of_first, of_second))
        after_first = len(of_second)
        row, *overflowing = [
            self._framed(*pair, framed)
            for pair in (*pairs[:1], *pairs[after_first:], *pairs[1:after_first])
        ]
        row.overflowing = overflowing
        return row

    def _framed(self, first: list[Piece], second: list[Piece] | None, framed: bool) -> EncodedRow:
        """Builds the row of the pieces that are kept, with special tokens if `framed`."""
        ids = [_FIRST] * len(first), None if second is None else [_SECOND] * len(second)
        if framed:
            places = self.build_inputs_with_special_tokens(*ids)
            types = self.create_token_type_ids_from_sequences(*ids)
        else:
            places = [*ids[0], *(ids[1] or ())]
            types = [int(place == _SECOND) for place in places]
        row = EncodedRow(n_sequences=1 if second is None else 2)
        pieces = {_FIRST: iter(first), _SECOND: iter(second or ())}
        for place, type_id in zip(places, types, strict=True):
            if place in pieces:
                row.add_piece(next(pieces[place]), int(place == _SECOND), type_id)
            else:
                row.add_special(place, self._id_to_token(place), type_id)
        return row

    def _decode(self, ids: list[int], skip_special_tokens: bool, **_: Any) -> str:
        tokens = self.convert_ids_to_tokens(ids, skip_special_tokens)
        return self.convert_tokens_to_string(tokens)

    # -- Pieces and where they are -----------------------------------------------------------------

    def _pieces_of_words(self, texts: list[list[str]]) -> list[list[Piece]]:
        """Returns the pieces of each text, a list of words, with the words' indices."""
        found = iter(self._pieces_of([word for words in texts for word in words]))
        return [
            [piece._replace(word=place) for place, _ in enumerate(words) for piece in next(found)]
            for words in texts
        ]

    def _pieces_of(self, texts: list[str]) -> list[list[Piece]]:
        """Returns the pieces of each text."""
        return [self._pieces_of_text(text) for text in texts]

    def _pieces_of_text(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        start, word = 0, -1
        for place, part in enumerate(self._parts(text)):
            for chunk in [part] if place % 2 else self._words(part):
                if place % 2:
                    found = [Piece(self._token_to_id(chunk), chunk, 0, len(chunk), 0)]
                else:
                    found = self._pieces_of_chunk(chunk)
                pieces += [
                    # `_replace` would take three times as long, for every word of a text.
                    Piece(
                        each.id,
                        each.token,
                        start + each.start,
                        start + each.end,
                        word + 1 + each.word,
                    )
                    for each in found
                ]
                start += len(chunk)
                word = pieces[-1].word if pieces else word
        return _in_original(pieces, text) if self.do_lower_case else pieces

    def _pieces_of_chunk(self, chunk: str) -> list[Piece]:
        """Returns the pieces of a part without added tokens, with offsets from the part's start."""
        tokens, ids = self._pieces.encode(chunk, out_type=str), self._pieces.encode(chunk)
        normalized, origins = self._pieces.normalize(chunk, with_offsets=True)
        if "".join(tokens) != normalized:
            raise ValueError(
                "the SentencePiece model splits characters into bytes, which have no offsets"
            )
        pieces: list[Piece] = []
        start, word = 0, -1
        for index, token in zip(ids, tokens, strict=True):
            end = start + len(token)
            first = origins[start]
            if token.startswith("▁"):
                # Of several spaces, only the last belongs to the word.
                first = max(first if start else 0, origins[start + 1] - 1)
            word += token.startswith("▁") or not pieces
            # The "▁" that the model puts before a text stands for no character of it.
            last = max(origins[end], min(first + 1, len(chunk)))
            pieces.append(Piece(index, token, first, last, word))
            start = end
        return pieces


def _in_original(pieces: list[Piece], text: str) -> list[Piece]:
    """Moves the offsets of a lower-cased text's pieces to the characters of `text` itself."""
    origins = [place for place, char in enumerate(text) for _ in char.lower()]
    if len(origins) == len(text):
        return pieces
    origins.append(len(text))
    return [
        piece._replace(start=origins[piece.start], end=origins[max(piece.end - 1, 0)] + 1)
        for piece in pieces
    ]
