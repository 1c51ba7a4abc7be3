"""The package's loggers, all below ``transformers``, so that one call sets their level.

The default level is WARNING. The environment variable TRANSFORMERS_VERBOSITY sets another one:
debug, info, warning, error or critical. If the root logger has handlers, they show the messages.
Otherwise, the package's own handler shows them on standard error.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import (  # noqa: F401 - can be imported from here, too
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
    """Shows messages on standard error if the root logger has no handler to show them."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """The current standard error, which may have been redirected since the import."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Shows a record."""
        if not (get_logger().propagate and logging.getLogger().handlers):
            super().emit(record)


_default_handler = _DefaultHandler()


def get_logger(name: str | None = None) -> logging.Logger:
    """Returns the logger of a module of this package, or the package's own."""
    return logging.getLogger(name or _PACKAGE)


# ---- which messages ----


def get_verbosity() -> int:
    """Returns the level of the package's loggers, such as `WARNING`."""
    return get_logger().getEffectiveLevel()


def set_verbosity(verbosity: int) -> None:
    """Sets the level of all the package's loggers."""
    get_logger().setLevel(verbosity)


def set_verbosity_debug() -> None:
    """Shows all messages."""
    set_verbosity(DEBUG)


def set_verbosity_info() -> None:
    """Shows info messages and above."""
    set_verbosity(INFO)


def set_verbosity_warning() -> None:
    """Shows warnings and errors."""
    set_verbosity(WARNING)


def set_verbosity_error() -> None:
    """Shows errors only."""
    set_verbosity(ERROR)


@contextmanager
def errors_only() -> Iterator[None]:
    """Makes the package show only errors within the block.

    Used when a model's head comes from an adapter: the warning that the model's own head is newly
    initialized would mislead.
    """
    level = get_logger().level
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(level)


# ---- where they go, and how they look ----


def enable_default_handler() -> None:
    """Shows messages on standard error again, after `disable_default_handler`."""
    add_handler(_default_handler)


def disable_default_handler() -> None:
    """Stops the package from showing messages itself."""
    remove_handler(_default_handler)


def add_handler(handler: logging.Handler) -> None:
    """Adds a handler for the package's messages."""
    get_logger().addHandler(handler)


def remove_handler(handler: logging.Handler) -> None:
    """Removes a handler of the package's messages."""
    get_logger().removeHandler(handler)


def enable_propagation() -> None:
    """Passes messages on to the root logger's handlers, as by default."""
    get_logger().propagate = True


def disable_propagation() -> None:
    """Shows messages only through the package's own handlers."""
    get_logger().propagate = False


def enable_explicit_format() -> None:
    """Makes the package's handlers show level, file, line and time of each message."""
    _set_format(logging.Formatter(_EXPLICIT))


def reset_format() -> None:
    """Makes the package's handlers show only the messages."""
    _set_format(None)


def _set_format(formatter: logging.Formatter | None) -> None:
    for handler in get_logger().handlers:
        handler.setFormatter(formatter)


def _set_up() -> None:
    """Sets the level from the environment and adds the default handler, at import."""
    level = os.environ.get(_VARIABLE, "warning")
    set_verbosity(log_levels.get(level.lower(), WARNING))
    add_handler(logging.NullHandler())  # without a handler, Python itself would show warnings
    enable_default_handler()
    if level.lower() not in log_levels:
        known = ", ".join(log_levels)
        get_logger().warning("%s is %s, not one of %s: it has no effect", _VARIABLE, level, known)


_set_up()
