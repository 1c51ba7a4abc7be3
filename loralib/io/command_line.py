"""The command lines of all scripts."""

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any, NoReturn

from .elastic_error import tell_launcher

_SIMILAR, _MISSPELLED = 0.75, 0.9  # of two names' letters, by difflib
_RANK = {"r": "rank", "dim": "rank"}  # what LoRA's rank is called in flags: --lora_r, --lora_dim
_AT_MOST = 4  # flags that an unknown one may have meant
_LARGEST = 2**62  # of whole numbers: PyTorch's end at 2**63, and what is near is a typing mistake
# A number below zero as `float` reads it, be it in scientific notation.
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|-inf(inity)?$", re.IGNORECASE)
_EMPTY = "the value is empty (an unset shell variable?): give one, or leave it out"


class ArgumentParser(argparse.ArgumentParser):
    """A parser of whole flags, whose errors are one line, and whose numbers may be below zero.

    An abbreviation of one script's flag may be another script's flag of another meaning, and all
    flags' usage would bury an error. argparse itself takes ``-1e-5`` for a flag.

    Args:
        takes_empty: whether an empty text is a value, rather than an error.
        arguments: those of `argparse.ArgumentParser`.

    Attributes:
        given: names of the flags that were given a value, be it their default's.
    """

    def __init__(self, *, takes_empty: bool = False, **arguments: Any):
        arguments.setdefault("allow_abbrev", False)
        super().__init__(**arguments)
        self._takes_empty = takes_empty
        self.given: set[str] = set()
        self._negative_number_matcher = _NEGATIVE  # argparse has no public name for it

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """A flag's value from its text; argparse has no public method for it.

        Shells leave the ~ of ``--output_dir=~/run`` as it is, and files of settings do too. An
        empty value would be read as a flag that is not given, or as the current folder.
        """
        if not (arg_string or self._takes_empty or action.default == ""):
            raise argparse.ArgumentError(action, _EMPTY)
        if arg_string is not action.default:  # argparse has defaults that are texts read, too
            self.given.add(action.dest)
        if arg_string == "~" or arg_string.startswith(("~/", f"~{os.sep}")):
            arg_string = os.path.expanduser(arg_string)
        return super()._get_value(action, arg_string)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parses the flags, as `argparse.ArgumentParser` does."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return found

    def refuse(self, unknown: Sequence[str], way_out: str = "") -> NoReturn:
        """Ends the program for arguments that are not known, with the flags they may have meant.

        Args:
            unknown: the arguments.
            way_out: what else they may need; the end of the message.
        """
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        known = list({"_".join(_words(flag)): flag for flag in reversed(flags)}.values())
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        near = dict.fromkeys(flag for name in names for flag in _meant_by(name, known))
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}{way_out}")

    def error(self, message: str) -> NoReturn:
        """Ends the program with `message`, in one line."""
        line = f"{self.prog}: error: {message} (--help lists the flags)"
        tell_launcher(line)
        self.exit(2, f"{line}\n")


def _meant_by(unknown: str, flags: Sequence[str]) -> list[str]:
    """The flags that an unknown one may have meant: those that the first rule finds that finds any.

    It is one's initials (--lr), is misspelled by a letter or two, begins one or begins with one
    (--output), has the words of some (--batch_size), is similar, or has the first word
    (--target_modules).
    """
    name = _words(unknown)
    words = {flag: _words(flag) for flag in flags}
    spelled = "_".join(name)
    alike = {f: SequenceMatcher(None, spelled, "_".join(words[f])).ratio() for f in flags}
    nearest = sorted(flags, key=alike.__getitem__, reverse=True)
    rules: tuple[Callable[[str], bool], ...] = (
        lambda flag: name in (words[flag], ["".join(word[:1] for word in words[flag])]),
        lambda flag: alike[flag] == max(alike.values()) >= _MISSPELLED,
        lambda flag: _begins(spelled, "_".join(words[flag]), least=3),
        lambda flag: all(_has(words[flag], word) for word in name),
        lambda flag: alike[flag] == max(alike.values()) >= _SIMILAR,
        lambda flag: _has(words[flag], name[0]),
    )
    found = ([flag for flag in nearest if is_meant(flag)] for is_meant in rules)
    return next(filter(None, found), [])[:_AT_MOST]


def _words(flag: str) -> list[str]:
    words = flag.strip("-_").replace("-", "_").split("_")
    return [_RANK.get(word, word) for word in words]


def _has(words: Sequence[str], word: str) -> bool:
    return any(_begins(word, other) for other in words)


def _begins(one: str, other: str, least: int = 2) -> bool:
    """Returns whether one of two names, of so many letters at least, begins the other."""
    short, long = sorted((one, other), key=len)
    return len(short) >= least and long.startswith(short)


def check_bounds(
    name: str,
    value: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Checks that a flag's number is within its bounds.

    Args:
        name: the flag, or the setting.
        value: its number; None, of a flag that is not given, is within any bounds.
        least, above: the lower bound, included or not.
        most, below: the upper bound likewise; `below` infinity asks for a finite number.

    Raises:
        ValueError: it is outside, not a number, or a whole one beyond PyTorch's.
    """
    if value is None:
        return
    is_within = (least is None or least <= value) and (above is None or above < value)
    is_within = is_within and (most is None or value <= most) and (below is None or value < below)
    is_too_large = isinstance(value, int) and value > _LARGEST
    if is_within and not is_too_large:
        return
    bounds = f"be above {above}" if least is None else f"be at least {least}"
    if most is not None or below not in (None, math.inf):
        begin = f"({above}" if least is None else f"[{least}"
        end = f"{below})" if most is None else f"{most}]"
        bounds = f"lie in {begin}, {end}"
    elif is_too_large:
        bounds = f"be at most {_LARGEST}"
    elif value == math.inf:
        bounds = "be finite"
    raise ValueError(f"{name} must {bounds}, not {value}")
