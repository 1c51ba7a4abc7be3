"""Formats names and values for messages: on one line, and short."""

import json
import re
from collections.abc import Iterable


def listed(names: Iterable[str], at_most: int = 4) -> str:
    """Returns names for an error: the first ones in order, and "…" if there are more."""
    ordered = sorted(names)
    return ", ".join(ordered[:at_most]) + (", …" if len(ordered) > at_most else "")


def module_label(module: str) -> str:
    """Returns a module's name for an error: "module 0.1" if it has only numbers (nn.Sequential)."""
    return f"module {module}" if re.fullmatch(r"[\d.]+", module) else module


def in_short(names: Iterable[str], at_most: int = 10, width: int = 200, quote: str = "") -> str:
    """Returns names for a message: the first ones, and how many more there are.

    Each is put on one line, and cut if it is long: a data set's class names may be whole texts.

    Args:
        names: the names.
        at_most: how many of them to show.
        width: how many characters these may have together; the first name is always shown.
        quote: the quotation mark to put around each.
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
    """Returns what `in_short` does, with each name in quotes, so that blanks in it are visible."""
    return in_short(names, quote="'")


def shown(value: object) -> str:
    """Returns a value for an error, on one short line."""
    return _cut(" ".join(repr(value).split()))


def as_json(value: object) -> str:
    """Returns a value for an error, as JSON on one short line."""
    return _cut(json.dumps(value, ensure_ascii=False, default=repr))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's class if it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """Returns text like "1 step", "1,000 steps" and "2.5 epochs"."""
    figure = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{figure} {noun if number == 1 else plural or f'{noun}s'}"
