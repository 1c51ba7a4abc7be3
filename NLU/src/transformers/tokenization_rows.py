"""`RowsOfIds`: makes rows from texts' ids: cuts them to a length and adds special tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .special_tokens import SpecialTokensMixin
from .tokenization_inputs import TRUNCATION_STRATEGIES, RowSettings, cut_lengths, strategy

_TEXT = -1  # stands for a text's tokens between the special ones


class RowsOfIds(SpecialTokensMixin):
    """The part of a tokenizer that makes rows of ids."""

    truncation_side: str

    # -- A row's special tokens --------------------------------------------------------------------

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Adds the model's special tokens to a text's ids, or a pair's; this class adds none."""
        return token_ids_0 + (token_ids_1 or [])

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Returns the token types of the row that `build_inputs_with_special_tokens` makes."""
        return [0] * len(token_ids_0) + [1] * len(token_ids_1 or [])

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Returns how many special tokens are added to a text, or to a pair of texts."""
        return len(self.build_inputs_with_special_tokens([], [] if pair else None))

    def get_special_tokens_mask(
        self,
        token_ids_0: Sequence[int],
        token_ids_1: Sequence[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """Returns 1 for each special token of a row, 0 for the others.

        Args:
            token_ids_0: a text's ids; with `already_has_special_tokens`, a whole row's.
            token_ids_1: the second text's ids.
            already_has_special_tokens: the ids are a whole row's, so look for special tokens in
                them.
        """
        if already_has_special_tokens:
            if token_ids_1 is not None:
                raise ValueError("already_has_special_tokens=True: leave token_ids_1 out")
            special = set(self.all_special_ids)
            return [int(index in special) for index in as_list(token_ids_0)]
        pair = None if token_ids_1 is None else [_TEXT] * len(token_ids_1)
        row = self.build_inputs_with_special_tokens([_TEXT] * len(token_ids_0), pair)
        return [int(index != _TEXT) for index in row]

    # -- Rows --------------------------------------------------------------------------------------

    def _rows_of_ids(
        self,
        firsts: list[list[int]],
        seconds: list[list[int]] | None,
        settings: RowSettings,
    ) -> tuple[dict[str, list[Any]], None]:
        """Makes rows from texts' ids: cuts them and adds special tokens."""
        if "offset_mapping" in settings.columns:
            raise NotImplementedError(
                "return_offsets_mapping: ids have no offsets in a text; use a fast tokenizer, as "
                "AutoTokenizer returns with use_fast=True, and call it on the text"
            )
        columns = list(settings.columns)
        if settings.overflow:
            columns += ["overflowing_tokens", "num_truncated_tokens"]
        rows: dict[str, list[Any]] = {name: [] for name in columns}
        pairs = seconds if seconds is not None else [None] * len(firsts)
        framed = settings.add_special_tokens
        frame = self.num_special_tokens_to_add(seconds is not None) if framed else 0
        for first, second in zip(firsts, pairs, strict=True):
            excess = 0
            if settings.max_length is not None:
                excess = len(first) + len(second or ()) + frame - settings.max_length
                first, second, cut = self.truncate_sequences(
                    first, second, excess, settings.truncation, settings.stride
                )
            row = self._row(first, second, framed, settings.columns)
            if settings.overflow:
                row["overflowing_tokens"] = cut if excess > 0 else []
                row["num_truncated_tokens"] = excess
            for name in columns:
                rows[name].append(row[name])
        return rows, None

    def _row(
        self,
        first: list[int],
        second: list[int] | None,
        framed: bool,
        columns: Sequence[str],
    ) -> dict[str, Any]:
        """Returns the entries of one row."""
        if framed:
            ids = self.build_inputs_with_special_tokens(first, second)
        else:
            ids = first + (second or [])
        row: dict[str, Any] = {columns[0]: ids}
        for name in columns[1:]:
            if name == "attention_mask":
                row[name] = [1] * len(ids)
            elif name == "token_type_ids" and framed:
                row[name] = self.create_token_type_ids_from_sequences(first, second)
            elif name == "token_type_ids":
                row[name] = [0] * len(first) + [1] * len(second or ())
            elif framed:
                row[name] = self.get_special_tokens_mask(first, second)
            else:
                row[name] = [0] * len(ids)
        return row

    def truncate_sequences(
        self,
        ids: list[int],
        pair_ids: list[int] | None = None,
        num_tokens_to_remove: int = 0,
        truncation_strategy: Any = "longest_first",
        stride: int = 0,
    ) -> tuple[list[int], list[int] | None, list[int]]:
        """Cuts a text's ids, or a pair's.

        Args:
            ids, pair_ids: each text's ids, without special tokens.
            num_tokens_to_remove: how many to remove from both in all.
            truncation_strategy: as in a call.
            stride: how many kept tokens to return again with those that are cut off.

        Returns:
            What is kept of the first and of the second text; and what is cut off, with the stride,
            first of the first text, then of the second.

        Raises:
            ValueError: the text to be cut has too few tokens.
        """
        how = strategy("truncation_strategy", truncation_strategy, TRUNCATION_STRATEGIES)
        if num_tokens_to_remove <= 0 or not how:
            return ids, pair_ids, []
        room = max(0, len(ids) + len(pair_ids or ()) - num_tokens_to_remove)
        lengths = cut_lengths(len(ids), None if pair_ids is None else len(pair_ids), how, room)
        first, overflow = self._cut(ids, lengths[0], stride)
        if pair_ids is None:
            return first, None, overflow
        second, more = self._cut(pair_ids, lengths[1], stride)
        return first, second, overflow + more

    def _cut(self, ids: list[int], length: int, stride: int) -> tuple[list[int], list[int]]:
        """Returns the `length` ids to keep, and the rest with the `stride` kept ids next to it."""
        if len(ids) <= length:
            return ids, []
        if self.truncation_side == "left":
            start = len(ids) - length
            return ids[start:], ids[: start + stride]
        return ids[:length], ids[max(length - stride, 0) :]


def as_list(ids: Any) -> list[int]:
    """Returns ids, given as an int, a sequence, an array or a tensor, as a list."""
    return np.atleast_1d(np.asarray(ids, dtype=np.int64)).tolist()
