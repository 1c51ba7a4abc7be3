"""The package's loggers: all below ``transformers``, so that one call sets their level.

The level is WARNING, or that of the environment's TRANSFORMERS_VERBOSITY: debug, info, warning,
error or critical. Where the root logger has handlers, they show the messages; else a handler of the
package does, on standard error.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import (  # noqa: F401 - importable from here, too
    CRITICAL,
    DEBUG,
    ERROR,
    FATAL,
    INFO,
    NOTSET,
    WARN,
    WARNING,
)
from typing import TextIO

_PACKAGE = "transformers"
_VARIABLE = "TRANSFORMERS_VERBOSITY"
_EXPLICIT = "[%(levelname)s|%(filename)s:%(lineno)s] %(asctime)s >> %(message)s"
log_levels = {
    "debug": DEBUG,
    "info": INFO,
    "warning": WARNING,
    "error": ERROR,
    "critical": CRITICAL,
}


class _DefaultHandler(logging.StreamHandler):
    """Shows on standard error what no handler of the root logger will show."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Standard error as it is now: it may have been redirected since."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Shows a record."""
        if not (get_logger().propagate and logging.getLogger().handlers):
            super().emit(record)


_default_handler = _DefaultHandler()


def get_logger(name: str | None = None) -> logging.Logger:
    """The logger of a module of this package, or the package's own."""
    return logging.getLogger(name or _PACKAGE)


# ---- which messages ----


def get_verbosity() -> int:
    """The level of the package's loggers, such as `WARNING`."""
    return get_logger().getEffectiveLevel()


def set_verbosity(verbosity: int) -> None:
    """Sets the level of all the package's loggers."""
    get_logger().setLevel(verbosity)


def set_verbosity_debug() -> None:
    """Shows all messages."""
    set_verbosity(DEBUG)


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


# ---- where they go, and how they look ----


def enable_default_handler() -> None:
    """Messages are shown on standard error again, after `disable_default_handler`."""
    add_handler(_default_handler)


def disable_default_handler() -> None:
    """The package itself shows no messages."""
    remove_handler(_default_handler)


def add_handler(handler: logging.Handler) -> None:
    """Messages go to a handler as well."""
    get_logger().addHandler(handler)


def remove_handler(handler: logging.Handler) -> None:
    """Messages go to a handler no more."""
    get_logger().removeHandler(handler)


def enable_propagation() -> None:
    """Messages go to the root logger's handlers, as they do by default."""
    get_logger().propagate = True


def disable_propagation() -> None:
    """Messages go to the package's own handlers alone."""
    get_logger().propagate = False


def enable_explicit_format() -> None:
    """The package's handlers show level, file, line and time of each message."""
    _set_format(logging.Formatter(_EXPLICIT))


def reset_format() -> None:
    """The package's handlers show messages alone."""
    _set_format(None)


def _set_format(formatter: logging.Formatter | None) -> None:
    for handler in get_logger().handlers:
        handler.setFormatter(formatter)


def _set_up() -> None:
    """What importing the package does."""
    level = os.environ.get(_VARIABLE, "warning")
    set_verbosity(log_levels.get(level.lower(), WARNING))
    add_handler(logging.NullHandler())  # without any, Python itself would show warnings
    enable_default_handler()
    if level.lower() not in log_levels:
        known = ", ".join(log_levels)
        get_logger().warning("%s is %s, not one of %s: it has no effect", _VARIABLE, level, known)


_set_up()
