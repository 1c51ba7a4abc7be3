"""What all tokenizers share: from text to padded batches, special tokens, loading and saving.

A tokenizer is `PreTrainedTokenizerBase` with the few abstract methods at its end filled in by what
does the splitting: the `tokenizers` package (`tokenization_utils_fast.py`), or another one.

    text ─ _encode_batch ─> rows of ids, cut to max_length ─ pad ─> rows of one length ─> tensors
"""

import functools
import json
import os
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Encoding

from loralib.io.atomic import atomic_write
from loralib.io.hub import resolve_file

from .loading_arguments import refuse_unknown, split_arguments
from .utils import logging

logger = logging.get_logger(__name__)

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

SPECIAL_TOKENS_ATTRIBUTES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# In tokenizer_config.json, this number and greater ones stand for "no limit".
VERY_LARGE_INTEGER = int(1e30)
LARGE_INTEGER = int(1e20)

TRUNCATION_STRATEGIES = ("longest_first", "only_first", "only_second", "do_not_truncate")
PADDING_STRATEGIES = ("longest", "max_length", "do_not_pad")


class BatchEncoding(UserDict):
    """What a tokenizer returns: a dict of rows whose entries are attributes as well.

    Args:
        data: ``input_ids``, ``attention_mask``, ...; each a list of rows of ints, a tensor
            (rows, tokens), or, for a single text, one row.
        encodings: the backend's `tokenizers.Encoding` of each row, where it has one.
        tensor_type: "pt" or "np": make tensors of the data, see `convert_to_tensors`.
        prepend_batch_axis: the data is one row; its tensors get a first axis of 1.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | None = None,
        encodings: list[Encoding] | None = None,
        tensor_type: str | None = None,
        prepend_batch_axis: bool = False,
    ):
        super().__init__(data)
        self._encodings = encodings
        self.convert_to_tensors(tensor_type, prepend_batch_axis)

    def __getattr__(self, name: str) -> Any:
        # While a copy is being unpickled it has no data yet, and asking for it must not recurse.
        if name == "data" or name not in self.data:
            raise AttributeError(f"{type(self).__name__} has no entry or attribute {name!r}")
        return self.data[name]

    @property
    def encodings(self) -> list[Encoding] | None:
        """One `tokenizers.Encoding` a row, None where the backend gives none."""
        return self._encodings

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        """For each token of a row the index of its word in the text, None for special tokens."""
        if self._encodings is None:
            raise ValueError(
                "word_ids needs the tokenizers backend's encodings; there are none here"
            )
        return self._encodings[batch_index].word_ids

    def convert_to_tensors(
        self, tensor_type: str | None = None, prepend_batch_axis: bool = False
    ) -> "BatchEncoding":
        """Replaces the entries by tensors ("pt") or arrays ("np"), integers in 64 bits.

        Raises:
            ValueError: the rows of an entry have several lengths, or are not numbers.
        """
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


def to_tensor(name: str, rows: Any) -> torch.Tensor:
    """One tensor of `rows` (numbers, or equally long rows of them): int64, or float32 for floats.

    Raises:
        ValueError: the rows of `name` have several lengths, or are not numbers.
    """
    if isinstance(rows, torch.Tensor):
        return rows
    if len(rows) and isinstance(rows[0], torch.Tensor):
        # Through numpy, rows would lose their device.
        shapes = {tuple(row.shape) for row in rows}
        if len(shapes) > 1:
            raise ValueError(f"{name}: rows of several shapes, {sorted(shapes)}, make no tensor")
        return torch.stack(list(rows))
    try:
        array = np.asarray(rows)
    except ValueError:
        array = np.asarray(None)
    # An array without items is one of floats to numpy, but here it is a row without tokens.
    if array.dtype.kind in "biu" or array.size == 0:
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    lengths = {len(row) for row in rows if hasattr(row, "__len__") and not isinstance(row, str)}
    if len(lengths) > 1:
        raise ValueError(
            f"{name}: rows of {min(lengths)} to {max(lengths)} items make no tensor; "
            "ask for padding=True, and truncation=True where max_length is to hold"
        )
    raise ValueError(f"{name}: makes no tensor, it is not all numbers")


def _token_id(name: str) -> property:
    def get(self: "PreTrainedTokenizerBase") -> int | None:
        token = getattr(self, name)
        if token is None:
            return None
        index = self._token_to_id(token)
        if index is None:
            raise ValueError(f"{name} {token!r} is not in the vocabulary")
        return index

    return property(get, doc=f"The id of `{name}`, None where there is none.")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


class PreTrainedTokenizerBase(ABC):
    """From text to ids and back, for one vocabulary.

    Its attributes of the same names can be set later; tokens are kept as strings, None for none.

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
    """

    # Which files make a vocabulary: {constructor argument: file name}; the first complete set wins.
    vocab_files: tuple[dict[str, str], ...] = ()
    # What tokenizer_config.json sets and save_pretrained writes: constructor arguments that are
    # attributes as well.
    config_names: tuple[str, ...] = (
        *SPECIAL_TOKENS_ATTRIBUTES,
        "additional_special_tokens",
        "model_max_length",
        "padding_side",
        "truncation_side",
    )
    # What a call returns unless told otherwise.
    model_input_names: list[str] = ["input_ids", "token_type_ids", "attention_mask"]  # noqa: RUF012
    is_fast = False
    pad_token_type_id = 0

    bos_token_id = _token_id("bos_token")
    eos_token_id = _token_id("eos_token")
    unk_token_id = _token_id("unk_token")
    sep_token_id = _token_id("sep_token")
    pad_token_id = _token_id("pad_token")
    cls_token_id = _token_id("cls_token")
    mask_token_id = _token_id("mask_token")

    def __init__(
        self,
        *,
        bos_token: str | AddedToken | None = None,
        eos_token: str | AddedToken | None = None,
        unk_token: str | AddedToken | None = None,
        sep_token: str | AddedToken | None = None,
        pad_token: str | AddedToken | None = None,
        cls_token: str | AddedToken | None = None,
        mask_token: str | AddedToken | None = None,
        additional_special_tokens: Iterable[str | AddedToken] | None = None,
        model_max_length: int | None = None,
        padding_side: str = "right",
        truncation_side: str = "right",
    ):
        for name, side in (("padding_side", padding_side), ("truncation_side", truncation_side)):
            if side not in ("right", "left"):
                raise ValueError(f"{name} is 'right' or 'left', not {side!r}")
        self.bos_token = text_of(bos_token)
        self.eos_token = text_of(eos_token)
        self.unk_token = text_of(unk_token)
        self.sep_token = text_of(sep_token)
        self.pad_token = text_of(pad_token)
        self.cls_token = text_of(cls_token)
        self.mask_token = text_of(mask_token)
        self.additional_special_tokens = [text_of(each) for each in additional_special_tokens or ()]
        self.model_max_length = int(model_max_length or VERY_LARGE_INTEGER)
        self.padding_side = padding_side
        self.truncation_side = truncation_side
        # A copy, so that a change is this tokenizer's own.
        self.model_input_names = list(self.model_input_names)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(vocab_size={self.vocab_size}, "
            f"model_max_length={self.model_max_length}, special_tokens={self.special_tokens_map})"
        )

    def __len__(self) -> int:
        """The number of tokens, added ones included."""
        return len(self.get_vocab())

    # -- Special tokens ----------------------------------------------------------------------------

    @property
    def special_tokens_map(self) -> dict[str, str | list[str]]:
        """The special tokens that there are, by their role."""
        roles = {name: getattr(self, name) for name in SPECIAL_TOKENS_ATTRIBUTES}
        roles["additional_special_tokens"] = self.additional_special_tokens
        return {name: token for name, token in roles.items() if token}

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once."""
        roles = [getattr(self, name) for name in SPECIAL_TOKENS_ATTRIBUTES]
        return list(dict.fromkeys(filter(None, [*roles, *self.additional_special_tokens])))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return self.convert_tokens_to_ids(self.all_special_tokens)

    def get_special_tokens_mask(
        self, token_ids: Sequence[int], already_has_special_tokens: bool = True
    ) -> list[int]:
        """1 for each special token among `token_ids`, 0 for the others.

        Raises:
            ValueError: ids without special tokens; a call with return_special_tokens_mask=True
                has the mask of the row that it builds.
        """
        if not already_has_special_tokens:
            raise ValueError(
                "get_special_tokens_mask takes finished rows; for the mask of a text, call the "
                "tokenizer with return_special_tokens_mask=True"
            )
        special = set(self.all_special_ids)
        return [int(index in special) for index in _as_list(token_ids)]

    # -- From text to ids --------------------------------------------------------------------------

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        *,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_special_tokens_mask: bool = False,
    ) -> BatchEncoding:
        """Ids of one text or of a batch of them, or of pairs of texts.

        Args:
            text: a text, or several.
            text_pair: the second text of each pair; one or several, as `text` is.
            add_special_tokens: frame the row as the model expects it.
            padding: True or "longest": to the batch's longest row; "max_length": to `max_length`;
                False: not at all.
            truncation: True or "longest_first": cut the longer of the two texts; "only_first",
                "only_second"; False: not at all.
            max_length: in tokens, special ones included; `model_max_length` by default. Given
                alone, without padding and truncation, it truncates.
            pad_to_multiple_of: round the padded length up to a multiple. Rows that are cut have to
                fit in: `max_length` then is a multiple as well.
            return_tensors: "pt" for torch tensors, "np" for arrays, None for lists.
            return_token_type_ids, return_attention_mask: add these rows; by default, those that
                the model takes.
            return_special_tokens_mask: add a row that is 1 for special tokens and padding.

        Returns:
            ``input_ids`` and the rows asked for: one list each for a single text, a list of lists
            for a batch, or tensors (rows, tokens).

        Raises:
            ValueError: `text` holds something that is not text, `max_length` has no room for the
                special tokens or is not a multiple of `pad_to_multiple_of`, or the rows make no
                tensor.
        """
        texts, pairs = _check_texts(text, text_pair)
        truncation = _strategy("truncation", truncation, TRUNCATION_STRATEGIES)
        padding = _strategy("padding", padding, PADDING_STRATEGIES)
        if max_length is not None and truncation == padding == "":
            _warn_once("max_length without truncation: rows are cut, as with truncation=True")
            truncation = TRUNCATION_STRATEGIES[0]
        if pad_to_multiple_of is not None and not padding:
            _warn_once("pad_to_multiple_of without padding: rows are not padded")
        if max_length is not None and padding == PADDING_STRATEGIES[0] and not truncation:
            _warn_once(
                "max_length with padding to the longest row, without truncation: it does nothing"
            )
        limit = self._limit(max_length, "truncation") if truncation else None
        frame = self.num_special_tokens_to_add(pairs is not None) if add_special_tokens else 0
        if limit is not None and limit < frame:
            raise ValueError(f"max_length={limit} has no room for the {frame} special tokens")
        if padding and limit is not None and limit % (pad_to_multiple_of or 1):
            raise ValueError(
                f"rows cut to {limit} tokens cannot be padded to a multiple of "
                f"pad_to_multiple_of={pad_to_multiple_of}: give a max_length that is one"
            )

        asked = {
            "input_ids": True,
            "token_type_ids": return_token_type_ids,
            "attention_mask": return_attention_mask,
            "special_tokens_mask": return_special_tokens_mask,
        }
        columns = [
            name
            for name, wanted in asked.items()
            if wanted or (wanted is None and name in self.model_input_names)
        ]
        data, encodings = self._encode_batch(
            texts,
            pairs,
            columns,
            add_special_tokens,
            truncation if limit is not None else "",
            limit,
        )
        if not truncation:
            self._warn_if_too_long(data["input_ids"])

        if padding:
            data = self.pad(data, padding, max_length, pad_to_multiple_of, False, return_tensors)
            for encoding, row in zip(encodings or (), data["input_ids"], strict=False):
                if len(encoding) < len(row):
                    encoding.pad(
                        len(row),
                        direction=self.padding_side,
                        pad_id=self.pad_token_id,
                        pad_token=self.pad_token,
                    )
        if isinstance(text, str) and return_tensors is None:
            data = {name: rows[0] for name, rows in data.items()}
        return BatchEncoding(data, encodings, return_tensors)

    def encode(
        self, text: str, text_pair: str | None = None, **settings: Any
    ) -> list[int] | torch.Tensor | np.ndarray:
        """The ids alone; the settings are those of a call."""
        return self(text, text_pair, **settings)["input_ids"]

    def _limit(self, max_length: int | None, purpose: str) -> int | None:
        """The length in tokens that rows are cut or padded to; None where nothing sets one."""
        limited = self.model_max_length < LARGE_INTEGER
        if max_length is None:
            if not limited:
                _warn_once(f"{purpose}: no max_length, and the tokenizer has none: not applied")
            return self.model_max_length if limited else None
        if limited and max_length > self.model_max_length:
            _warn_once(
                f"max_length={max_length} exceeds what the model takes: {self.model_max_length}"
            )
        return max_length

    def _warn_if_too_long(self, rows: Iterable[Sequence[int]]) -> None:
        if max(map(len, rows), default=0) > self.model_max_length:
            _warn_once(
                f"some rows exceed the {self.model_max_length} tokens that the model takes: "
                "pass truncation=True"
            )

    def pad(
        self,
        encoded_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: str | None = None,
    ) -> BatchEncoding:
        """Fills encoded rows up to one length.

        Args:
            encoded_inputs: what calls returned: a list of rows' dicts, or a dict of lists of rows,
                or of one row. Values may be lists, arrays or tensors.
            padding, max_length, pad_to_multiple_of, return_tensors: as in a call.
            return_attention_mask: add the mask where it is missing; by default, if the model takes
                it.

        Returns:
            The entries of the rows: those that hold a value per token padded, others as they are.

        Raises:
            ValueError: there is no padding token, or a row is longer than `max_length`.
        """
        is_batch, data = _columns(encoded_inputs)
        ids = data.get("input_ids")
        if ids is None:
            raise ValueError(f"rows to pad need 'input_ids'; they have {sorted(data)}")
        if return_attention_mask is None:
            return_attention_mask = "attention_mask" in self.model_input_names
        if return_attention_mask and "attention_mask" not in data:
            data["attention_mask"] = [[1] * len(row) for row in ids]

        length = self._padded_length(ids, padding, max_length, pad_to_multiple_of)
        if length is not None:
            for name, value in self._padding_values().items():
                if name in data:
                    filled = _fill(data[name], length, value, self.padding_side)
                    data[name] = filled.tolist() if return_tensors is None else filled
        if not is_batch:
            data = {name: rows[0] for name, rows in data.items()}
        return BatchEncoding(data, tensor_type=return_tensors)

    def _padding_values(self) -> dict[str, int]:
        """What fills each of the entries that hold a value per token."""
        return {
            "input_ids": self.pad_token_id,
            "token_type_ids": self.pad_token_type_id,
            "attention_mask": 0,
            "special_tokens_mask": 1,
        }

    def _padded_length(
        self,
        rows: Sequence[Sequence[int]],
        padding: bool | str,
        max_length: int | None,
        pad_to_multiple_of: int | None,
    ) -> int | None:
        padding = _strategy("padding", padding, PADDING_STRATEGIES)
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
        self, text: str, pair: str | None = None, add_special_tokens: bool = False
    ) -> list[str]:
        """The tokens of a text, or of a pair, as the vocabulary spells them."""
        row = self(text, pair, add_special_tokens=add_special_tokens)
        return self.convert_ids_to_tokens(row["input_ids"])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int] | None:
        """The id of a token, or of each; that of `unk_token` for one that is not there."""
        if isinstance(tokens, str):
            index = self._token_to_id(tokens)
            if index is None and self.unk_token is not None:
                index = self._token_to_id(self.unk_token)
            return index
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> str | list[str]:
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
        return [self.convert_ids_to_tokens(each) for each in _as_list(ids) if each not in skipped]

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of one row of ids.

        Args:
            token_ids: ids, as a list, array or tensor.
            skip_special_tokens: leave out special tokens.
            clean_up_tokenization_spaces: join punctuation and English contractions to the word
                before them.
        """
        text = self._decode(_as_list(token_ids), skip_special_tokens)
        return _without_spaces(text) if clean_up_tokenization_spaces else text

    def batch_decode(self, sequences: Iterable[Sequence[int]], **settings: Any) -> list[str]:
        """The texts of several rows; the settings are those of `decode`."""
        return [self.decode(row, **settings) for row in sequences]

    # -- Files -------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        use_fast: bool = True,
        **arguments: Any,
    ) -> "PreTrainedTokenizerBase":
        """Opens the tokenizer of a model folder or of a model on the hub.

        Args:
            name_or_path: a local folder, or a name on the hub.
            use_fast: each model has one tokenizer here; asking for another one is only logged.
            arguments: where to look, see `loading_arguments.split_arguments`; and constructor
                arguments that win over the files: ``model_max_length=128``.

        Raises:
            OSError: there is no such model, it has no vocabulary, or a file is damaged.
            TypeError: an argument that the tokenizer does not have.
            ValueError: what an argument asks for is not to be had.
        """
        name = os.fspath(name_or_path)
        where, overrides = split_arguments(arguments)
        refuse_unknown(cls, overrides.keys() - set(cls.config_names), cls.config_names)
        if cls.is_fast and not use_fast:
            logger.info("use_fast=False: there is one tokenizer of this model, %s", cls.__name__)

        config = _read_json(resolve_file(name, TOKENIZER_CONFIG_FILE, **where))
        # Files since Transformers 4.34 hold all added tokens in the configuration; older ones in
        # two files of their own.
        if "added_tokens_decoder" in config:
            added = {int(index): token for index, token in config["added_tokens_decoder"].items()}
        else:
            config |= _read_json(resolve_file(name, SPECIAL_TOKENS_MAP_FILE, **where))
            tokens = _read_json(resolve_file(name, ADDED_TOKENS_FILE, **where))
            added = {index: token for token, index in tokens.items()}
        settings = {key: _as_token(config[key]) for key in cls.config_names if key in config}
        return cls(
            **cls._resolve_vocab_files(name, **where),
            added_tokens={index: _as_token(token) for index, token in added.items()},
            **{**settings, **overrides},
        )

    @classmethod
    def _resolve_vocab_files(cls, name: str, **where: Any) -> dict[str, str]:
        for files in cls.vocab_files:
            paths = {}
            for argument, filename in files.items():
                path = resolve_file(name, filename, **where)
                if path is None:
                    break
                paths[argument] = str(path)
            else:
                return paths
        looked_for = ", or ".join(" with ".join(files.values()) for files in cls.vocab_files)
        raise OSError(f"'{name}' has no vocabulary: looked for {looked_for}")

    def save_pretrained(self, save_directory: str | os.PathLike) -> tuple[str, ...]:
        """Writes the tokenizer into a folder, each file atomically; returns the files' paths."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = type(self).__name__.removesuffix("Fast")
        config = {key: getattr(self, key) for key in self.config_names} | {"tokenizer_class": name}
        contents = {
            TOKENIZER_CONFIG_FILE: config,
            SPECIAL_TOKENS_MAP_FILE: self._special_tokens_to_save(),
        }
        for filename, content in contents.items():
            write_json(folder / filename, content, indent=2, sort_keys=True)
        written = tuple(str(folder / filename) for filename in contents)
        return written + self.save_vocabulary(folder)

    def _special_tokens_to_save(self) -> dict[str, Any]:
        return self.special_tokens_map

    # -- What a backend fills in -------------------------------------------------------------------
    # Its constructor takes the arguments of `vocab_files`, `added_tokens` ({id: token}: tokens that
    # the files add to the vocabulary) and those of this class.

    @abstractmethod
    def _encode_batch(
        self,
        texts: list[str],
        pairs: list[str] | None,
        columns: Sequence[str],
        add_special_tokens: bool,
        truncation: str,
        max_length: int | None,
    ) -> tuple[dict[str, list[list[int]]], list[Encoding] | None]:
        """The rows of each of `columns`, cut by the strategy `truncation` ("" for none)."""

    @abstractmethod
    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many special tokens frame a text, or a pair of texts."""

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """All tokens, added ones included, with their ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of tokens, without added ones."""

    @abstractmethod
    def save_vocabulary(self, save_directory: str | os.PathLike) -> tuple[str, ...]:
        """Writes the vocabulary's files into a folder; returns their paths."""

    @abstractmethod
    def _token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def _id_to_token(self, index: int) -> str | None: ...

    @abstractmethod
    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


