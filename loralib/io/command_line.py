"""Parses the command lines of all scripts."""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NoReturn, TypeVar

from .elastic_error import tell_launcher

_Value = TypeVar("_Value")

_SIMILAR, _MISSPELLED = 0.75, 0.9  # least similarity of two names, by difflib
_RANK = {"r": "rank", "dim": "rank"}  # words for LoRA's rank in flags: --lora_r, --lora_dim
_AT_MOST = 4  # suggested flags for an unknown one
_LARGEST = 2**62  # largest valid integer: PyTorch's end at 2**63, and one near that is a typo
# A negative number as `float` reads it, including scientific notation.
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|-inf(inity)?$", re.IGNORECASE)
_HOMELESS = "~: the user's home folder is unknown: set HOME, or give the whole path"
_EMPTY = "the value is empty (an unset shell variable?): give one, or leave it out"


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that help texts do not state, and keeps the lines of long descriptions.

    argparse has no public methods for either.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_switch = action.nargs == 0
        if is_switch or action.default in (None, "") or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class ArgumentParser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated flags, has one-line errors, and takes negative numbers.

    Abbreviations are off because one script's abbreviation may be another script's flag with
    another meaning. Errors leave out the usage of all flags, which would bury the message. argparse
    itself would take a value such as ``-1e-5`` for a flag.

    Args:
        takes_empty: whether an empty string is a value rather than an error.
        other_names: flags of other programs, without dashes at their beginning, and what is meant
            by them here: a flag of this program, or a sentence. Errors say it.
        arguments: those of `argparse.ArgumentParser`.

    Attributes:
        given: names of the flags that were given a value, even if it equals the default.
    """

    def __init__(
        self,
        *,
        takes_empty: bool = False,
        other_names: Mapping[str, str] | None = None,
        **arguments: Any,
    ):
        arguments.setdefault("allow_abbrev", False)
        arguments.setdefault("formatter_class", HelpFormatter)
        super().__init__(**arguments)
        self._takes_empty = takes_empty
        self._other_names = dict(other_names or {})
        self.given: set[str] = set()
        self._negative_number_matcher = _NEGATIVE  # argparse has no public name for it

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Converts a flag's string to its value. argparse has no public method for this.

        A leading ~ is expanded: shells leave it as it is in ``--output_dir=~/run``, and so do files
        of settings. It is refused if the home folder is unknown, as without HOME in a container. An
        empty value is refused: it would be taken for a flag that is not given, or for the current
        folder.
        """
        if not (arg_string or self._takes_empty or action.default == ""):
            raise argparse.ArgumentError(action, _EMPTY)
        if arg_string is not action.default:  # argparse also converts defaults that are strings
            self.given.add(action.dest)
        if arg_string == "~" or arg_string.startswith(("~/", f"~{os.sep}")):
            arg_string = os.path.expanduser(arg_string)
            if arg_string.startswith("~"):  # a folder of this name is dangerous to remove
                raise argparse.ArgumentError(action, _HOMELESS)
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
        """Ends the program with an error for unknown arguments, and says what may be meant.

        Args:
            unknown: the arguments.
            way_out: further advice, added at the end of the message.
        """
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        known = list({"_".join(_words(flag)): flag for flag in reversed(flags)}.values())
        near: list[str] = []
        notes = []
        for name in (word.partition("=")[0] for word in unknown if word.startswith("-")):
            answer = self._other_names.get(name.lstrip("-").replace("-", "_"))
            if answer is None:
                near += _meant_by(name, known)
            elif answer.startswith("--"):
                near.append(answer)
            else:
                notes.append(answer)
        hints = [f"did you mean {', '.join(dict.fromkeys(near))}?"] if near else []
        words = "; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints, *notes])
        self.error(f"{words}{way_out}")

    def error(self, message: str) -> NoReturn:
        """Ends the program with `message`, in one line."""
        line = f"{self.prog}: error: {message} (--help lists the flags)"
        tell_launcher(line)
        self.exit(2, f"{line}\n")


def summary(docstring: str | None) -> str | None:
    """Returns the first line of a docstring; None if there is none, as with ``python -OO``."""
    return docstring and docstring.splitlines()[0]


def _meant_by(unknown: str, flags: Sequence[str]) -> list[str]:
    """Returns the flags that an unknown one may have meant, by the first rule that finds any.

    The rules for an unknown flag and a known one, in order:

    - the unknown flag has the known one's words, or is their initials (--lr),
    - it is misspelled by a letter or two,
    - it begins the known flag, or begins with it (--output),
    - all of its words are in the known flag (--batch_size),
    - it is similar,
    - its first word is in the known flag (--target_modules).
    """
    name = _words(unknown)
    words = {flag: _words(flag) for flag in flags}
    spelled = "_".join(name)
    # Also letter by letter, as in --lora_dimm, whose words are not those of --lora_dim.
    alike = {
        flag: max(
            SequenceMatcher(None, *pair).ratio()
            for pair in ((unknown.strip("-"), flag[2:]), (spelled, "_".join(words[flag])))
        )
        for flag in flags
    }
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
    """Returns whether the shorter of two names, of at least `least` letters, begins the other."""
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
        name: the flag or the setting.
        value: its number. None, for a flag that is not given, is within any bounds.
        least, above: the inclusive or exclusive lower bound.
        most, below: the inclusive or exclusive upper bound. If `below` is infinity, the number must
            be finite.

    Raises:
        ValueError: the number is out of bounds, NaN, or an integer too large for PyTorch; or it is
            a text, as YAML reads 5e-5.
    """
    if value is None:
        return
    if isinstance(value, str):
        raise ValueError(f"{name} must be a number, not the text '{value}'")
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


def pattern_of_words(
    flag: str, number: Callable[[str], _Value], words: Iterable[str]
) -> dict[str, _Value]:
    """Returns a pattern from words such as ``value=4``, in their order.

    Args:
        flag: what errors call it.
        number: converts what follows the "=", such as `int`.
        words: ``target=number``, each target once.

    Raises:
        ValueError: a word is not of this format, or repeats a target.
    """
    pattern: dict[str, _Value] = {}
    for word in words:
        target, _, text = word.rpartition("=")
        try:
            value = number(text)
        except ValueError:
            target = ""
        if not target:
            what = "an integer" if number is int else "a number"
            raise ValueError(f"{flag}: '{word}' is not a target, '=' and {what}, such as value=4")
        if target in pattern:
            raise ValueError(f"{flag}: names '{target}' twice")
        pattern[target] = value
    return pattern


def layers_of_words(flag: str, words: Iterable[str]) -> list[int]:
    """Returns the numbers of layers from words such as ``0`` and ``6-11`` (both ends included).

    Raises:
        ValueError: a word is neither; the message begins with `flag`.
    """
    layers: set[int] = set()
    for word in words:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"{flag}: '{word}' is not a layer's number, nor a range such as 6-11")
        layers.update(range(first, last + 1))
    return sorted(layers)
