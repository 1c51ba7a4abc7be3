"""Checks the arguments of public functions. Every error is one line that names the argument."""

import functools
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from .errors import CheckpointError
from .text import in_short, shown

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Range(NamedTuple):
    """A range of numbers: its description for errors, its smallest and its largest number."""

    what: str
    within: tuple[float, float]


_LARGEST = sys.float_info.max
FINITE = Range("a finite number", (-_LARGEST, _LARGEST))
AT_LEAST_0 = Range("a number of at least 0", (0, _LARGEST))
ABOVE_0 = Range("a number above 0", (math.ulp(0.0), _LARGEST))
_PROBABILITY = Range("a probability between 0 and 1", (0, 1))


def as_python(value: Any) -> Any:
    """Converts a NumPy or PyTorch number to a Python number, which files can hold.

    Other values are returned unchanged, and so are tensors on the meta device, which have no value.
    """
    if getattr(value, "ndim", None) == 0 and not getattr(value, "is_meta", False):
        value = value.item()
    if isinstance(value, bool | int | float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def as_number(
    name: str, value: object, what: str, within: tuple[float, float] | None = None
) -> float:
    """Checks that a value is a number, and returns it as a Python number.

    Args:
        name: the argument's name.
        value: what the caller gave.
        what: what the value has to be, in words.
        within: the smallest and the largest allowed number; None allows any number.

    Raises:
        ValueError: it is not a number, or out of range.
    """
    number = as_python(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or (within is not None and not within[0] <= number <= within[1]):
        raise ValueError(f"{name} has to be {what}, got {shown(value)}")
    return number


def as_dropout(value: object) -> float:
    """Returns the probability of dropout on an update's input. False means no dropout.

    Raises:
        ValueError: it is not a probability.
    """
    p = as_python(value)
    return 0.0 if p is False else as_number("lora_dropout", p, *_PROBABILITY)


def as_flag(name: str, value: object) -> bool:
    """Returns True or False, which may be given as 1 or 0. None is False.

    Raises:
        ValueError: it is something else, such as a string, which would count as True.
    """
    flag = as_python(value)
    if flag is not None and not (isinstance(flag, bool | int | float) and flag in (0, 1)):
        raise ValueError(f"{name} has to be True or False, got {shown(value)}")
    return bool(flag)


def as_flags(name: str, values: object) -> tuple[bool, ...]:
    """Returns a list of flags as a tuple.

    Raises:
        ValueError: it is not a list of flags.
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
    """Returns a list of names as a tuple.

    Args:
        name: the argument's name.
        values: what the caller gave.
        what: what the values have to be, in words.

    Raises:
        ValueError: it is something else, such as a single name.
    """
    several = _in_order(values)
    if several is None or not all(isinstance(value, str) for value in several):
        raise ValueError(f"{name} has to be {what}, got {shown(values)}")
    return several


def as_text(name: str, value: object, example: str) -> str | None:
    """Returns a string, or a path as a string. None and an empty string give None.

    Args:
        name: the argument's name.
        value: what the caller gave.
        example: an example of a valid value, for the error.

    Raises:
        ValueError: it is neither a string, a path nor None.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str | None):
        raise ValueError(f"{name} has to be a name, such as '{example}', got {shown(value)}")
    return text or None


def _in_order(values: object) -> tuple[Any, ...] | None:
    """Returns several values as a tuple; None for a single value, a mapping or a set (no order)."""
    if isinstance(values, str | Mapping | set | frozenset) or not isinstance(values, Iterable):
        return None
    return None if getattr(values, "ndim", 1) == 0 else tuple(values)


def refusing_keywords(
    words: Mapping[str, str],
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Makes a function refuse the keywords of other libraries, and name its own in the error.

    Args:
        words: what other libraries call an argument -> what to give instead.

    Raises:
        TypeError: a call has such a keyword. (Python raises it for any unknown keyword.)
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
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

    return decorate


def check_model(model: object, second: object = None) -> None:
    """Checks that a model is a `torch.nn.Module`.

    Args:
        model: what the caller gave as the model.
        second: the next argument. If that is the model, the error says that the model comes first.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(model, nn.Module):
        return
    kind = type(model).__name__
    if isinstance(second, nn.Module):
        raise TypeError(f"the model comes first, got a {kind} and then a {type(second).__name__}")
    raise TypeError(f"the model has to be a torch.nn.Module, got a {kind}")


def check_not_scripted(model: nn.Module) -> None:
    """Checks that a model is not one of TorchScript's, whose modules cannot be replaced or hooked.

    Raises:
        ValueError: it is.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"the model is scripted or traced ({type(model).__name__}): give the model that it was "
            "made from"
        )


def as_path(name: str, path: object) -> Path:
    """Returns the name of a file or folder as a path. A leading ``~`` is the home folder.

    Raises:
        TypeError: it is neither a string nor a path.
        CheckpointError: it is empty.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} has to be a path, got {shown(path)}")
    if not os.fspath(path):
        raise CheckpointError(f"{name} is empty: give a path")
    return Path(os.path.expanduser(path))