def text_of(token: str | AddedToken | None) -> str | None:
    """A special token's text."""
    return token.content if isinstance(token, AddedToken) else token


def write_json(path: Path, content: Any, **format: Any) -> None:
    """Writes a JSON file in UTF-8, atomically; `format` goes to `json.dumps`."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, ensure_ascii=False, **format) + "\n", "utf-8")


def _read_json(path: Path | None) -> dict[str, Any]:
    """The settings in a JSON file, none where there is no file."""
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OSError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(content, dict):
        raise OSError(f"{path}: holds a {type(content).__name__}, not settings by name")
    return content


def _as_token(value: Any) -> Any:
    """The token that a file spells as a dict of its text and flags; any other value as it is."""
    if isinstance(value, list):
        return [_as_token(each) for each in value]
    if not isinstance(value, dict):
        return value
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    # Where the files do not say so, a token with flags has a special token's role.
    return AddedToken(
        value["content"],
        special=value.get("special", True),
        **{name: value[name] for name in flags if name in value},
    )


def _strategy(name: str, value: bool | str | None, known: tuple[str, ...]) -> str:
    """The strategy's name, "" for none; `known` begins with what True means and ends with none."""
    if value is True:
        return known[0]
    if not value or value == known[-1]:
        return ""
    if value not in known:
        raise ValueError(f"{name} is True, False or one of {', '.join(known)}, not {value!r}")
    return value


