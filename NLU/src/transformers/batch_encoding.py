"""`BatchEncoding`: a tokenizer's output, which maps tokens to words and characters and back."""

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

# A row as its tokenizer made it: `tokenizers.Encoding`, or an `EncodedRow` with the same interface.
Encoding = Any


class CharSpan(NamedTuple):
    """Characters of a text: the first one, and the one after the last."""

    start: int
    end: int


class TokenSpan(NamedTuple):
    """Tokens of a row: the first one, and the one after the last."""

    start: int
    end: int


class BatchEncoding(UserDict):
    """A tokenizer's output: a dict of rows whose entries are attributes as well.

    Methods that go from one unit to another (token, word, character) need the rows of a fast
    tokenizer. Where a method takes ``batch_or_..._index``, a single index is that of the unit, in
    row 0; two are those of the row and the unit. ``sequence_index`` is 1 for the second text of a
    pair. Characters are counted in the text, or in the word if the text was given as words.

    Args:
        data: ``input_ids``, ``attention_mask``, ...; each a list of rows of ints, a tensor
            (rows, tokens), or, for a single text, one row.
        encodings: a fast tokenizer's `Encoding` of each row, or a function that makes them on first
            use.
        tensor_type: "pt" or "np": make tensors of the data, see `convert_to_tensors`.
        prepend_batch_axis: the data is one row; its tensors get a first axis of 1.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | None = None,
        encodings: list[Encoding] | Callable[[], list[Encoding]] | None = None,
        tensor_type: Any = None,
        prepend_batch_axis: bool = False,
    ):
        super().__init__(data)
        self._encodings = encodings
        self.convert_to_tensors(tensor_type, prepend_batch_axis)

    def __getitem__(self, item: str | int) -> Any:
        """Returns an entry by its name, or a row's `Encoding` by its index."""
        if isinstance(item, str):
            return self.data[item]
        if self.encodings is None:
            raise KeyError(f"{item!r}: only rows made by a fast tokenizer have indices")
        return self.encodings[item]

    def __getattr__(self, name: str) -> Any:
        # While a copy is being unpickled it has no data yet, and asking for it must not recurse.
        if name == "data" or name not in self.data:
            raise AttributeError(f"{type(self).__name__} has no entry or attribute {name!r}")
        return self.data[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "_encodings": self.encodings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    # -- Tensors -----------------------------------------------------------------------------------

    def convert_to_tensors(
        self, tensor_type: Any = None, prepend_batch_axis: bool = False
    ) -> "BatchEncoding":
        """Replaces the entries by tensors ("pt") or arrays ("np"), integers in 64 bits.

        Raises:
            ValueError: the rows of an entry have different lengths, or are not numbers.
        """
        tensor_type = getattr(tensor_type, "value", tensor_type)
        if tensor_type not in (None, "pt", "np"):
            raise ValueError(f"return_tensors is 'pt', 'np' or None, not {tensor_type!r}")
        if tensor_type is None:
            return self
        for name, rows in self.data.items():
            rows = [rows] if prepend_batch_axis else rows
            tensor = to_tensor(name, rows)
            self.data[name] = tensor if tensor_type == "pt" else tensor.numpy()
        return self

    def to(self, device: str | torch.device) -> "BatchEncoding":
        """Moves the tensors to `device`, in place; returns itself."""
        for name, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[name] = value.to(device)
        return self

    # -- Between tokens, words and characters ------------------------------------------------------

    @property
    def encodings(self) -> list[Encoding] | None:
        """One `Encoding` per row; None if the tokenizer is not a fast one."""
        if callable(self._encodings):
            self._encodings = self._encodings()
        return self._encodings

    @property
    def is_fast(self) -> bool:
        """Whether a fast tokenizer made this, so that tokens have words and characters."""
        return self._encodings is not None

    @property
    def n_sequences(self) -> int | None:
        """1 for texts, 2 for pairs; None if that is unknown."""
        return self.encodings[0].n_sequences if self.encodings else None

    def _row(self, index: int) -> Encoding:
        if self.encodings is None:
            raise ValueError(
                "tokens are not aligned with their text here: use a fast tokenizer, as "
                "AutoTokenizer returns with use_fast=True"
            )
        return self.encodings[index]

    def _row_and_unit(self, first: int, second: int | None) -> tuple[Encoding, int]:
        """Returns the row, and the index of the unit in it, that one or two indices stand for."""
        row, unit = (0, first) if second is None else (first, second)
        return self._row(row), unit

    def _token(self, first: int, second: int | None) -> tuple[Encoding, int]:
        """Does what `_row_and_unit` does for tokens, which a negative index counts from the end."""
        encoding, token = self._row_and_unit(first, second)
        return encoding, token + len(encoding) if token < 0 else token

    def tokens(self, batch_index: int = 0) -> list[str]:
        """Returns the tokens of a row, as the vocabulary spells them."""
        return self._row(batch_index).tokens

    def sequence_ids(self, batch_index: int = 0) -> list[int | None]:
        """Returns which text each token is from, 0 or 1; None for special tokens."""
        return self._row(batch_index).sequence_ids

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        """Returns the index of each token's word in its text; None for special tokens."""
        return self._row(batch_index).word_ids

    def words(self, batch_index: int = 0) -> list[int | None]:
        """`word_ids` by its earlier name."""
        return self.word_ids(batch_index)

    def token_to_sequence(
        self, batch_or_token_index: int, token_index: int | None = None
    ) -> int | None:
        """Returns which text of a pair a token is from, 0 or 1; None for a special token."""
        encoding, token = self._token(batch_or_token_index, token_index)
        return encoding.token_to_sequence(token)

    def token_to_word(
        self, batch_or_token_index: int, token_index: int | None = None
    ) -> int | None:
        """Returns the index of a token's word; None for a special token."""
        encoding, token = self._token(batch_or_token_index, token_index)
        return encoding.token_to_word(token)

    def token_to_chars(
        self, batch_or_token_index: int, token_index: int | None = None
    ) -> CharSpan | None:
        """Returns a token's characters; None for a special token."""
        encoding, token = self._token(batch_or_token_index, token_index)
        return _span(CharSpan, encoding.token_to_chars(token))

    def word_to_tokens(
        self, batch_or_word_index: int, word_index: int | None = None, sequence_index: int = 0
    ) -> TokenSpan | None:
        """Returns a word's tokens; None if the row has none of them."""
        encoding, word = self._row_and_unit(batch_or_word_index, word_index)
        return _span(TokenSpan, encoding.word_to_tokens(word, sequence_index))

    def word_to_chars(
        self, batch_or_word_index: int, word_index: int | None = None, sequence_index: int = 0
    ) -> CharSpan | None:
        """Returns a word's characters; None if the row has none of its tokens."""
        encoding, word = self._row_and_unit(batch_or_word_index, word_index)
        return _span(CharSpan, encoding.word_to_chars(word, sequence_index))

    def char_to_token(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """Returns the index of the token that a character is in; None between tokens."""
        encoding, char = self._row_and_unit(batch_or_char_index, char_index)
        return encoding.char_to_token(char, sequence_index)

    def char_to_word(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """Returns the index of the word that a character is in; None between words."""
        encoding, char = self._row_and_unit(batch_or_char_index, char_index)
        return encoding.char_to_word(char, sequence_index)


def _span(kind: type, bounds: tuple[int, int] | None) -> Any:
    return None if bounds is None else kind(*bounds)


def to_tensor(name: str, rows: Any) -> torch.Tensor:
    """Makes a tensor of a number, numbers or rows of one length: int64, or float32 for floats.

    Raises:
        ValueError: the rows of `name` have different lengths, or are not numbers.
    """
    if isinstance(rows, torch.Tensor):
        return rows
    if np.iterable(rows) and len(rows) and all(isinstance(row, torch.Tensor) for row in rows):
        # Through numpy, rows would lose their device.
        shapes = {tuple(row.shape) for row in rows}
        if len(shapes) > 1:
            raise ValueError(f"{name}: rows of different shapes, {sorted(shapes)}, make no tensor")
        return torch.stack(list(rows))
    try:
        array = np.asarray(rows)
    except ValueError:
        array = np.asarray(None)
    # To numpy, an empty array is one of floats; here, it is a row without tokens.
    if array.dtype.kind in "biu" or array.size == 0:
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    # An array or a tensor of no dimensions has no length, although it has the method.
    sized = (row for row in rows if hasattr(row, "__len__") and getattr(row, "ndim", 1))
    lengths = {len(row) for row in sized if not isinstance(row, str)}
    if len(lengths) > 1:
        raise ValueError(
            f"{name}: rows of {min(lengths)} to {max(lengths)} items make no tensor; "
            "pass padding=True, and truncation=True to enforce max_length"
        )
    raise ValueError(f"{name}: cannot become a tensor, because not all its values are numbers")
