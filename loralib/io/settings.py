"""Checks the types and ranges of settings from files against a function's annotations.

    @checked
    def __init__(self, heads: Count = 12, dropout: Share = 0.1, task: str | None = None): ...

A call with ``heads="12"`` then raises a one-line error. `check_settings` does the same for a file's
content. Annotations can be bool, int, float, str, lists as ``Iterable`` or ``list``, maps as
``dict``, unions of these, and numbers with a `Range`. Common ranges have names, which are defined
below.
"""

import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any

from ..text import as_json


@dataclass(frozen=True)
class Range:
    """The range of a number's valid values.

    Args:
        low, high: the least and the greatest valid value.
        rule: the range in words that continue "must", such as "lie in [0, 1]".
    """

    low: float
    high: float
    rule: str


_SMALLEST = math.ulp(0.0)
Count = Annotated[int, Range(1, math.inf, "be a positive integer")]
Index = Annotated[int, Range(0, math.inf, "be an integer from 0 on")]
Share = Annotated[float, Range(0, 1, "lie in [0, 1]")]
ShareBelowOne = Annotated[float, Range(0, math.nextafter(1, 0), "lie in [0, 1)")]
Positive = Annotated[float, Range(_SMALLEST, math.inf, "be a positive number")]
NotNegative = Annotated[float, Range(0, math.inf, "be a number from 0 on")]

_RULES = {
    bool: "be true or false",
    int: "be an integer",
    float: "be a number",
    str: "be a string",
    type(None): "be null",
}
# The plurals, for the items of a list.
_ITEMS = {
    int: "integers",
    float: "numbers",
    str: "strings",
    str | int: "strings or integers",
    list[int]: "lists of integers",
}


def checked(function: Callable) -> Callable:
    """Makes a function refuse arguments that do not fit its annotations.

    Raises:
        ValueError: when the function is called, see `check_settings`.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_settings(function, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return call


def check_settings(
    function: Callable, values: Mapping[str, Any], source: object | None = None
) -> None:
    """Checks settings by name against the annotations of a function that takes them.

    Args:
        function: the function, or a dataclass. Its parameters' annotations say what is valid.
        values: the settings. Those that are not parameters are ignored.
        source: the file that the settings are from, for the message.

    Raises:
        ValueError: a setting has another type or is out of range. The message names the file, the
            setting, its value and what it must be.
    """
    for name, hint in _hints(inspect.unwrap(function)).items():
        if name in values and not _fits(values[name], hint):
            where = "" if source is None else f"{source}: "
            found = as_json(values[name])
            raise ValueError(f"{where}{name} must {_rule(hint)}, not {found}")


@functools.cache
def _hints(function: Callable) -> dict[str, Any]:
    """Returns the annotations of a function's parameters, without ``*args`` and ``**kwargs``."""
    hints = typing.get_type_hints(function, include_extras=True)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind in named and p.name in hints}


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        kind, allowed = arguments
        return _fits(value, kind) and allowed.low <= value <= allowed.high
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is dict:
        return isinstance(value, Mapping) and all(
            _fits(_key(key, arguments[0]), arguments[0]) and _fits(item, arguments[1])
            for key, item in value.items()
        )
    if origin in (Iterable, list):
        return _is_list(value) and all(_fits(item, arguments[0]) for item in _items(value))
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is float:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return is_number and abs(value) <= sys.float_info.max  # an integer may be larger
    return isinstance(value, hint)


def _key(key: Any, kind: Any) -> Any:
    """Converts a map's key to an int if it should be one. In JSON all keys are strings."""
    if kind is int and isinstance(key, str) and key.isdecimal():
        return int(key)
    return key


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _items(value: Iterable) -> Iterable:
    """Returns the items of a list, or none for an iterator, which could be read only once."""
    return value if isinstance(value, Sequence | Set) else ()


def _rule(hint: Any) -> str:
    """Returns words that continue "must" and say what a value must be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return arguments[1].rule
    if origin in (typing.Union, types.UnionType):
        first, *others = map(_rule, arguments)
        return " or ".join([first, *(rule.removeprefix("be ") for rule in others)])
    if origin is dict:
        return f"be a map of {_ITEMS[arguments[1]]} by {_ITEMS[arguments[0]].removesuffix('s')}"
    if origin in (Iterable, list):
        return f"be a list of {_ITEMS[arguments[0]]}"
    return _RULES[hint]
