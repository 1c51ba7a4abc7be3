"""What zip files that are damaged are known by."""

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


DAMAGED = (zipfile.BadZipFile, *_errors_of_methods(), EOFError, RuntimeError)
"""What `zipfile` raises for them: by which part is wrong; a method that it does not know, or a
password, is a RuntimeError."""
