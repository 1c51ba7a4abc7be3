"""Encoded files: a row of token ids a line, {"context": [ids], "completion": [ids]}."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from json_lines import read_json_lines


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
            "gpt2_encode.py make them of a corpus"
        ) from error
    if any(isinstance(first.get(field), str) for field in ("context", "completion")):
        raise ValueError(f"{path}:1: holds texts, not token ids: gpt2_encode.py makes these of it")
    yield first
    yield from rows


def context_digest(ids: Sequence[int], end: int) -> str:
    """What tells a context from others: 16 hexadecimal digits of the SHA-256 of its ids.

    Args:
        ids: the context's.
        end: the token that --add_bos puts after it, which does not count.
    """
    length = len(ids)
    while length and ids[length - 1] == end:
        length -= 1
    return hashlib.sha256(" ".join(map(str, ids[:length])).encode()).hexdigest()[:16]
