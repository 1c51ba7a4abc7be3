"""The command lines of all scripts."""

import argparse
import difflib
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from .elastic_error import tell_launcher

_SIMILAR = 0.75  # of two names' letters, by difflib
_LARGEST = 2**62  # of whole numbers: PyTorch's end at 2**63, and what is near is a typing mistake
# A number below zero as `float` reads it, be it in scientific notation.
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|-inf(inity)?$", re.IGNORECASE)
_EMPTY = "the value is empty, as that of an unset shell variable: give one, or leave it out"


class ArgumentParser(argparse.ArgumentParser):
    """A parser of whole flags, whose errors are one line, and whose numbers may be below zero.

    An abbreviation of one script's flag may be another script's flag of another meaning, and all
    flags' usage would bury an error. argparse itself takes ``-1e-5`` for a flag.

    Args:
        arguments: those of `argparse.ArgumentParser`.

    Attributes:
        given: names of the flags that were given a value, be it their default's.
    """

    def __init__(self, **arguments: Any):
        arguments.setdefault("allow_abbrev", False)
        super().__init__(**arguments)
        self.given: set[str] = set()
        self._negative_number_matcher = _NEGATIVE  # argparse has no public name for it

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """A flag's value from its text; argparse has no public method for it.

        Shells leave the ~ of ``--output_dir=~/run`` as it is, and files of settings do too. An
        empty value would be read as a flag that is not given, or as the current folder.
        """
        if not arg_string and action.default != "":
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
        known = {flag.lstrip("-"): flag for flag in self._option_string_actions}
        names = [word.partition("=")[0].lstrip("-") for word in unknown if word.startswith("-")]
        near = [name for x in names for name in difflib.get_close_matches(x, known, 1, _SIMILAR)]
        hint = f"; did you mean {', '.join(known[name] for name in near)}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}{way_out}")

    def error(self, message: str) -> NoReturn:
        """Ends the program with `message`, in one line."""
        line = f"{self.prog}: error: {message} (--help lists the flags)"
        tell_launcher(line)
        self.exit(2, f"{line}\n")


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
        bounds = f"be at most {_LARGEST:.2g}"
    elif value == math.inf:
        bounds = "be finite"
    raise ValueError(f"{name} must {bounds}, not {value}")
