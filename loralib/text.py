"""Names and values as messages quote them: in one line, and short."""

import json
import re
from collections.abc import Iterable


def listed(names: Iterable[str], at_most: int = 4) -> str:
    """Names for an error: the first ones, in order, and whether there are more."""
    ordered = sorted(names)
    return ", ".join(ordered[:at_most]) + (", …" if len(ordered) > at_most else "")


def called(module: str) -> str:
    """A module's name for an error; one of numbers alone, as in nn.Sequential, says what it is."""
    return f"module {module}" if re.fullmatch(r"[\d.]+", module) else module


def in_short(names: Iterable[str], at_most: int = 10, width: int = 200, quote: str = "") -> str:
    """Names for a message, such as a data set's classes: the first ones, and how many more.

    Each is in one line, and cut where it is long, as a text is that stands in a name's place.

    Args:
        names: the names.
        at_most: how many of them.
        width: how many characters these may have together; the first is there in any case.
        quote: what each is put in.
    """
    names, begin, size = list(names), [], 0
    for name in names[:at_most]:
        name = " ".join(name[:120].splitlines())
        begin.append(quote + _cut(name) + quote)
        size += len(begin[-1]) + 2
        if size > width and len(begin) > 1:
            begin.pop()
            break
    more = len(names) - len(begin)
    return ", ".join(begin) + (f" … and {more:,} more" if more else "")


def quoted(names: Iterable[str]) -> str:
    """Names for an error, as `in_short`, each in quotes: blanks in them are seen."""
    return in_short(names, quote="'")


def shown(value: object) -> str:
    """A value for an error: in one short line."""
    return _cut(" ".join(repr(value).split()))


def as_json(value: object) -> str:
    """Likewise, as a JSON file has it."""
    return _cut(json.dumps(value, ensure_ascii=False, default=repr))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