def _check_texts(
    text: str | Sequence[str], text_pair: str | Sequence[str] | None
) -> tuple[list[str], list[str] | None]:
    """Both arguments as lists of strings of the same length."""
    texts = _text_list("text", text)
    if text_pair is None:
        return texts, None
    pairs = _text_list("text_pair", text_pair)
    if isinstance(text, str) != isinstance(text_pair, str):
        raise ValueError("text and text_pair are two texts, or two lists of texts")
    if len(texts) != len(pairs):
        raise ValueError(f"there are {len(texts)} texts, but {len(pairs)} in text_pair")
    return texts, pairs


def _text_list(name: str, value: str | Sequence[str]) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} is a text or a list of texts, not {type(value).__name__}")
    texts = list(value)
    for index, each in enumerate(texts):
        if not isinstance(each, str):
            raise ValueError(f"{name} {index} is {type(each).__name__} ({each!r:.40}), not a text")
    return texts


def _columns(
    encoded: Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> tuple[bool, dict[str, Any]]:
    """Whether these are several rows, and their entries as lists of rows."""
    if not isinstance(encoded, Mapping):
        first = next(iter(encoded), {})
        return True, {name: [row[name] for row in encoded] for name in first}
    ids = encoded.get("input_ids", ())
    if len(ids) and np.ndim(ids[0]) == 0:
        return False, {name: [row] for name, row in encoded.items()}
    return True, dict(encoded)


def _fill(rows: Sequence[Any], length: int, value: int, side: str) -> np.ndarray:
    """`rows` in one array (rows, length), filled up with `value`."""
    filled = np.full((len(rows), length), value, dtype=np.int64)
    for target, row in zip(filled, rows, strict=True):
        start = length - len(row) if side == "left" else 0
        # A tensor is made an array first: assigned as it is, older NumPys warn of its copy.
        target[start : start + len(row)] = np.asarray(row, dtype=np.int64)
    return filled


def _as_list(ids: Any) -> list[int]:
    """Ids given as an int, a sequence, an array or a tensor."""
    return np.atleast_1d(np.asarray(ids, dtype=np.int64)).tolist()


def _without_spaces(text: str) -> str:
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text
