"""What the scripts share: how they run and end, and what they log."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from loralib.errors import (
    AlphaError,
    FullModelError,
    MissingLayersError,
    NeedsMergingError,
    WrongBaseError,
    adding_ways_out,
)
from loralib.training import process

# What the scripts' users can do about the library's errors.
WAYS_OUT = {
    AlphaError: "--lora_alpha",
    WrongBaseError: "--init_checkpoint",
    FullModelError: "utils/split_lora.py takes the adapter out, or give it as --init_checkpoint",
    MissingLayersError: "--lora_dim",
    NeedsMergingError: "utils/convert.py --to merged",
}


def run(main: Callable[[], None]) -> None:
    """Runs a script's `main`, as `process.run` does; errors are printed clear of progress bars.

    Errors of the library get the flags that resolve them.
    """
    set_up_logging()
    with_ways_out = adding_ways_out(WAYS_OUT)(main)
    process.run(with_ways_out, timeout="--ddp_timeout")


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Adds --log_level."""
    parser.add_argument(
        "--log_level",
        default="info",
        choices=process.LOG_LEVELS,
        help="lowest level of messages to show; of several processes, only one shows those below "
        "warning; default: info",
    )


def set_up_logging(level: str = "info") -> None:
    """Shows messages on the console, those of this folder's modules too."""
    process.set_up_logging(level, own=[path.stem for path in Path(__file__).parent.glob("*.py")])


def seen_from(path: str | os.PathLike) -> str:
    """For an error of a file that is not there: where a relative path was looked for."""
    return "" if os.path.isabs(path) else f" (seen from {os.getcwd()})"
