"""Reads encoded files: one row of token ids per line, {"context": [ids], "completion": [ids]}."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from json_lines import read_json_lines

END_OF_TEXT_ID = 50256
"""The one special token, first and last of a text. Its id is fixed, whatever the vocabulary."""


def read_encoded(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Reads the rows of a file of token ids, as `read_json_lines` does.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: the path is a folder.
        ValueError: as for `read_json_lines`, or the first row holds texts. If the first line holds
            texts or is not JSON, the message says which script makes token ids of texts.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: is a folder; give a file of it, such as train.jsonl")
    rows = read_json_lines(path)
    try:
        first = next(rows)
    except ValueError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):  # not a corpus either
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
    """Returns one list of token ids of a row.

    Args:
        row: a row of an encoded file.
        field: the name of the list.
        where: file and line, for errors.

    Raises:
        ValueError: the row does not have the field, or it is not a list of integers.
    """
    if field not in row:
        raise ValueError(f'{where}: has no "{field}"')
    ids = row[field]
    # Types are compared because True and 1.0 equal numbers in Python, but are not token ids.
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:
        raise ValueError(f'{where}: "{field}" has to be a list of token ids')
    return ids


def check_in_vocabulary(ids: Iterable[int], vocab_size: int, where: str) -> None:
    """Checks that ids are at least 0 and below the vocabulary's size.

    Args:
        ids: the token ids.
        vocab_size: the vocabulary's size.
        where: file and line, for errors.

    Raises:
        ValueError: one is not.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where}: has token {token}, outside the vocabulary of {vocab_size}")


def context_digest(ids: Sequence[int]) -> str:
    """Returns a digest of a context: the first 16 hexadecimal digits of the SHA-256 of its ids.

    End-of-text tokens at its end, which --add_bos adds, are ignored.
    """
    length = len(ids)
    while length and ids[length - 1] == END_OF_TEXT_ID:
        length -= 1
    return hashlib.sha256(" ".join(map(str, ids[:length])).encode()).hexdigest()[:16]
