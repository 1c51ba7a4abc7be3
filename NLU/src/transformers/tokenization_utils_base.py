"""`PreTrainedTokenizerBase`: what all tokenizers share, from text to padded batches and back.

A tokenizer fills in the few abstract methods at its end. Its backend, which splits texts, gives
rows and their alignment (`tokenization_utils_fast.py`) or ids alone (`tokenization_utils.py`).

    text ─ _encode_batch ─> rows of ids, cut to max_length ─ pad ─> rows of one length ─> tensors

Files are in `tokenization_files.py`, the roles of special tokens in `special_tokens.py`, rows with
their special tokens in `tokenization_rows.py`, padding in `tokenization_padding.py`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken  # noqa: F401 - importable from here, too

from .batch_encoding import BatchEncoding, CharSpan, Encoding, TokenSpan, to_tensor  # noqa: F401
from .file_utils import ExplicitEnum, PaddingStrategy, TensorType  # noqa: F401
from .special_tokens import ADDITIONAL, ROLES, SpecialTokensMixin, Token  # noqa: F401
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
    inputs_of_batch,
    inputs_of_call,
    inputs_of_one,
    strategy,
    with_present_names,
)
from .tokenization_padding import Padding
from .tokenization_rows import RowsOfIds, as_list
from .utils import logging

logger = logging.get_logger(__name__)

# In tokenizer_config.json, VERY_LARGE_INTEGER stands for "no limit"; so does any number from
# LARGE_INTEGER on.
VERY_LARGE_INTEGER = int(1e30)
LARGE_INTEGER = int(1e20)


class PreTrainedTokenizerBase(RowsOfIds, Padding, TokenizerFiles):
    """Converts text to ids and back, with one vocabulary.

    The arguments are also attributes, which can be set later.

    Args:
        bos_token, eos_token: start and end of a sequence.
        unk_token: stands for what is not in the vocabulary.
        sep_token, cls_token: between two sequences; the first token, which classifiers read.
        pad_token: pads the rows of a batch to one length.
        mask_token: hides a token in masked language modeling.
        additional_special_tokens: further tokens that are not text.
        model_max_length: the longest row that the model takes, in tokens, special ones included;
            None for no limit.
        padding_side, truncation_side: "right" or "left": where rows are padded, and cut.
        model_input_names: what a call returns by default, the ids' name first.
        verbose: warn about arguments of calls that may be mistakes.
        others: settings of other tokenizers; they are kept in `init_kwargs`, without effect.
    """

    # These are kept out of the attributes' dict, from which caches of `datasets` take their keys:
    # equal tokenizers have equal dicts, wherever they were loaded and whatever they warned about.
    __slots__ = ("deprecation_warnings", "name_or_path")

    # The constructor's arguments that save_pretrained writes; they are attributes as well.
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
        """Returns the number of tokens, added ones included."""
        return len(self.get_vocab())

    def _start_anew(self) -> None:
        # The warnings given so far; a caller empties it to be warned again.
        self.deprecation_warnings: dict[str, bool] = {}
        self.name_or_path = ""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_anew()

    @property
    def max_len_single_sentence(self) -> int:
        """The longest text, in tokens, that fits into the longest row the model takes."""
        return self.model_max_length - self.num_special_tokens_to_add(pair=False)

    @property
    def max_len_sentences_pair(self) -> int:
        """The longest pair of texts, in tokens, that fits into the longest row the model takes."""
        return self.model_max_length - self.num_special_tokens_to_add(pair=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the tokens added to the vocabulary, with their ids."""
        return {token: i for token, i in self.get_vocab().items() if i >= self.vocab_size}

    def _warn_of_growth(self, tokens: list[str]) -> None:
        """Warns of special tokens that the files do not have, if any."""
        if tokens:
            logger.warning(
                "special tokens missing from the vocabulary are added at its end, where the model "
                "may have no embedding: %s",
                ", ".join(tokens),
            )

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
        """Encodes one text or a batch of texts, or pairs of texts.

        Args:
            text: a text, or several; or several pairs of texts.
            text_pair: the second text of each pair; one or several, as `text` is.
            add_special_tokens: add the special tokens that the model expects.
            padding: True or "longest": to the batch's longest row; "max_length": to `max_length`;
                False: not at all.
            truncation: True or "longest_first": cut the longer of the two texts; "only_first",
                "only_second"; False or "do_not_truncate": not at all.
            max_length: in tokens, special ones included; `model_max_length` by default. Given
                alone, with padding and truncation False, it truncates.
            stride: with `return_overflowing_tokens`, how many tokens of the kept part are repeated
                in what is cut off.
            is_split_into_words: each text is a list of words.
            pad_to_multiple_of: round the padded length up to a multiple of this. If rows are also
                cut, `max_length` has to be such a multiple.
            return_tensors: "pt" for torch tensors, "np" for arrays, None for lists.
            return_token_type_ids, return_attention_mask: add these entries; by default, those that
                the model takes.
            return_overflowing_tokens: keep what is cut off. Fast tokenizers turn it into further
                rows, and ``overflow_to_sample_mapping`` gives each row's input, also for a single
                text. Others add its ids as ``overflowing_tokens``, and their number, without the
                stride, as ``num_truncated_tokens``.
            return_special_tokens_mask: add a mask that is 1 for special tokens and padding.
            return_offsets_mapping: add ``offset_mapping``: each token's first character in its
                text, and the one after its last. Only fast tokenizers can.
            return_length: add each row's ``length`` in tokens.
            verbose: warn about arguments that may be mistakes.

        Returns:
            ``input_ids`` and the entries asked for: one list each for a single text, a list of
            lists for a batch, or tensors (rows, tokens).

        Raises:
            NotImplementedError: a tokenizer that is not fast is asked for offsets.
            NotTextError: `text` holds something that is not text, or not a word.
            ValueError: `max_length` leaves no room for the special tokens, or for more than them
                and `stride`; or it is not a multiple of `pad_to_multiple_of`; or the rows make no
                tensor.
        """
        return self._encode(
            partial(inputs_of_call, text, text_pair),
            add_special_tokens,
            padding,
            truncation,
            max_length,
            stride,
            is_split_into_words,
            **settings,
        )

    def encode_plus(
        self, text: Any, text_pair: Any = None, *positional: Any, **settings: Any
    ) -> BatchEncoding:
        """Encodes one text, or one pair, as a call does."""
        return self._encode(partial(inputs_of_one, text, text_pair), *positional, **settings)

    def batch_encode_plus(
        self, batch_text_or_text_pairs: Any, *positional: Any, **settings: Any
    ) -> BatchEncoding:
        """Encodes a list of texts, or of pairs, as a call does."""
        inputs = partial(inputs_of_batch, batch_text_or_text_pairs)
        return self._encode(inputs, *positional, **settings)

    def encode(
        self, text: Any, text_pair: Any = None, *positional: Any, **settings: Any
    ) -> list[int] | torch.Tensor | np.ndarray:
        """Returns only the ids of one text, or of one pair; the settings are those of a call."""
        row = self.encode_plus(text, text_pair, *positional, **settings)
        return row[self.model_input_names[0]]

    def prepare_for_model(
        self,
        ids: Sequence[int],
        pair_ids: Sequence[int] | None = None,
        *positional: Any,
        return_tensors: Any = None,
        prepend_batch_axis: bool = False,
        **settings: Any,
    ) -> BatchEncoding:
        """Makes the row of a text, or of a pair, whose ids are already known.

        Args:
            ids, pair_ids: each text's ids, without special tokens.
            return_tensors: as in a call, but tensors have no axis for rows.
            prepend_batch_axis: give tensors a first axis for rows.
            positional, settings: as in a call, from `add_special_tokens` on.
        """
        inputs = Inputs([list(ids)], None if pair_ids is None else [list(pair_ids)], batched=False)
        row = self._encode(lambda _: inputs, *positional, make_rows=self._rows_of_ids, **settings)
        return row.convert_to_tensors(return_tensors, prepend_batch_axis)

    def _encode(
        self,
        inputs_of: Callable[[bool], Inputs],
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
        """Does what a call does, with the same settings.

        Args:
            inputs_of: (whether texts are lists of words) -> the rows' inputs.
            make_rows: makes the rows instead of `_encode_batch`.
        """
        inputs = inputs_of(is_split_into_words)
        padding, truncation = with_present_names(padding, truncation, max_length, deprecated)
        if max_length is not None and not padding and not truncation:
            self._warn_once("max_length without truncation: rows are cut, as with truncation=True")
            truncation = True
        truncation = strategy("truncation", truncation, TRUNCATION_STRATEGIES)
        padding = strategy("padding", padding, PADDING_STRATEGIES)
        self._warn_of(padding, truncation, max_length, pad_to_multiple_of)
        limit = self._limit(max_length, "truncation") if truncation else None
        self._check_room(
            limit,
            self.num_special_tokens_to_add(inputs.seconds is not None) if add_special_tokens else 0,
            stride if return_overflowing_tokens else 0,
            pad_to_multiple_of if padding else None,
        )
        columns = self._columns(
            token_type_ids=return_token_type_ids,
            attention_mask=return_attention_mask,
            special_tokens_mask=return_special_tokens_mask,
            offset_mapping=return_offsets_mapping,
        )
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
            # A fast tokenizer's ``length`` stays a list, as upstream.
            kept = ("length",) if encodings is not None else ()
            data = {name: rows if name in kept else rows[0] for name, rows in data.items()}
        return BatchEncoding(data, encodings, return_tensors)

    def _columns(self, **given: bool | None) -> list[str]:
        """Returns the ids' name, and the entries asked for or, if None, taken by the model."""
        names = self.model_input_names
        wanted = [name for name, yes in given.items() if yes or (yes is None and name in names)]
        return [names[0], *wanted]

    def _warn_of(
        self, padding: str, truncation: str, max_length: int | None, multiple: int | None
    ) -> None:
        """Warns about settings that may be mistakes."""
        if multiple is not None and not padding:
            self._warn_once("pad_to_multiple_of without padding: rows are not padded")
        if max_length is not None and padding == PADDING_STRATEGIES[0] and not truncation:
            self._warn_once(
                "max_length with padding to the longest row, without truncation: it does nothing"
            )

    def _check_room(self, limit: int | None, frame: int, stride: int, multiple: int | None) -> None:
        """Checks that rows are not cut to too few tokens, or to a length that cannot be padded."""
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
        """Returns the length in tokens that rows are cut or padded to; None if nothing sets one."""
        limited = self.model_max_length < LARGE_INTEGER
        if max_length is None:
            if not limited:
                self._warn_once(
                    f"{purpose}: no max_length, and the tokenizer has none either: no effect"
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
        """Warns, but only once for each `about`, by default the message."""
        if self.verbose and not self.deprecation_warnings.get(about or message):
            self.deprecation_warnings[about or message] = True
            logger.warning(message)

    # -- Between tokens, ids and text --------------------------------------------------------------

    def tokenize(
        self,
        text: Any,
        pair: Any = None,
        add_special_tokens: bool = False,
        is_split_into_words: bool = False,
        **settings: Any,
    ) -> list[str]:
        """Returns the tokens of a text, or of a pair, as the vocabulary spells them."""
        row = self.encode_plus(
            text,
            pair,
            add_special_tokens=add_special_tokens,
            is_split_into_words=is_split_into_words,
            **{"verbose": False, **settings},
        )
        return self.convert_ids_to_tokens(row[self.model_input_names[0]])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str] | None) -> Any:
        """Returns the id of a token, or of each of several; `unk_token`'s for unknown ones."""
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
        """Returns the token of an id, or of each of several.

        Raises:
            ValueError: no token has this id.
        """
        if np.ndim(ids) == 0:
            token = self._id_to_token(int(ids))
            if token is None:
                raise ValueError(f"no token has the id {ids}; there are {len(self)} tokens")
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
        """Returns the text of one row of ids.

        Args:
            token_ids: ids, as a list, array or tensor.
            skip_special_tokens: leave out special tokens.
            clean_up_tokenization_spaces: join punctuation and English contractions to the word
                before them.
            settings: `spaces_between_special_tokens`, see `PreTrainedTokenizer._decode`.
        """
        text = self._decode(as_list(token_ids), skip_special_tokens, **settings)
        return self.clean_up_tokenization(text) if clean_up_tokenization_spaces else text

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], *positional: Any, **settings: Any
    ) -> list[str]:
        """Returns the texts of several rows; the settings are those of `decode`."""
        return [self.decode(row, *positional, **settings) for row in sequences]

    @staticmethod
    def clean_up_tokenization(out_string: str) -> str:
        """Joins punctuation and English contractions to the word before them."""
        for mark in (".", "?", "!", ","):
            out_string = out_string.replace(f" {mark}", mark)
        out_string = out_string.replace(" ' ", "'")
        for ending in ("n't", "'m", "'s", "'ve", "'re"):
            out_string = out_string.replace(f" {ending}", ending)
        return out_string

    # -- What a backend fills in -------------------------------------------------------------------
    # A subclass's constructor takes the arguments of `vocab_files`, `added_tokens` ({id: token}:
    # tokens that the files add to the vocabulary) and those of this class.

    @abstractmethod
    def _encode_batch(
        self, firsts: list[Any], seconds: list[Any] | None, settings: RowSettings
    ) -> tuple[dict[str, list[Any]], Any]:
        """Returns column -> rows, and the rows' encodings, a function that makes them, or None."""

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """Returns all tokens, added ones included, with their ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of tokens, without added ones."""

    @abstractmethod
    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Returns the text of consecutive tokens."""

    @abstractmethod
    def _id_to_token(self, index: int) -> str | None: ...

    @abstractmethod
    def _decode(self, ids: list[int], skip_special_tokens: bool, **settings: Any) -> str: ...
