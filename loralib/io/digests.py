"""Computes digests of files and folders, by which their contents are compared."""

import hashlib
import os
import re
from typing import Any

_BLOCK = 2**20  # bytes per read
_DIGEST = re.compile("[0-9a-f]{64}")


def folder_digest(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of the names and contents of a folder's files, except hidden ones."""
    digest = hashlib.sha256()
    visited: dict[tuple[int, int], bytes] = {}  # links may lead back to a folder that they are in
    for folder, below, names in os.walk(os.fspath(path), followlinks=True):
        status, name = os.stat(folder), _name_below(path, folder)
        first = visited.setdefault((status.st_dev, status.st_ino), name)
        if first != name:
            digest.update(b"%b\n%b\n" % (name, first))
            below.clear()
            continue
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            file = os.path.join(folder, name)
            if os.path.isfile(file):  # not a broken link or a pipe
                content = file_digest(file).encode()
                digest.update(b"%b\n%b\n" % (_name_below(path, file), content))
    return digest.hexdigest()


def _name_below(path: str | os.PathLike, file: str) -> bytes:
    """Returns a file's path relative to a folder, as bytes, which are the same on all systems.

    On Linux they are the name's own bytes, whether they are valid UTF-8 or not.
    """
    name = os.path.relpath(file, path).replace(os.sep, "/")
    return name.encode("utf-8", "surrogateescape")


def file_digest(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def lines_digest(path: str | os.PathLike) -> str:
    """Returns the `file_digest` of a text file as if its lines ended in LF, even if they do not.

    A copy from Windows, with lines that end in CR LF, thus has the same digest.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for line in file:
            digest.update(line.replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def short_digest(value: Any) -> Any:
    """Shortens a digest for a message to its first 16 digits. Other values stay as they are."""
    is_digest = isinstance(value, str) and _DIGEST.fullmatch(value)
    return f"{value[:16]}…" if is_digest else value
