"""What all tokenizers share: from text to padded batches, and back.

A tokenizer is `PreTrainedTokenizerBase` with the few abstract methods at its end filled in by what
does the splitting: with the rows and their alignment (`tokenization_utils_fast.py`), or with ids
alone (`tokenization_utils.py`).

    text ─ _encode_batch ─> rows of ids, cut to max_length ─ pad ─> rows of one length ─> tensors

Its files are in `tokenization_files.py`, the roles of its special tokens in `special_tokens.py`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken  # noqa: F401 - importable from here, too

from .batch_encoding import BatchEncoding, CharSpan, Encoding, TokenSpan, to_tensor  # noqa: F401
from .special_tokens import ADDITIONAL, ROLES, SpecialTokensMixin, Token
from .tokenization_files import (
    ADDED_TOKENS_FILE,  # noqa: F401
    SPECIAL_TOKENS_MAP_FILE,  # noqa: F401
    TOKENIZER_CONFIG_FILE,  # noqa: F401
    TokenizerFiles,
)
from .tokenization_inputs import (
    PADDING_STRATEGIES,
    TRUNCATION_STRATEGIES,
    Inputs,
    RowSettings,
    TruncationStrategy,  # noqa: F401 - importable from here, too
    check_stride,
    cut_lengths,
    filled,
    inputs_of_batch,
    inputs_of_call,
    inputs_of_one,
    rows_by_column,
    strategy,
    with_present_names,
)
from .utils import logging

logger = logging.get_logger(__name__)

# In tokenizer_config.json, this number and greater ones stand for "no limit".
VERY_LARGE_INTEGER = int(1e30)
LARGE_INTEGER = int(1e20)

_TEXT, _SECOND_TEXT = -1, -2  # ids that stand for a text's tokens in a frame


class PreTrainedTokenizerBase(SpecialTokensMixin, TokenizerFiles):
    """From text to ids and back, for one vocabulary.

    Its attributes of the same names can be set later.

    Args:
        bos_token, eos_token: begin and end of a sequence.
        unk_token: stands for what is not in the vocabulary.
        sep_token, cls_token: between two sequences; the first token, which classifiers read.
        pad_token: fills the rows of a batch up to one length.
        mask_token: hides a token in masked-language modelling.
        additional_special_tokens: further tokens that are not text.
        model_max_length: the longest row, in tokens with the special ones, that the model takes;
            None for no limit.
        padding_side, truncation_side: "right" or "left": where rows are filled, and cut.
        model_input_names: what a call returns unless told otherwise, the ids' name first.
        verbose: warn of what a call may not have meant.
        others: settings of other tokenizers; they are kept in `init_kwargs`, without effect.
    """

    # Beside the other attributes, so that two equal tokenizers have equal ones, of which caches of
    # `datasets` take their keys, wherever they were opened and whatever they warned of.
    __slots__ = ("deprecation_warnings", "name_or_path")

    # What save_pretrained writes: constructor arguments that are attributes as well.
    config_names: tuple[str, ...] = (
        *ROLES,
        ADDITIONAL,
        "model_max_length",
        "padding_side",
        "truncation_side",
    )
    model_input_names: list[str] = ["input_ids", "token_type_ids", "attention_mask"]  # noqa: RUF012
    is_fast = False
    init_inputs = ()

    def __init__(
        self,
        *,
        bos_token: Token | None = None,
        eos_token: Token | None = None,
        unk_token: Token | None = None,
        sep_token: Token | None = None,
        pad_token: Token | None = None,
        cls_token: Token | None = None,
        mask_token: Token | None = None,
        additional_special_tokens: Iterable[Token] | None = None,
        model_max_length: int | None = None,
        padding_side: str = "right",
        truncation_side: str = "right",
        model_input_names: Sequence[str] | None = None,
        verbose: bool = True,
        **others: Any,
    ):
        for name, side in (("padding_side", padding_side), ("truncation_side", truncation_side)):
            if side not in ("right", "left"):
                raise ValueError(f"{name} is 'right' or 'left', not {side!r}")
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.unk_token = unk_token
        self.sep_token = sep_token
        self.pad_token = pad_token
        self.cls_token = cls_token
        self.mask_token = mask_token
        self.additional_special_tokens = additional_special_tokens
        self.model_max_length = int(model_max_length or VERY_LARGE_INTEGER)
        self.padding_side = padding_side
        self.truncation_side = truncation_side
        # A copy, so that a change is this tokenizer's own.
        self.model_input_names = list(model_input_names or self.model_input_names)
        self.verbose = verbose
        self._start_anew()
        self._keep_others(others)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(vocab_size={self.vocab_size}, "
            f"model_max_length={self.model_max_length}, special_tokens={self.special_tokens_map})"
        )

    def __len__(self) -> int:
        """The number of tokens, added ones included."""
        return len(self.get_vocab())

    def _start_anew(self) -> None:
        # What was warned of; a caller empties it to be warned again.
        self.deprecation_warnings: dict[str, bool] = {}
        self.name_or_path = ""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_anew()

    @property
    def max_len_single_sentence(self) -> int:
        """The room for a text, in tokens, in the longest row that the model takes."""
        return self.model_max_length - self.num_special_tokens_to_add(pair=False)

    @property
    def max_len_sentences_pair(self) -> int:
        """The room for a pair of texts, in tokens, in the longest row that the model takes."""
        return self.model_max_length - self.num_special_tokens_to_add(pair=True)

    def get_added_vocab(self) -> dict[str, int]:
        """The tokens beyond the vocabulary's own, with their ids."""
        return {token: i for token, i in self.get_vocab().items() if i >= self.vocab_size}

    # -- The frame ---------------------------------------------------------------------------------

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """A text's ids, or a pair's, in the model's frame; here without one."""
        return token_ids_0 + (token_ids_1 or [])

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """The token types of the row that `build_inputs_with_special_tokens` makes."""
        return [0] * len(token_ids_0) + [1] * len(token_ids_1 or [])

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many special tokens frame a text, or a pair of texts."""
        return len(self.build_inputs_with_special_tokens([], [] if pair else None))

    def get_special_tokens_mask(
        self,
        token_ids_0: Sequence[int],
        token_ids_1: Sequence[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """1 for each special token of a row, 0 for the others.

        Args:
            token_ids_0: a text's ids; with `already_has_special_tokens`, a whole row's.
            token_ids_1: the second text's.
            already_has_special_tokens: the ids are a whole row's: each special token counts.
        """
        if already_has_special_tokens:
            if token_ids_1 is not None:
                raise ValueError("a row that already has its special tokens has no token_ids_1")
            special = set(self.all_special_ids)
            return [int(index in special) for index in as_list(token_ids_0)]
        pair = None if token_ids_1 is None else [_TEXT] * len(token_ids_1)
        row = self.build_inputs_with_special_tokens([_TEXT] * len(token_ids_0), pair)
        return [int(index != _TEXT) for index in row]

    # -- From text to ids --------------------------------------------------------------------------

    def __call__(
        self,
        text: Any,
        text_pair: Any = None,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        **settings: Any,
    ) -> BatchEncoding:
        """Ids of one text or of a batch of them, or of pairs of texts.

        Args:
            text: a text, or several; or several pairs of texts.
            text_pair: the second text of each pair; one or several, as `text` is.
            add_special_tokens: frame the row as the model expects it.
            padding: True or "longest": to the batch's longest row; "max_length": to `max_length`;
                False: not at all.
            truncation: True or "longest_first": cut the longer of the two texts; "only_first",
                "only_second"; False: not at all.
            max_length: in tokens, special ones included; `model_max_length` by default. Given
                alone, without padding and truncation, it truncates.
            stride: with `return_overflowing_tokens`: how many tokens what is cut off has in common
                with what is kept.
            is_split_into_words: each text is a list of words.
            pad_to_multiple_of: round the padded length up to a multiple. Rows that are cut have to
                fit in: `max_length` then is a multiple as well.
            return_tensors: "pt" for torch tensors, "np" for arrays, None for lists.
            return_token_type_ids, return_attention_mask: add these rows; by default, those that
                the model takes.
            return_overflowing_tokens: keep what is cut off. Fast tokenizers make further rows of
                it, and tell by ``overflow_to_sample_mapping`` of which input each row is, also for
                a single text; others add its ids as ``overflowing_tokens``, and their number
                without the stride as ``num_truncated_tokens``.
            return_special_tokens_mask: add a row that is 1 for special tokens and padding.
            return_offsets_mapping: add ``offset_mapping``: each token's first character in its
                text and the one after its last; of fast tokenizers alone.
            return_length: add each row's ``length`` in tokens.
            verbose: warn of what may not be meant.

        Returns:
            ``input_ids`` and the rows asked for: one list each for a single text, a list of lists
            for a batch, or tensors (rows, tokens).

        Raises:
            NotImplementedError: offsets are asked of a tokenizer that is not fast.
            TypeError: `text` holds something that is not text, or not a word.
            ValueError: `max_length` has no room for the special tokens, or more than them and
                `stride`, or is not a multiple of `pad_to_multiple_of`, or the rows make no tensor.
        """
        return self._encode(
            inputs_of_call(text, text_pair, is_split_into_words),
            add_special_tokens,
            padding,
            truncation,
            max_length,
            stride,
            is_split_into_words,
            **settings,
        )

    def encode_plus(
        self,
        text: Any,
        text_pair: Any = None,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        **settings: Any,
    ) -> BatchEncoding:
        """A call for one text, or one pair."""
        return self._encode(
            inputs_of_one(text, text_pair, is_split_into_words),
            add_special_tokens,
            padding,
            truncation,
            max_length,
            stride,
            is_split_into_words,
            **settings,
        )

    def batch_encode_plus(
        self,
        batch_text_or_text_pairs: Any,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        **settings: Any,
    ) -> BatchEncoding:
        """A call for a list of texts, or of pairs."""
        return self._encode(
            inputs_of_batch(batch_text_or_text_pairs, is_split_into_words),
            add_special_tokens,
            padding,
            truncation,
            max_length,
            stride,
            is_split_into_words,
            **settings,
        )

    def encode(
        self, text: Any, text_pair: Any = None, *positional: Any, **settings: Any
    ) -> list[int] | torch.Tensor | np.ndarray:
        """The ids alone of one text, or of one pair; the settings are those of a call."""
        return self.encode_plus(text, text_pair, *positional, **settings)["input_ids"]

    def prepare_for_model(
        self,
        ids: Sequence[int],
        pair_ids: Sequence[int] | None = None,
        *positional: Any,
        return_tensors: Any = None,
        prepend_batch_axis: bool = False,
        **settings: Any,
    ) -> BatchEncoding:
        """The row of a text, or of a pair, whose ids are there already.

        Args:
            ids, pair_ids: of each text, without special tokens.
            return_tensors: as in a call; tensors have no first axis for rows,
            prepend_batch_axis: but with this.
            positional, settings: as in a call, from `add_special_tokens` on.
        """
        seconds = None if pair_ids is None else [list(pair_ids)]
        row = self._encode(
            Inputs([list(ids)], seconds, batched=False),
            *positional,
            make_rows=self._rows_of_ids,
            **settings,
        )
        return row.convert_to_tensors(return_tensors, prepend_batch_axis)

    def _encode(
        self,
        inputs: Inputs,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        *,
        pad_to_multiple_of: int | None = None,
        return_tensors: Any = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        verbose: bool = True,
        make_rows: Callable | None = None,
        **deprecated: Any,
    ) -> BatchEncoding:
        """A call; for the settings see there.

        Args:
            inputs: what rows are made of.
            make_rows: makes them instead of `_encode_batch`.
        """
        padding, truncation = with_present_names(padding, truncation, max_length, deprecated)
        truncation = strategy("truncation", truncation, TRUNCATION_STRATEGIES)
        padding = strategy("padding", padding, PADDING_STRATEGIES)
        if max_length is not None and truncation == padding == "":
            self._warn_once("max_length without truncation: rows are cut, as with truncation=True")
            truncation = TRUNCATION_STRATEGIES[0]
        if pad_to_multiple_of is not None and not padding:
            self._warn_once("pad_to_multiple_of without padding: rows are not padded")
        if max_length is not None and padding == PADDING_STRATEGIES[0] and not truncation:
            self._warn_once(
                "max_length with padding to the longest row, without truncation: it does nothing"
            )
        limit = self._limit(max_length, "truncation") if truncation else None
        self._check_room(
            limit,
            self.num_special_tokens_to_add(inputs.seconds is not None) if add_special_tokens else 0,
            stride if return_overflowing_tokens else 0,
            pad_to_multiple_of if padding else None,
        )
        asked = {
            self.model_input_names[0]: True,
            "token_type_ids": return_token_type_ids,
            "attention_mask": return_attention_mask,
            "special_tokens_mask": return_special_tokens_mask,
            "offset_mapping": return_offsets_mapping,
        }
        columns = [
            name
            for name, wanted in asked.items()
            if wanted or (wanted is None and name in self.model_input_names)
        ]
        settings = RowSettings(
            columns,
            add_special_tokens,
            truncation if limit is not None else "",
            limit,
            return_overflowing_tokens,
            stride,
            is_split_into_words,
        )
        data, encodings = (make_rows or self._encode_batch)(*inputs[:2], settings)
        ids = data[columns[0]]
        if not truncation and verbose:
            self._warn_if_too_long(ids)
        if padding:
            length = self._padded_length(ids, padding, max_length, pad_to_multiple_of)
            encodings = self._padded_encodings(encodings, length)
            data = self._padded(data, length, as_arrays=return_tensors is not None)
        if return_length:
            data["length"] = [len(row) for row in data[columns[0]]]
        rows_for_one = return_overflowing_tokens and encodings is not None
        if not inputs.batched and return_tensors is None and not rows_for_one:
            # As upstream has it, a fast tokenizer's ``length`` stays a list.
            kept = ("length",) if encodings is not None else ()
            data = {name: rows if name in kept else rows[0] for name, rows in data.items()}
        return BatchEncoding(data, encodings, return_tensors)

    def _check_room(self, limit: int | None, frame: int, stride: int, multiple: int | None) -> None:
        """Refuses rows that are cut to fewer tokens than they need, or to a length of no use."""
        if stride < 0:
            raise ValueError(f"stride is a number of tokens, not {stride}")
        if limit is None:
            return
        if limit < frame:
            raise ValueError(
                f"max_length={limit} has no room for the {frame} special tokens: "
                f"give at least {frame + 1}"
            )
        if limit % (multiple or 1):
            raise ValueError(
                f"rows cut to {limit} tokens cannot be padded to a multiple of "
                f"pad_to_multiple_of={multiple}: give a max_length that is one"
            )
        if stride:
            check_stride(stride, limit, frame)

    def _limit(self, max_length: int | None, purpose: str) -> int | None:
        """The length in tokens that rows are cut or padded to; None where nothing sets one."""
        limited = self.model_max_length < LARGE_INTEGER
        if max_length is None:
            if not limited:
                self._warn_once(
                    f"{purpose}: no max_length, and the tokenizer has none: not applied"
                )
            return self.model_max_length if limited else None
        if limited and max_length > self.model_max_length:
            self._warn_once(
                f"max_length={max_length} exceeds what the model takes: {self.model_max_length}"
            )
        return max_length

    def _warn_if_too_long(self, rows: Iterable[Sequence[int]]) -> None:
        longest = max(map(len, rows), default=0)
        if longest > self.model_max_length:
            # Code of upstream's users looks for these words.
            self._warn_once(
                "Token indices sequence length is longer than the specified maximum sequence "
                f"length for this model ({longest} > {self.model_max_length}): "
                "pass truncation=True",
                about="too long",
            )

    def _warn_once(self, message: str, about: str | None = None) -> None:
        """Warns, but only once of what a message is `about`."""
        if self.verbose and not self.deprecation_warnings.get(about or message):
            self.deprecation_warnings[about or message] = True
            logger.warning(message)

    # -- Rows of ids -------------------------------------------------------------------------------

    def _rows_of_ids(
        self,
        firsts: list[list[int]],
        seconds: list[list[int]] | None,
        settings: RowSettings,
    ) -> tuple[dict[str, list[Any]], None]:
        """Rows of texts whose ids are known, cut and framed."""
        if "offset_mapping" in settings.columns:
            raise NotImplementedError(
                "return_offsets_mapping: ids alone have no place in a text; take a fast "
                "tokenizer, as AutoTokenizer gives it with use_fast=True, and call it on the text"
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
        """The entries of one row."""
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
            ids, pair_ids: of each text, without special tokens.
            num_tokens_to_remove: from both in all.
            truncation_strategy: as in a call.
            stride: how many kept tokens come with those that are cut off.

        Returns:
            What is kept of each text, and what is cut off, with the stride, of one after the other.

        Raises:
            ValueError: the text to be cut is too short for that.
        """
        how = strategy("truncation_strategy", truncation_strategy, TRUNCATION_STRATEGIES)
        if num_tokens_to_remove <= 0 or not how:
            return ids, pair_ids, []
        room = len(ids) + len(pair_ids or ()) - num_tokens_to_remove
        lengths = cut_lengths(len(ids), None if pair_ids is None else len(pair_ids), how, room)
        first, overflow = self._cut(ids, lengths[0], stride)
        if pair_ids is None:
            return first, None, overflow
        second, more = self._cut(pair_ids, lengths[1], stride)
        return first, second, overflow + more

    def _cut(self, ids: list[int], length: int, stride: int) -> tuple[list[int], list[int]]:
        """The `length` ids that are kept, and the rest with the last `stride` of these."""
        if len(ids) <= length:
            return ids, []
        if self.truncation_side == "left":
            start = len(ids) - length
            return ids[start:], ids[: start + stride]
        return ids[:length], ids[max(length - stride, 0) :]

    # -- Padding -----------------------------------------------------------------------------------

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
        """Fills encoded rows up to one length.

        Args:
            encoded_inputs: what calls returned: a list of rows' dicts, or a dict of lists of rows,
                or of one row. Values may be lists, arrays or tensors.
            padding, max_length, pad_to_multiple_of, return_tensors: as in a call.
            return_attention_mask: add an attention mask where there is none; by default, if the
                model takes one.
            verbose: accepted as upstream has it.

        Returns:
            The entries of the rows: those that hold a value per token padded, others as they are.

        Raises:
            ValueError: there is no padding token, or a row is longer than `max_length`.
        """
        is_batch, data = rows_by_column(encoded_inputs)
        main = self.model_input_names[0]
        ids = data.get(main)
        if ids is None:
            raise ValueError(f"rows to pad need {main!r}; they have {sorted(data)}")
        if return_attention_mask is None:
            return_attention_mask = "attention_mask" in self.model_input_names
        if return_attention_mask and "attention_mask" not in data:
            data["attention_mask"] = [[1] * len(row) for row in ids]
        length = self._padded_length(ids, padding, max_length, pad_to_multiple_of)
        if length is not None:
            data = self._padded(data, length, as_arrays=return_tensors is not None)
        if not is_batch:
            data = {name: rows[0] for name, rows in data.items()}
        return BatchEncoding(data, tensor_type=return_tensors)

    def _padded(
        self, data: Mapping[str, Any], length: int | None, as_arrays: bool
    ) -> dict[str, Any]:
        """The entries of rows, with those that hold a value per token filled up to `length`."""
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
                rows = filled(padded[name], length, value, self.padding_side)
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
        """The rows' encodings filled up to `length`; when they are first asked for, if so made."""
        if encodings is None or length is None:
            return encodings
        if callable(encodings):
            return partial(self._made_and_padded, encodings, length)
        for encoding in encodings:
            if len(encoding) < length:
                encoding.pad(
                    length,
                    direction=self.padding_side,
                    pad_id=self.pad_token_id,
                    pad_token=self.pad_token,
                )
        return encodings

    def _made_and_padded(self, make: Callable[[], list[Encoding]], length: int) -> list[Encoding]:
        return self._padded_encodings(make(), length)

    def _padded_length(
        self,
        rows: Sequence[Sequence[int]],
        padding: Any,
        max_length: int | None,
        pad_to_multiple_of: int | None,
    ) -> int | None:
        padding = strategy("padding", padding, PADDING_STRATEGIES)
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

    # -- Between tokens, ids and text --------------------------------------------------------------

    def tokenize(
        self,
        text: Any,
        pair: Any = None,
        add_special_tokens: bool = False,
        is_split_into_words: bool = False,
        **settings: Any,
    ) -> list[str]:
        """The tokens of a text, or of a pair, as the vocabulary spells them."""
        row = self.encode_plus(
            text,
            pair,
            add_special_tokens=add_special_tokens,
            is_split_into_words=is_split_into_words,
            **{"verbose": False, **settings},
        )
        return self.convert_ids_to_tokens(row[self.model_input_names[0]])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str] | None) -> Any:
        """The id of a token, or of each; that of `unk_token` for one that is not there."""
        if tokens is None:
            return None
        if isinstance(tokens, str):
            index = self._token_to_id(tokens)
            if index is None and self.unk_token is not None:
                index = self._token_to_id(self.unk_token)
            return index
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> Any:
        """The token of an id, or of each.

        Raises:
            ValueError: an id that no token has.
        """
        if np.ndim(ids) == 0:
            token = self._id_to_token(int(ids))
            if token is None:
                raise ValueError(f"no token has the id {ids}; there are {len(self)}")
            return token
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return [self.convert_ids_to_tokens(each) for each in as_list(ids) if each not in skipped]

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = True,
        **settings: Any,
    ) -> str:
        """The text of one row of ids.

        Args:
            token_ids: ids, as a list, array or tensor.
            skip_special_tokens: leave out special tokens.
            clean_up_tokenization_spaces: join punctuation and English contractions to the word
                before them.
            spaces_between_special_tokens: a setting of tokenizers that are not fast, see there.
        """
        text = self._decode(as_list(token_ids), skip_special_tokens, **settings)
        return self.clean_up_tokenization(text) if clean_up_tokenization_spaces else text

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], *positional: Any, **settings: Any
    ) -> list[str]:
        """The texts of several rows; the settings are those of `decode`."""
        return [self.decode(row, *positional, **settings) for row in sequences]

    @staticmethod
    def clean_up_tokenization(out_string: str) -> str:
        """A text with punctuation and English contractions joined to the word before them."""
        for mark in (".", "?", "!", ","):
            out_string = out_string.replace(f" {mark}", mark)
        out_string = out_string.replace(" ' ", "'")
        for ending in ("n't", "'m", "'s", "'ve", "'re"):
            out_string = out_string.replace(f" {ending}", ending)
        return out_string

    # -- What a backend fills in -------------------------------------------------------------------
    # Its constructor takes the arguments of `vocab_files`, `added_tokens` ({id: token}: tokens that
    # the files add to the vocabulary) and those of this class.

    @abstractmethod
    def _encode_batch(
        self, firsts: list[Any], seconds: list[Any] | None, settings: RowSettings
    ) -> tuple[dict[str, list[Any]], Any]:
        """The rows by column, and their encodings, what makes these, or None."""

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """All tokens, added ones included, with their ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of tokens, without added ones."""

    @abstractmethod
    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens that follow one another."""

    @abstractmethod
    def _id_to_token(self, index: int) -> str | None: ...

    @abstractmethod
    def _decode(self, ids: list[int], skip_special_tokens: bool, **settings: Any) -> str: ...


def as_list(ids: Any) -> list[int]:
    """Ids given as an int, a sequence, an array or a tensor."""
    return np.atleast_1d(np.asarray(ids, dtype=np.int64)).tolist()
