"""The command lines of the tasks' scripts, of GPT-2's, and of those that convert."""

import argparse
from typing import Any, NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """A parser of whole flags, whose errors are one line.

    An abbreviation of one script's flag may be another script's flag of another meaning, and all
    flags' usage would bury an error.

    Args:
        arguments: those of `argparse.ArgumentParser`.
    """

    def __init__(self, **arguments: Any):
        arguments.setdefault("allow_abbrev", False)
        super().__init__(**arguments)

    def error(self, message: str) -> NoReturn:
        """Ends the program with `message`, in one line."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")
