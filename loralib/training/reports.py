"""Checks where a run's metrics are to be reported, for the scripts of NLU and NLG."""

import importlib.util
from collections.abc import Collection

TENSORBOARD_FILE = "events.out.tfevents"
"""The beginning of the names of TensorBoard's files."""


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def check_none_is_alone(asked: Collection[str]) -> None:
    """Checks that "none" is not requested together with others.

    Raises:
        ValueError: it is; the message names the others.
    """
    others = sorted({*asked} - {"none"})
    if "none" in asked and others:
        raise ValueError(f"report_to none: leave it out, or {', '.join(others)}")


def check_installed(package: str) -> None:
    """Checks that a package that is requested by name is installed.

    Raises:
        ValueError: it is not; the message says how to install it.
    """
    if not is_installed(package):
        raise ValueError(f"report_to {package}: it is not installed (pip install {package})")
