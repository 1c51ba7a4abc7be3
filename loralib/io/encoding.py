"""Text files are UTF-8; one in UTF-16 or UTF-32, as some programs save them, is named as that."""

import codecs
import os

# UTF-32's mark begins with UTF-16's, so it is looked for first.
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
        start: its first four bytes, or more.

    Raises:
        ValueError: it does.
    """
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            raise ValueError(f"{source}: is {name} text; save it as UTF-8")


def refuse_utf16_file(path: str | os.PathLike) -> None:
    """Returns the same for the file at `path`."""
    with open(path, "rb") as file:
        refuse_utf16(path, file.read(4))
