"""Refuses text files in UTF-16 or UTF-32, as some programs save them. All text must be UTF-8."""

import codecs
import os
from pathlib import Path

# UTF-32's byte-order marks come first, because one of them begins with UTF-16's.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def refuse_utf16(source: object, start: bytes) -> None:
    """Refuses text that begins with the byte-order mark of UTF-16 or UTF-32.

    Args:
        source: the file's name, for the message.
        start: at least the first four bytes of the text.

    Raises:
        ValueError: the text begins with such a mark.
    """
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            raise ValueError(f"{source}: is {name} text; save it as UTF-8")


def utf8_content(path: str | os.PathLike) -> bytes:
    """Returns the bytes of a text file, without UTF-8's byte-order mark.

    The file is opened only once, because a pipe, such as bash's ``<(zcat train.txt.gz)``, can be
    read only once.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is UTF-16 or UTF-32 text.
    """
    content = Path(path).read_bytes()
    refuse_utf16(path, content)
    return content.removeprefix(codecs.BOM_UTF8)


def refuse_utf16_file(path: str | os.PathLike) -> None:
    """Refuses the file at `path` if it is UTF-16 or UTF-32 text, as `refuse_utf16` does.

    It refuses pipes as well: this reads their first bytes, which whoever opens `path` next misses.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is such text, or a pipe.
    """
    if Path(path).is_fifo():
        raise ValueError(f"{path}: is a pipe, not a file: save its content, and give that file")
    with open(path, "rb") as file:
        refuse_utf16(path, file.read(4))
