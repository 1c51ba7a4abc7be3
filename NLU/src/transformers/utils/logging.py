"""The package's loggers: all below ``transformers``, so that one call sets their level."""

import logging
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
