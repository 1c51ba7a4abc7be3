"""`TokenizerFiles`: loads and saves tokenizers."""

import difflib
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken

from loralib.io.atomic import atomic_write_text
from loralib.io.hub import resolve_file
from loralib.text import as_json, first_line

from .file_utils import read_json_object
from .loading_arguments import WHERE, refuse_unknown, split_arguments
from .special_tokens import ADDITIONAL, flags_of
from .utils import logging

logger = logging.get_logger(__name__)

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

# Arguments of from_pretrained that are no settings of a tokenizer.
_HOW_TO_OPEN = {"use_fast", "from_slow"}

_Tokenizer = TypeVar("_Tokenizer", bound="TokenizerFiles")


class TokenizerFiles(ABC):
    """The part of a tokenizer that loads it from files, and saves it.

    A class names its vocabulary's files; everything else is in ``tokenizer_config.json``,
    ``special_tokens_map.json`` and ``added_tokens.json``.
    """

    # Sets of files that make a vocabulary, {constructor argument: file name}; the first set that is
    # complete is read.
    vocab_files: tuple[dict[str, str], ...] = ()
    # Published models whose files do not say it -> their longest row, in tokens.
    max_model_input_sizes: Mapping[str, int] = {}
    config_names: tuple[str, ...]
    is_fast: bool
    _others: dict[str, Any]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # The same under upstream's names.
        cls.vocab_files_names = {
            name: file for files in cls.vocab_files for name, file in files.items()
        }
        cls.pretrained_vocab_files_map = {
            argument: {
                name: f"https://huggingface.co/{name}/resolve/main/{file}"
                for name in cls.max_model_input_sizes
            }
            for argument, file in cls.vocab_files_names.items()
        }

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """The settings that the constructor would build this tokenizer from, in a new dict.

        The vocabulary's files are None, since the tokenizer no longer needs them.
        """
        parameters = inspect.signature(type(self).__init__).parameters.values()
        optional = [each.name for each in parameters if each.default is not each.empty]
        return {
            **dict.fromkeys(optional),
            **dict.fromkeys(self.vocab_files_names),
            **{name: getattr(self, name) for name in optional if hasattr(self, name)},
            **self._config(),
            **self._others,
        }

    def _keep_others(self, others: Mapping[str, Any]) -> None:
        """Keeps settings that this tokenizer does not have, such as `do_lower_case`, as 4.4.2 does.

        Raises:
            TypeError: one of them is a misspelling of a setting that it has.
        """
        known = [*self.config_names, *WHERE]
        for name, value in others.items():
            if difflib.get_close_matches(name, known, n=1, cutoff=0.8):
                refuse_unknown(type(self), [name], known)
            if value is not None and value is not False:
                logger.warning(
                    "%s has no setting %s: %s=%r has no effect",
                    type(self).__name__,
                    name,
                    name,
                    value,
                )
        self._others = dict(others)

    # -- Loading -----------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls: type[_Tokenizer], name_or_path: str | os.PathLike, **arguments: Any
    ) -> _Tokenizer:
        """Loads the tokenizer of a model folder or of a model on the hub.

        Args:
            name_or_path: a local folder, or a name on the hub.
            arguments: where to look, see `loading_arguments.split_arguments`; and constructor
                arguments that override the files, such as ``model_max_length=128``.

        Raises:
            OSError: there is no such model, it has no vocabulary, or a file is damaged.
            ValueError: an argument asks for something that is not supported, or the files hold
                what no tokenizer can have.
        """
        name = os.fspath(name_or_path)
        where, overrides = split_arguments(arguments)
        overrides = {key: value for key, value in overrides.items() if key not in _HOW_TO_OPEN}
        with _naming(name):
            files = {**cls._settings(name, where), **cls._vocabulary(name, overrides, where)}
        try:
            tokenizer = cls(**{**files, **overrides})
        except (OverflowError, TypeError, ValueError):
            with _naming(name):
                cls(**files)
            raise  # the files are sound: the fault is in the overrides
        tokenizer.name_or_path = name
        return tokenizer

    @classmethod
    def _settings(cls, name: str, where: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the constructor's arguments that the files next to the vocabulary hold."""
        config = _read_json(resolve_file(name, TOKENIZER_CONFIG_FILE, **where))
        # Since Transformers 4.34, the configuration holds all added tokens. Before, two files of
        # their own did.
        if "added_tokens_decoder" in config:
            added = {int(index): token for index, token in config["added_tokens_decoder"].items()}
        else:
            config |= _read_json(resolve_file(name, SPECIAL_TOKENS_MAP_FILE, **where))
            tokens = _read_json(resolve_file(name, ADDED_TOKENS_FILE, **where))
            added = {index: token for token, index in tokens.items()}
        settings = {key: _as_token(config[key]) for key in cls.config_names if key in config}
        if name in cls.max_model_input_sizes and "model_max_length" not in settings:
            settings["model_max_length"] = cls.max_model_input_sizes[name]
        return {
            "added_tokens": {index: _as_token(token) for index, token in added.items()},
            **settings,
        }

    @classmethod
    def _vocabulary(
        cls, name: str, overrides: Mapping[str, Any], where: Mapping[str, Any]
    ) -> dict[str, str]:
        """Returns constructor argument -> vocabulary file; `overrides` may name the files."""
        for files in cls.vocab_files:
            if files.keys() <= overrides.keys():
                return {argument: overrides[argument] for argument in files}
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

    # -- Saving ------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        """Writes the tokenizer into a folder, each file atomically; returns the files' paths.

        Args:
            save_directory: the folder, which is created if it is missing.
            legacy_format: for a fast tokenizer: True writes the files that other tokenizers also
                read, False only ``tokenizer.json``, None both.
            filename_prefix: put this and a dash before the files' names.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = type(self).__name__.removesuffix("Fast")
        contents = {
            TOKENIZER_CONFIG_FILE: self._config() | {"tokenizer_class": name},
            SPECIAL_TOKENS_MAP_FILE: self._special_tokens_to_save(),
        }
        written = []
        for filename, content in contents.items():
            path = prefixed(folder, filename, filename_prefix)
            write_json(path, content, indent=2, sort_keys=True)
            written.append(str(path))
        return (*written, *self._save_tokens(folder, legacy_format, filename_prefix))

    def _config(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.config_names}

    def _special_tokens_to_save(self) -> dict[str, Any]:
        """Returns the special tokens by role; those that absorb spaces as dicts that say so."""

        def saved(token: str | AddedToken) -> str | dict[str, Any]:
            if isinstance(token, str):
                return token
            spaces = token.lstrip or token.rstrip or token.single_word
            return flags_of(token) if spaces else token.content

        return {
            role: [saved(each) for each in token] if role == ADDITIONAL else saved(token)
            for role, token in self.special_tokens_map_extended.items()
        }

    def _save_tokens(
        self, folder: Path, legacy_format: bool | None, prefix: str | None
    ) -> tuple[str, ...]:
        """Writes the vocabulary and the added tokens; returns the files' paths."""
        written = tuple(self.save_vocabulary(folder, prefix))
        added = self.get_added_vocab()
        if added:
            path = prefixed(folder, ADDED_TOKENS_FILE, prefix)
            write_json(path, added, sort_keys=True)
            written += (str(path),)
        return written

    @abstractmethod
    def save_vocabulary(
        self, save_directory: str | os.PathLike, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Writes the vocabulary's files, without added tokens; returns their paths."""


def prefixed(folder: str | os.PathLike, filename: str, prefix: str | None) -> Path:
    """Returns a file's path in a folder, with ``prefix-`` before its name if there is a prefix."""
    return Path(folder, f"{prefix}-{filename}" if prefix else filename)


def write_json(path: Path, content: Any, **format: Any) -> None:
    """Writes a JSON file in UTF-8, atomically; `format` goes to `json.dumps`."""
    atomic_write_text(path, json.dumps(content, ensure_ascii=False, **format) + "\n")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Makes errors that the values in a tokenizer's files cause name the model."""
    try:
        yield
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        why = f"its tokenizer's files are damaged or of different models: {first_line(error)}"
        raise ValueError(f"'{name}': {why}") from error


def _read_json(path: Path | None) -> dict[str, Any]:
    """Reads the settings in a JSON file; {} if there is no file."""
    return {} if path is None else read_json_object(path)


def _as_token(value: Any) -> Any:
    """Converts a dict of a token's text and flags to the token; other values stay as they are."""
    if isinstance(value, list):
        return [_as_token(each) for each in value]
    if not isinstance(value, dict):
        return value
    if not isinstance(value.get("content"), str):
        raise ValueError(f"a token's 'content' must be a text: {as_json(value)}")
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    # A token with flags is a special one unless the files say otherwise.
    return AddedToken(
        value["content"],
        special=value.get("special", True),
        **{name: value[name] for name in flags if name in value},
    )
