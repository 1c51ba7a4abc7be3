"""Reads and writes files of one JSON object, or one text, per line."""

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from loralib.io.atomic import atomic_write
from loralib.io.encoding import utf8_content


def read_json_lines(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of one JSON object per line; ignores blank lines at its end.

    A line is parsed, and its error raised, when its object is requested. If all objects were held
    at once, Python's garbage collector would scan them repeatedly, which takes longer than parsing.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object, or the file has none; the message names file and
            line.
    """
    number = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            raise ValueError(f"{path}:{number}: is empty, with more lines after it")
        try:
            row = json.loads(line)
        except ValueError as error:  # a JSONDecodeError, or a number of thousands of digits
            raise ValueError(f"{path}:{number}: not JSON ({error})") from error
        except RecursionError as error:
            raise ValueError(f"{path}:{number}: is nested too deep") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not a JSON object: {line[:60]}")
        yield row
    if not number:
        raise ValueError(f"{path}: is empty")


def read_lines(path: str | os.PathLike) -> list[str]:
    """Reads the lines of a text file, without blank ones at its end; one blank line if empty.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not UTF-8; the message names file and line.
    """
    return list(_lines(path)) or [""]


def _lines(path: str | os.PathLike) -> Iterator[str]:
    content = utf8_content(path).rstrip()
    for number, line in enumerate(content.split(b"\n") if content else (), start=1):
        try:
            yield line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            where = f"{path}:{number}"
            reason = f"{error.reason} at byte {error.start}"
            raise ValueError(f"{where}: not UTF-8 ({reason})") from error


def write_json_lines(path: str | os.PathLike, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line, atomically; makes the file's folder if needed."""
    write_lines(path, map(json.dumps, rows))


def write_lines(path: str | os.PathLike, lines: Iterable[str]) -> None:
    """Writes one text per line, atomically; makes the file's folder if needed."""
    os.makedirs(os.path.dirname(os.path.realpath(path)), exist_ok=True)
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
