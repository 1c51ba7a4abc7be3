"""What all tokenizers share: from text to padded batches, and back.

A tokenizer is `PreTrainedTokenizerBase` with the few abstract methods at its end filled in by what
does the splitting: with the rows and their alignment (`tokenization_utils_fast.py`), or with ids
alone (`tokenization_utils.py`).

    text ─ _encode_batch ─> rows of ids, cut to max_length ─ pad ─> rows of one length ─> tensors

Its files are in `tokenization_files.py`, the roles of its special tokens in `special_tokens.py`,
the frame of a row in `tokenization_rows.py`, filling up in `tokenization_padding.py`.
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

# In tokenizer_config.json, this number and greater ones stand for "no limit".
VERY_LARGE_INTEGER = int(1e30)
LARGE_INTEGER = int(1e20)


class PreTrainedTokenizerBase(RowsOfIds, Padding, TokenizerFiles):
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
            NotTextError: `text` holds something that is not text, or not a word.
            ValueError: `max_length` has no room for the special tokens, or more than them and
                `stride`, or is not a multiple of `pad_to_multiple_of`, or the rows make no tensor.
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
        """A call for one text, or one pair."""
        return self._encode(partial(inputs_of_one, text, text_pair), *positional, **settings)

    def batch_encode_plus(
        self, batch_text_or_text_pairs: Any, *positional: Any, **settings: Any
    ) -> BatchEncoding:
        """A call for a list of texts, or of pairs."""
        inputs = partial(inputs_of_batch, batch_text_or_text_pairs)
        return self._encode(inputs, *positional, **settings)

    def encode(
        self, text: Any, text_pair: Any = None, *positional: Any, **settings: Any
    ) -> list[int] | torch.Tensor | np.ndarray:
        """The ids alone of one text, or of one pair; the settings are those of a call."""
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
        """The row of a text, or of a pair, whose ids are there already.

        Args:
            ids, pair_ids: of each text, without special tokens.
            return_tensors: as in a call; tensors have no first axis for rows,
            prepend_batch_axis: but with this.
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
        """A call; for the settings see there.

        Args:
            inputs_of: gives what rows are made of, when told whether texts come as words.
            make_rows: makes them instead of `_encode_batch`.
        """
        inputs = inputs_of(is_split_into_words)
        padding, truncation = with_present_names(padding, truncation, max_length, deprecated)
        truncation = strategy("truncation", truncation, TRUNCATION_STRATEGIES)
        padding = strategy("padding", padding, PADDING_STRATEGIES)
        truncation = self._warned_of(padding, truncation, max_length, pad_to_multiple_of)
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
            # As upstream has it, a fast tokenizer's ``length`` stays a list.
            kept = ("length",) if encodings is not None else ()
            data = {name: rows if name in kept else rows[0] for name, rows in data.items()}
        return BatchEncoding(data, encodings, return_tensors)

    def _columns(self, **given: bool | None) -> list[str]:
        """The entries that are asked for, or that the model takes where None; the ids first."""
        names = self.model_input_names
        wanted = [name for name, yes in given.items() if yes or (yes is None and name in names)]
        return [names[0], *wanted]

    def _warned_of(
        self, padding: str, truncation: str, max_length: int | None, multiple: int | None
    ) -> str:
        """The truncation that holds, after warnings of settings that may not be meant."""
        if max_length is not None and truncation == padding == "":
            self._warn_once("max_length without truncation: rows are cut, as with truncation=True")
            return TRUNCATION_STRATEGIES[0]
        if multiple is not None and not padding:
            self._warn_once("pad_to_multiple_of without padding: rows are not padded")
        if max_length is not None and padding == PADDING_STRATEGIES[0] and not truncation:
            self._warn_once(
                "max_length with padding to the longest row, without truncation: it does nothing"
            )
        return truncation

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
