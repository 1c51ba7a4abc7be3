"""Runs the NLG scripts, reports their errors, and sets up their logging."""

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

# The flag or program that resolves each of the library's errors.
WAYS_OUT = {
    AlphaError: "--lora_alpha",
    WrongBaseError: "--init_checkpoint",
    FullModelError: "utils/split_lora.py takes the adapter out, or give it as --init_checkpoint",
    MissingLayersError: "--lora_dim",
    NeedsMergingError: "utils/convert.py --to merged",
}


def run(main: Callable[[], None]) -> None:
    """Runs a script's `main` with `process.run`, which prints errors apart from progress bars.

    The library's errors are extended by the flags that resolve them.
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
    """Logs to the console, including the messages of this folder's modules."""
    process.set_up_logging(level, own=[path.stem for path in Path(__file__).parent.glob("*.py")])


def seen_from(path: str | os.PathLike) -> str:
    """Returns, for an error about a missing file, the folder that a relative path starts from."""
    return "" if os.path.isabs(path) else f" (relative to {os.getcwd()})"
