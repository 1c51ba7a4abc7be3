"""The errors by which Python says that a zip file is damaged."""

import zipfile
import zlib
from importlib import import_module


def _errors_of_methods() -> list[type[Exception]]:
    """Of the methods that a damaged byte can name, those that this Python was built with."""
    found: list[type[Exception]] = [zlib.error]
    for module, name in (("lzma", "LZMAError"), ("compression.zstd", "ZstdError")):
        try:
            found.append(getattr(import_module(module), name))
        except ImportError:
            continue
    return found


ZIP_ERRORS = (zipfile.BadZipFile, *_errors_of_methods(), EOFError, RuntimeError)
"""What `zipfile` raises, by the part that is wrong: RuntimeError for an unknown method of
compression, or for a password."""
