"""The package's loggers: all below ``transformers``, so that one call sets their level."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING  # noqa: F401


def get_logger(name: str | None = None) -> logging.Logger:
    """The logger of a module of this package, or the package's own."""
    return logging.getLogger(name or "transformers")


def set_verbosity(level: int) -> None:
    """Sets the level of all the package's loggers."""
    get_logger().setLevel(level)


def set_verbosity_info() -> None:
    """Shows what the package does."""
    set_verbosity(INFO)


def set_verbosity_warning() -> None:
    """Shows what a user should look into."""
    set_verbosity(WARNING)


def set_verbosity_error() -> None:
    """Shows errors only."""
    set_verbosity(ERROR)


@contextmanager
def errors_only() -> Iterator[None]:
    """Within this block the package shows errors only.

    For a model whose head comes from an adapter: a warning that its own is newly initialized would
    mislead.
    """
    level = get_logger().level
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(level)
