"""Tells the errors that Python raises for a damaged zip file."""

import errno
import zipfile
import zlib
from importlib import import_module


def _errors_of_methods() -> list[type[Exception]]:
    """Returns the errors of the compression methods that this Python was built with.

    A damaged byte in an archive can select any of them.
    """
    found: list[type[Exception]] = [zlib.error]
    for module, name in (("lzma", "LZMAError"), ("compression.zstd", "ZstdError")):
        try:
            found.append(getattr(import_module(module), name))
        except ImportError:
            continue
    return found


ZIP_ERRORS = (zipfile.BadZipFile, *_errors_of_methods(), EOFError, RuntimeError)
"""The errors that `zipfile` raises for a damaged archive, depending on the damaged part. It raises
RuntimeError if a method of compression is unknown, or if the archive seems to have a password."""


def is_of_the_disk(error: OSError) -> bool:
    """Returns whether `zipfile` raised an OSError for another reason than a damaged archive.

    For a damaged one, it may seek to a place before the archive, or take it for one of bzip2, whose
    errors have no number.
    """
    return error.errno not in (errno.EINVAL, None)
