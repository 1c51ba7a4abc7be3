"""What zip files that are damaged are known by."""

import zipfile
import zlib

DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""What `zipfile` raises for them: by which part is wrong; a method that it does not know, or a
password, is a RuntimeError."""
