"""Prepares a script's standard streams, and flushes its output where an error can be handled."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OUTPUT = "standard output"
"""Stands for the name of a file in the errors of standard output."""


def set_up_streams() -> None:
    """Opens standard error if it is missing, and makes standard output safe for all characters.

    A stream is None if it was closed, as by ``2>&-``, or never existed, as for Windows services.
    Standard output's encoding may lack characters, such as "√" on a pipe in Windows. They are then
    escaped, as on standard error, instead of raising an error, which is Python's default (in the
    locale C, it is called surrogateescape). Errors of standard output name it, see `_Output`.
    """
    _open_closed_descriptors()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    defaults = ("strict", "surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in defaults:
        sys.stdout.reconfigure(errors="backslashreplace")
    _set_up_output()


def _open_closed_descriptors() -> None:
    """Opens the null device as each of the descriptors 0 to 2 that is closed.

    The next files and connections would get them, and what libraries in C print would be written
    into those.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, as of `os.dup`
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)


class _Output(io.FileIO):
    """Standard output's file, whose errors can be told from those of other pipes."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
            if written is None:  # the output does not block, and takes nothing now
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            raise OSError(error.errno, error.strerror, OUTPUT) from error
        return written


class _Unbuffered(_Output):
    """Standard output's file with ``python -u``: no buffer writes what one call leaves over."""

    def write(self, data: Any, /) -> int:
        """Writes all of `data`. The system may take only a part at first, as on a full disk."""
        content, done = memoryview(data).cast("B"), 0
        while done < len(content):
            done += super().write(content[done:])
        return done


def _set_up_output() -> None:
    """Replaces Python's own standard output by one with an `_Output`."""
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return  # a test's or a notebook's stream
    file = getattr(stream.buffer, "raw", stream.buffer)  # the buffer is the file with python -u
    if type(file) is not io.FileIO:
        return  # a Windows console
    stream.flush()
    is_buffered = file is not stream.buffer
    own = (_Output if is_buffered else _Unbuffered)(stream.fileno(), "w", closefd=False)
    own.name = file.name  # "<stdout>", as of Python's own, instead of the descriptor's number
    new: Any = io.TextIOWrapper(
        io.BufferedWriter(own) if is_buffered else own,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    new.mode = stream.mode
    sys.stdout = new


@contextmanager
def flushing_output() -> Iterator[None]:
    """Flushes standard output at the block's end, so that an error in writing can be handled.

    At the interpreter's exit it could not be. If the block raises an error, that one is raised.
    """
    try:
        yield
    except SystemExit as ended:
        if ended.code:
            drop_output()
        else:  # such as after --help
            _flush_output()
        raise
    except BaseException:
        drop_output()
        raise
    _flush_output()


def _flush_output() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def drop_output() -> None:
    """Flushes standard output, or drops it if it cannot be written.

    Otherwise the interpreter's exit would raise another error after the one that ends the process.
    """
    try:
        _flush_output()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
