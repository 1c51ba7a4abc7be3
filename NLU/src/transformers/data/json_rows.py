"""Reads the rows of a JSON file: one object per line, objects over several lines, or lists of them.

If the library that reads tables cannot read a file, it says little more than that. `find_fault`
finds the line.
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from loralib.text import in_short

_SPACES = re.compile(r"\s*")
# Python's types -> what JSON calls them.
KINDS: dict[type, str] = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
# Half of a JSON escape such as \ud83d\ude00, whose two halves stand for one character.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def json_rows(path: str) -> list[dict[str, Any]]:
    """Reads the objects in a JSON file, in lists or one after another; [] if it holds others."""
    with open(path, encoding="utf-8-sig") as file:
        found = list(_values(file.read(), json.JSONDecoder()))
    return found if all(isinstance(row, dict) for row in found) else []


def _values(text: str, decoder: json.JSONDecoder) -> Iterator[Any]:
    """Yields the values in a JSON text, and instead of a list the values in it."""
    place = _SPACES.match(text).end()
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        yield from value if isinstance(value, list) else [value]
        place = _SPACES.match(text, place).end()


def begins_with_rows(path: str) -> bool:
    """Returns whether a file starts like an object or a list, or with nothing but blanks.

    The library must not get other files: ``null`` kills the process by a segmentation fault.
    """
    with open(path, "rb") as file:
        begin = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    return begin[:1] in (b"", b"{", b"[")


def find_fault(path: str, in_pieces: bool) -> None:
    """Looks for the line or row that kept the library from reading a JSON file.

    Args:
        path: the file.
        in_pieces: the library has read it piece by piece.

    Raises:
        ValueError: a line or row is not UTF-8, not JSON, not an object, nested too deep, or has
            half a character or a key twice; or, in a file of several pieces, a column starts there,
            or changes its type, such as from text to number.
    """
    firsts: dict[str, tuple[str, Any]] = {}  # key -> the place of its first value, and that value
    mixed: set[str] = set()
    change = ""
    for place, row in _placed_rows(path):
        if not isinstance(row, dict):
            shown = json.dumps(row, ensure_ascii=False)
            raise ValueError(f"{path}: {place}: is not a JSON object ({shown:.40})")
        is_first = not firsts
        for name, value in row.items():
            if value is None or name in mixed:
                continue
            if name not in firsts:
                firsts[name] = (place, value)
                if not is_first:
                    change = (
                        f"{place}: is the first row with a value for '{name}': give one to all "
                        "rows, or to none"
                    )
            elif not _are_alike(value, firsts[name][1]):
                mixed.add(name)
                change = f"{place}: {difference_in_kind(name, value, *firsts[name])}"
    # Within its first piece, the library accepts a change, so the last one is what it refused.
    if change and in_pieces:
        raise ValueError(f"{path}: {change}")


def _are_alike(value: Any, first: Any) -> bool:
    """Returns whether a value fits the type that a column has by its first value."""
    if isinstance(value, float) and type(first) is int:
        return value.is_integer()
    return KINDS[type(value)] == KINDS[type(first)]


def difference_in_kind(name: str, value: Any, first_place: str, first: Any) -> str:
    """Says how two values of a column differ in type, and what to do about it."""
    shown, other = (json.dumps(each, ensure_ascii=False) for each in (value, first))
    if KINDS[type(value)] == KINDS[type(first)]:
        return (
            f"its {name} is {shown}, but that of {first_place} is {other}: write all of them with "
            "a decimal point"
        )
    return (
        f"its {name} is {KINDS[type(value)]} ({shown:.40}), but that of {first_place} is "
        f"{KINDS[type(first)]} ({other:.40}): write all of them alike"
    )


def _placed_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yields each value in a JSON file with its place: "line 7", or "row 7" if rows are not lines.

    Raises:
        ValueError: a value cannot be read.
    """
    # Bytes that are not UTF-8 become surrogates, which text in UTF-8 does not have.
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        begin = list(islice(lines, 2))
        if not _has_long_values([line.strip() for _, line in begin]):
            for number, line in chain(begin, lines):
                yield f"line {number}", _line_value(line, f"{path}: line {number}")
            return
        file.seek(0)
        text = file.read()
    yield from _placed_values(text, path)


def _has_long_values(begin: Sequence[str]) -> bool:
    """Returns whether, by its first two lines, a file's values span lines or are lists of rows."""
    if not begin or begin[0].startswith("["):
        return True
    try:
        json.loads(begin[0])
        return False
    except (ValueError, RecursionError) as error:
        if getattr(error, "pos", -1) < len(begin[0]):  # it is wrong, not unfinished
            return False
    try:
        return len(begin) > 1 and not isinstance(json.loads(begin[1]), dict)
    except (ValueError, RecursionError):
        return True


def _line_value(line: str, place: str) -> Any:
    """Reads the value in a line.

    Raises:
        ValueError: it cannot be read.
    """
    _check_utf8(line, place)
    try:
        value = json.loads(line, object_pairs_hook=without_repetition)
    except json.JSONDecodeError as error:  # its own message counts lines within this one
        raise ValueError(f"{place}: is not JSON ({error.msg})") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{place}: is nested too deep") from error
    if _SURROGATE.search(line):
        _check_characters(value, place)
    return value


def _placed_values(text: str, path: str) -> Iterator[tuple[str, Any]]:
    """Does what `_placed_rows` does, for the text of a file whose lines are not rows."""
    for number, line in enumerate(text.split("\n"), start=1):
        _check_utf8(line, f"{path}: line {number}")
    decoder = json.JSONDecoder(object_pairs_hook=without_repetition)
    has_surrogates = _SURROGATE.search(text) is not None
    try:
        for row, value in enumerate(_values(text, decoder), start=1):
            if has_surrogates:
                _check_characters(value, f"{path}: row {row}")
            yield f"row {row}", value
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: is not JSON ({error.msg})") from error
    except RepeatedKeyError as error:
        raise ValueError(f"{path}: an object {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: a row is nested too deep") from error


def _check_utf8(line: str, place: str) -> None:
    if not line.isascii() and _has_surrogates(line):
        raise ValueError(f"{place}: is not UTF-8 text; save it as UTF-8")


def _check_characters(value: Any, place: str) -> None:
    if _has_surrogates(json.dumps(value, ensure_ascii=False)):
        raise ValueError(
            f"{place}: has half of a surrogate pair: \\ud800 to \\udfff are valid only in pairs"
        )


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


class RepeatedKeyError(ValueError):
    """Raised for a JSON object that has a key twice: Python's json would keep only the last."""


def without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of these keys and values, for json's ``object_pairs_hook``.

    Raises:
        RepeatedKeyError: a key occurs twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(
            f"has the key '{name:.60}' {names.count(name)} times, and only one would be read: "
            f"{in_short(json.dumps(v, ensure_ascii=False) for n, v in pairs if n == name)}"
        )
    return found
