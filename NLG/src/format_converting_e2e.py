"""Converts the E2E challenge's data to formatted rows.

    python src/format_converting_e2e.py data/e2e/train.txt data/e2e/train_formatted.jsonl

The input is a file of lines ``meaning representation||text``, as the release has it:

    name : Blue Spice | Type : coffee shop | area : city centre||Blue Spice is a coffee shop .

or the challenge's own CSV with the columns ``mr`` and ``ref``, which `as_lines` first converts to
such lines.
"""

import csv
import os
import re

from formatted import Row, convert, make_row
from json_lines import read_lines
from script import run

ATTRIBUTES = {"eatType": "Type", "familyFriendly": "family friendly", "priceRange": "price"}
"""The attributes that the release renames, and its names for them."""

_ATTRIBUTE = r"([^,\[\]]+)\[([^\[\]]*)\]"
_MEANING = re.compile(rf"{_ATTRIBUTE}(?:, {_ATTRIBUTE})*")

_LETTER = r"[^\W\d_]"
_ENDING = r"(?:s|t|re|ll|ve|m|d)\b"

# Pattern and replacement, in the order in which they apply. They were found by comparing the
# challenge's CSVs with the release's files, and reproduce all of valid.txt but one line, and all of
# test.txt.
_MARKS = (
    (r"[^\w\s.,'£-]", r" \g<0> "),
    (r"(?<!\d),|,(?!\d)", " , "),
    (r"(?<=[^\s.])\.+(?![\d.])", r" \g<0> "),
)
_APOSTROPHES = (
    (rf"(?<=\w)(?<! n)'(?={_ENDING})", " '"),
    (rf"(?<!\w)'(?!{_ENDING})", " ' "),
    (r"(?<=\w)'(?!\w)", " ' "),
)
_TRAIN_RULES = (
    *_MARKS,
    (r"£", " £ "),
    (r"(?<=\w)-(?=\w)", " - "),
    *_APOSTROPHES,
)
# The release's test file was tokenized by other rules.
_TEST_RULES = (
    *_MARKS,
    (r"(?<!\S)£", "£ "),
    (rf"(?<={_LETTER})-(?={_LETTER})|(?<=\d)-(?=\d)", " - "),
    (r"n't\b", " n't"),
    (r"\bthats\b", "that s"),
    *_APOSTROPHES,
)


def tokenize(text: str, is_test: bool = False) -> str:
    """Returns a text with its tokens set apart by spaces, as in the release's E2E files.

    Args:
        text: a text as the challenge published it.
        is_test: whether to tokenize as in the release's ``test.txt``, which differs a little from
            ``train.txt`` and ``valid.txt``.
    """
    for pattern, replacement in _TEST_RULES if is_test else _TRAIN_RULES:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


def as_lines(path: str | os.PathLike) -> list[str]:
    """Converts the challenge's CSV to the release's lines ``meaning representation||text``.

    The test set is recognized by its published name, which begins with ``testset``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a CSV; the message names file and line.
    """
    is_test = os.path.basename(path).startswith("testset")
    lines = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if reader.line_num == 1:
                    _check_header(row, where)
                elif row:  # skips empty lines, such as one at the file's end
                    lines.append(_as_line(row, is_test, where))
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not CSV ({error})") from error
    return lines


def _check_header(row: list[str], where: str) -> None:
    if row != ["mr", "ref"]:
        raise ValueError(f"{where}: the columns are {', '.join(row)}, not mr, ref")


def _as_line(row: list[str], is_test: bool, where: str) -> str:
    if len(row) != 2 or not _MEANING.fullmatch(row[0].strip()):
        raise ValueError(f"{where}: not a row name[value], …,text: {','.join(row)[:60]}")
    if not row[1].strip():
        raise ValueError(f"{where}: the completion is empty")
    context = " | ".join(
        f"{ATTRIBUTES.get(name.strip(), name.strip())} : {tokenize(value)}"
        for name, value in re.findall(_ATTRIBUTE, row[0])
    )
    # The release's lines end in a space.
    return f"{context}||{tokenize(row[1], is_test)} "


def read_rows(path: str) -> list[Row]:
    """Reads the rows of a file, one for each line.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not in the corpus's format; the message names file and line.
    """
    lines = read_lines(path)
    first = 1
    if re.fullmatch(r'"?mr"?,"?ref"?', lines[0]):
        lines, first = as_lines(path), 2
    return [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=first)]


def _row(line: str, where: str) -> Row:
    parts = line.split("||")
    if len(parts) != 2:
        raise ValueError(f"{where}: not of the form meaning representation||text: {line[:60]}")
    return make_row(*parts, where)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and converts."""
    convert("Convert the E2E challenge's data to formatted rows.", read_rows, argv)


if __name__ == "__main__":
    run(main)
