"""Encoded files: a row of token ids a line, {"context": [ids], "completion": [ids]}."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from json_lines import read_json_lines

END_OF_TEXT_ID = 50256
"""The one special token, first and last of a text. Its id is fixed, whatever the vocabulary."""


def read_encoded(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The rows of a file of token ids, read as by `read_json_lines`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: likewise; where the first line is a text's, or no JSON, the message says what
            makes token ids of texts.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: is a folder; give a file of it, such as train.jsonl")
    rows = read_json_lines(path)
    try:
        first = next(rows)
    except ValueError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):  # no corpus is like that either
            raise
        raise ValueError(
            f"{error}; token ids are needed: format_converting_e2e.py (_webnlg, _dart) and then "
            "gpt2_encode.py make them from a corpus"
        ) from error
    if any(isinstance(first.get(field), str) for field in ("context", "completion")):
        raise ValueError(
            f"{path}:1: holds texts, not token ids: gpt2_encode.py makes these from it"
        )
    yield first
    yield from rows


def token_ids(row: dict[str, Any], field: str, where: str) -> list[int]:
    """A row's token ids.

    Args:
        row: of an encoded file.
        field: which of its lists.
        where: file and line, for errors.

    Raises:
        ValueError: there are none, or they are something else.
    """
    if field not in row:
        raise ValueError(f'{where}: has no "{field}"')
    ids = row[field]
    # Types are compared because True and 1.0 equal numbers in Python, but are not token ids.
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:
        raise ValueError(f'{where}: "{field}" has to be a list of token ids')
    return ids


def check_in_vocabulary(ids: Iterable[int], vocab_size: int, where: str) -> None:
    """Checks that ids are at least 0 and below the vocabulary's size; `where` is for the error.

    Raises:
        ValueError: one is not.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where}: has token {token}, outside the vocabulary of {vocab_size}")


def context_digest(ids: Sequence[int]) -> str:
    """What tells a context from others: 16 hexadecimal digits of the SHA-256 of its ids.

    The ends of texts that --add_bos puts after it do not count.
    """
    length = len(ids)
    while length and ids[length - 1] == END_OF_TEXT_ID:
        length -= 1
    return hashlib.sha256(" ".join(map(str, ids[:length])).encode()).hexdigest()[:16]
