"""What tells a file's content from another's."""

import hashlib
import os

_BLOCK = 2**20  # bytes that are read at once


def file_digest(path: str | os.PathLike) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
