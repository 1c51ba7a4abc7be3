"""`Padding`: pads rows of tokens to one length."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .batch_encoding import BatchEncoding
from .special_tokens import SpecialTokensMixin
from .tokenization_inputs import PADDING_STRATEGIES, strategy


class Padding(SpecialTokensMixin):
    """The part of a tokenizer that pads."""

    model_input_names: list[str]
    padding_side: str

    def pad(
        self,
        encoded_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        padding: Any = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: Any = None,
        verbose: bool = True,
    ) -> BatchEncoding:
        """Pads encoded rows to one length.

        Args:
            encoded_inputs: the output of calls: a list of dicts of rows, or a dict of lists of rows
                or of one row. Values may be lists, arrays or tensors.
            padding, max_length, pad_to_multiple_of, return_tensors: as in a call.
            return_attention_mask: add an attention mask if there is none; by default, if the model
                takes one.
            verbose: ignored; upstream has it.

        Returns:
            The rows' entries. Those with a value per token are padded; the others are unchanged.

        Raises:
            ValueError: there is no padding token, a row is longer than `max_length`, or only some
                have an entry.
        """
        main = self.model_input_names[0]
        is_batch, data = _by_column(encoded_inputs, main)
        ids = data.get(main)
        if ids is None:
            raise ValueError(f"rows to pad need {main!r}; they have {sorted(data)}")
        if return_attention_mask is None:
            return_attention_mask = "attention_mask" in self.model_input_names
        if return_attention_mask and "attention_mask" not in data:
            data["attention_mask"] = [[1] * len(row) for row in ids]
        padding = strategy("padding", padding, PADDING_STRATEGIES)
        length = self._padded_length(ids, padding, max_length, pad_to_multiple_of)
        data = self._padded(data, length, as_arrays=return_tensors is not None)
        if not is_batch:
            data = {name: rows[0] for name, rows in data.items()}
        return BatchEncoding(data, tensor_type=return_tensors)

    def _padded(
        self, data: Mapping[str, Any], length: int | None, as_arrays: bool
    ) -> dict[str, Any]:
        """Returns the rows' entries, with those that hold a value per token padded to `length`."""
        padded = dict(data)
        if length is None:
            return padded
        values = {
            self.model_input_names[0]: self.pad_token_id,
            "token_type_ids": self.pad_token_type_id,
            "attention_mask": 0,
            "special_tokens_mask": 1,
        }
        for name, value in values.items():
            if name in padded:
                rows = padded_rows(padded[name], length, value, self.padding_side)
                padded[name] = rows if as_arrays else rows.tolist()
        if "offset_mapping" in padded:
            left = self.padding_side == "left"
            padded["offset_mapping"] = [
                [(0, 0)] * (length - len(row)) + row
                if left
                else row + [(0, 0)] * (length - len(row))
                for row in map(list, padded["offset_mapping"])
            ]
        return padded

    def _padded_encodings(self, encodings: Any, length: int | None) -> Any:
        """Pads the rows' encodings to `length`; if a function makes them, when it is called."""
        if encodings is None or length is None:
            return encodings
        if callable(encodings):
            return lambda: self._padded_encodings(encodings(), length)
        for encoding in encodings:
            if len(encoding) < length:
                encoding.pad(
                    length,
                    direction=self.padding_side,
                    pad_id=self.pad_token_id,
                    pad_token=self.pad_token,
                )
        return encodings

    def _padded_length(
        self,
        rows: Sequence[Sequence[int]],
        padding: str,
        max_length: int | None,
        pad_to_multiple_of: int | None,
    ) -> int | None:
        """Returns the length to pad rows to, None for none; `padding` is a strategy's name."""
        longest = max(map(len, rows), default=0)
        if padding == "max_length":
            length = self._limit(max_length, "padding")
        else:
            length = longest if padding else None
        if length is None:
            return None
        if self.pad_token is None:
            raise ValueError("the tokenizer has no padding token: set tokenizer.pad_token")
        if length < longest:
            raise ValueError(
                f"a row of {longest} tokens cannot be padded to {length}: pass truncation=True"
            )
        if pad_to_multiple_of is not None:
            if pad_to_multiple_of < 1:
                raise ValueError(f"pad_to_multiple_of is at least 1, not {pad_to_multiple_of}")
            length = -(-length // pad_to_multiple_of) * pad_to_multiple_of
        return length

    @abstractmethod
    def _limit(self, max_length: int | None, purpose: str) -> int | None:
        """Returns the length in tokens that rows are cut or padded to; None if nothing sets one."""


def _by_column(encoded: Any, main: str) -> tuple[bool, dict[str, Any]]:
    """Returns whether there are several rows, and entry -> list of rows; `main` names the ids."""
    if not isinstance(encoded, Mapping):
        rows = list(encoded)
        names = dict.fromkeys(name for row in rows for name in row)
        try:
            return True, {name: [row[name] for row in rows] for name in names}
        except KeyError as error:
            raise ValueError(f"rows to pad need the same entries: one has no {error}") from error
    ids = encoded.get(main, ())
    if len(ids) and np.ndim(ids[0]) == 0:
        return False, {name: [row] for name, row in encoded.items()}
    return True, dict(encoded)


def padded_rows(rows: Sequence[Any], length: int, value: int, side: str) -> np.ndarray:
    """Returns `rows` as one array, (rows, length), padded with `value`."""
    whole = np.full((len(rows), length), value, dtype=np.int64)
    for target, row in zip(whole, rows, strict=True):
        start = length - len(row) if side == "left" else 0
        # A tensor is converted first: assigned as it is, older versions of NumPy warn.
        target[start : start + len(row)] = np.asarray(row, dtype=np.int64)
    return whole
