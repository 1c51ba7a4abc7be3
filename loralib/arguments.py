"""Checks of what public functions are given: an error is one line that names the argument."""

import functools
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import nn

from .errors import CheckpointError
from .text import in_short, shown

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Range(NamedTuple):
    """Numbers of some kind: in words, and the smallest and the largest of them."""

    what: str
    within: tuple[float, float]


_LARGEST = sys.float_info.max
FINITE = Range("a finite number", (-_LARGEST, _LARGEST))
AT_LEAST_0 = Range("a number of at least 0", (0, _LARGEST))
ABOVE_0 = Range("a number above 0", (math.ulp(0.0), _LARGEST))
_PROBABILITY = Range("a probability between 0 and 1", (0, 1))


def as_python(value: Any) -> Any:
    """A number of NumPy's or PyTorch's as one of Python's, which files can hold.

    The rest stays as it is, also what has no value, on the meta device.
    """
    if getattr(value, "ndim", None) == 0 and not getattr(value, "is_meta", False):
        value = value.item()
    if isinstance(value, bool | int | float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def as_number(
    name: str,
    value: object,
    what: str = "a number",
    within: tuple[float, float] | None = None,
) -> float:
    """A number, one of Python's.

    Args:
        name: of the argument.
        value: what somebody gave.
        what: it has to be, in words.
        within: the smallest and the largest of these, where it is not any number.

    Raises:
        ValueError: it is something else, or lies outside.
    """
    number = as_python(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or (within is not None and not within[0] <= number <= within[1]):
        raise ValueError(f"{name} has to be {what}, got {shown(value)}")
    return number


def as_dropout(value: object) -> float:
    """The probability of dropout on an update's input; False is none.

    Raises:
        ValueError: it is not a probability.
    """
    p = as_python(value)
    return 0.0 if p is False else as_number("lora_dropout", p, *_PROBABILITY)


def as_flag(name: str, value: object) -> bool:
    """True or False, which may be given as 1 or 0; None is False.

    Raises:
        ValueError: it is something else, such as a text, which would count as True.
    """
    flag = as_python(value)
    if flag is not None and not (isinstance(flag, bool | int | float) and flag in (0, 1)):
        raise ValueError(f"{name} has to be True or False, got {shown(value)}")
    return bool(flag)


def as_flags(name: str, values: object) -> tuple[bool, ...]:
    """A list of flags as a tuple.

    Raises:
        ValueError: it is something else.
    """
    several = _in_order(values)
    if several is None:
        raise ValueError(
            f"{name} has to be a list such as [True, False, True], got {shown(values)}"
        )
    return tuple(as_flag(f"each of {name}", value) for value in several)


def as_names(
    name: str, values: object, what: str = "a list of names such as ['no', 'yes']"
) -> tuple[str, ...]:
    """A list of names as a tuple.

    Args:
        name: of the argument.
        values: what somebody gave.
        what: it has to be, in words.

    Raises:
        ValueError: it is something else, such as one name.
    """
    several = _in_order(values)
    if several is None or not all(isinstance(value, str) for value in several):
        raise ValueError(f"{name} has to be {what}, got {shown(values)}")
    return several


def as_text(name: str, value: object, example: str) -> str | None:
    """A text, or a path as one; None for none, and for an empty one.

    Args:
        name: of the argument.
        value: what somebody gave.
        example: of what it has to be, for the error.

    Raises:
        ValueError: it is something else.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str | None):
        raise ValueError(f"{name} has to be a name, such as '{example}', got {shown(value)}")
    return text or None


def _in_order(values: object) -> tuple[Any, ...] | None:
    """Several values as a tuple; None of one alone, of a mapping, and of a set, without order."""
    if isinstance(values, str | Mapping | set | frozenset) or not isinstance(values, Iterable):
        return None
    return None if getattr(values, "ndim", 1) == 0 else tuple(values)


def answering(
    words: Mapping[str, str],
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Makes a function answer a keyword that it has under another name with that name.

    Args:
        words: what others call an argument -> what to give instead.

    Raises:
        TypeError: on a call with such a keyword, as with any that the function does not have.
    """

    def of(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            theirs = [name for name in kwargs if name in words]
            if theirs:
                ours = dict.fromkeys(words[name] for name in theirs)
                raise TypeError(
                    f"{function.__name__} has no {in_short(theirs, at_most=4)}: give "
                    f"{', '.join(ours)}"
                )
            return function(*args, **kwargs)

        return call

    return of


def check_model(model: object, second: object = None) -> None:
    """Checks that a model is one.

    Args:
        model: what somebody gave for it.
        second: the argument after it, which may have been given in its place.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(model, nn.Module):
        return
    kind = type(model).__name__
    if isinstance(second, nn.Module):
        raise TypeError(f"the model comes first, got a {kind} and then a {type(second).__name__}")
    raise TypeError(f"the model has to be a torch.nn.Module, got a {kind}")


def as_path(name: str, path: object) -> Path:
    """A file's or folder's name as a path, in which a leading ``~`` is the home folder.

    Raises:
        TypeError: it is something else.
        CheckpointError: it is empty.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} has to be a path, got {shown(path)}")
    if not os.fspath(path):
        raise CheckpointError(f"{name} is empty: give a path")
    return Path(os.path.expanduser(path))
