"""What tells a file's content from another's."""

import hashlib
import os
import re
from typing import Any

_BLOCK = 2**20  # bytes that are read at once
_DIGEST = re.compile("[0-9a-f]{64}")


def folder_digest(path: str | os.PathLike) -> str:
    """SHA-256 of the names and contents of a folder's files, hidden ones left out, likewise."""
    digest = hashlib.sha256()
    visited: dict[tuple[int, int], bytes] = {}  # as links may lead back to a folder they are in
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
            if os.path.isfile(file):  # and not a link to nowhere, or a pipe
                content = file_digest(file).encode()
                digest.update(b"%b\n%b\n" % (_name_below(path, file), content))
    return digest.hexdigest()


def _name_below(path: str | os.PathLike, file: str) -> bytes:
    """A file's name within a folder, with the bytes that it has on Linux, whichever they are."""
    name = os.path.relpath(file, path).replace(os.sep, "/")
    return name.encode("utf-8", "surrogateescape")


def file_digest(path: str | os.PathLike) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def lines_digest(path: str | os.PathLike) -> str:
    """SHA-256 of a text file as `file_digest` has it, whether its lines end as on Windows or not.

    A copy from another system has the same lines.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for line in file:
            digest.update(line.replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def short_digest(value: Any) -> Any:
    """A value for a message: of a digest, as many digits as people compare."""
    is_digest = isinstance(value, str) and _DIGEST.fullmatch(value)
    return f"{value[:16]}…" if is_digest else value
