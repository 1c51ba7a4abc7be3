"""`EncodedRow`: one row of tokens, each with its word and its characters in the text.

It has the interface of `tokenizers.Encoding`, for tokenizers whose pieces another library finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple


class Piece(NamedTuple):
    """A token of a text: its id and spelling, its characters there, the index of its word."""

    id: int
    token: str
    start: int
    end: int
    word: int


@dataclass
class EncodedRow:
    """A finished row; each list holds a value per token.

    Args:
        ids, tokens: the tokens' ids, and how the vocabulary spells them.
        type_ids, attention_mask, special_tokens_mask: as the model takes them.
        offsets: first character of the text and the one after the last; (0, 0) for special tokens.
        word_ids: the word's index in its text, None for special tokens.
        sequence_ids: 0, or 1 for the second text; None for special tokens.
        overflowing: the rows of what was cut off, with the same special tokens as this one.
    """

    ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    type_ids: list[int] = field(default_factory=list)
    attention_mask: list[int] = field(default_factory=list)
    special_tokens_mask: list[int] = field(default_factory=list)
    offsets: list[tuple[int, int]] = field(default_factory=list)
    word_ids: list[int | None] = field(default_factory=list)
    sequence_ids: list[int | None] = field(default_factory=list)
    overflowing: list["EncodedRow"] = field(default_factory=list)
    n_sequences: int = 1

    def __len__(self) -> int:
        return len(self.ids)

    def add_special(self, index: int, token: str, type_id: int) -> None:
        """Appends a special token."""
        self._add(index, token, type_id, 1, 1, (0, 0), None, None)

    def add_piece(self, piece: Piece, sequence: int, type_id: int) -> None:
        """Appends a token of the first (0) or second (1) text."""
        chars = (piece.start, piece.end)
        self._add(piece.id, piece.token, type_id, 1, 0, chars, piece.word, sequence)

    def _add(self, *values: object) -> None:
        # In the order of the fields.
        for column, value in zip(fields(self), values, strict=False):
            getattr(self, column.name).append(value)

    def pad(
        self,
        length: int,
        direction: str = "right",
        pad_id: int = 0,
        pad_type_id: int = 0,
        pad_token: str = "[PAD]",
    ) -> None:
        """Pads the row to `length` tokens, at its right or left end."""
        missing = length - len(self)
        values = (pad_id, pad_token, pad_type_id, 0, 1, (0, 0), None, None)
        for column, value in zip(fields(self), values, strict=False):
            row = getattr(self, column.name)
            filling = [value] * missing
            setattr(self, column.name, row + filling if direction == "right" else filling + row)

    # -- Between tokens, words and characters: None for what is not there --------------------------

    def token_to_sequence(self, token_index: int) -> int | None:
        """Returns which text a token is from, 0 or 1; None for a special token."""
        return self.sequence_ids[token_index]

    def token_to_word(self, token_index: int) -> int | None:
        """Returns the index of a token's word in its text."""
        return self.word_ids[token_index]

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """Returns a token's characters."""
        return None if self.sequence_ids[token_index] is None else self.offsets[token_index]

    def word_to_tokens(self, word_index: int, sequence_index: int = 0) -> tuple[int, int] | None:
        """Returns a word's tokens, as the first one and the one after the last."""
        found = [
            token
            for token, place in enumerate(zip(self.word_ids, self.sequence_ids, strict=True))
            if place == (word_index, sequence_index)
        ]
        return (found[0], found[-1] + 1) if found else None

    def word_to_chars(self, word_index: int, sequence_index: int = 0) -> tuple[int, int] | None:
        """Returns a word's characters."""
        tokens = self.word_to_tokens(word_index, sequence_index)
        return tokens and (self.offsets[tokens[0]][0], self.offsets[tokens[1] - 1][1])

    def char_to_token(self, char_pos: int, sequence_index: int = 0) -> int | None:
        """Returns the index of the token that a character is in."""
        for token, (start, end) in enumerate(self.offsets):
            if self.sequence_ids[token] == sequence_index and start <= char_pos < end:
                return token
        return None

    def char_to_word(self, char_pos: int, sequence_index: int = 0) -> int | None:
        """Returns the index of the word that a character is in."""
        token = self.char_to_token(char_pos, sequence_index)
        return None if token is None else self.word_ids[token]


def windows(pieces: Sequence[Piece], room: int, stride: int, side: str) -> list[Sequence[Piece]]:
    """Splits a text into overlapping windows of at most `room` tokens.

    Args:
        pieces: the text's tokens.
        room: the tokens of a window.
        stride: how many tokens a window shares with the one before it; less than `room`.
        side: "right" if windows go from the text's start to its end, "left" for the reverse.
    """
    length = len(pieces)
    if length <= room:
        return [pieces]
    if room == 0:
        return [pieces[:0], pieces]
    step = room - stride
    starts = range(0, length - stride, step)
    if side == "right":
        return [pieces[start : start + room] for start in starts]
    return [pieces[max(length - start - room, 0) : length - start] for start in starts]
