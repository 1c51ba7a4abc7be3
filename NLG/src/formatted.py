"""Reads and writes formatted files: one row {"context", "completion"[, "cate"]} per line.

All corpora are converted to this format. The context is what a text should express, the completion
one such text. Each text of a corpus is a row, so consecutive rows may share their context.
"""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from json_lines import read_json_lines, write_json_lines
from loralib.io.atomic import check_apart
from loralib.io.command_line import ArgumentParser
from loralib.io.encoding import utf8_content

Row = dict[str, Any]


def make_row(context: str, completion: str, where: str) -> Row:
    """Returns a row of the texts, without white space around them.

    Args:
        context, completion: the texts.
        where: the place in the source, for errors.

    Raises:
        ValueError: a text is empty, or not a string.
    """
    row = {"context": context, "completion": completion}
    for name, text in row.items():
        if not isinstance(text, str):
            raise ValueError(f"{where}: the {name} is not a text: {text!r}")
        if not text.strip():
            raise ValueError(f"{where}: the {name} is empty")
    return {name: text.strip() for name, text in row.items()}


def join_triples(triples: Iterable[tuple[str, str, str]]) -> str:
    """Joins triples as ``subject : property : object | subject : …``."""
    return " | ".join(" : ".join(triple) for triple in triples)


def read_formatted(path: str | os.PathLike) -> list[Row]:
    """Reads a formatted file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a formatted row; the message names file and line.
    """
    try:
        rows = list(read_json_lines(path))
    except ValueError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            how = "formatted rows are needed: format_converting_e2e.py (_webnlg, _dart) makes them"
            raise ValueError(f"{error}; {how}") from error
        raise
    for number, row in enumerate(rows, start=1):
        _check(row, f"{path}:{number}")
    return rows


def _check(row: Row, where: str) -> None:
    for name in ("context", "completion"):
        text = row.get(name)
        if isinstance(text, list):
            raise ValueError(
                f"{where}: holds token ids, not texts: give the file that they were encoded from"
            )
        if not isinstance(text, str):
            hint = "; to decode without one to compare with, give any text"
            raise ValueError(
                f'{where}: "{name}" is missing or not a text{hint if name == "completion" else ""}'
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f'{where}: "{name}" is not valid Unicode ({error})') from error
    if not row["completion"].strip():
        raise ValueError(f"{where}: the completion is empty")


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or nested too deep.
    """
    content = utf8_content(path)
    try:
        return json.loads(content.decode())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{path}: is nested too deep") from error


def convert(
    description: str, read_rows: Callable[[str], list[Row]], argv: list[str] | None
) -> None:
    """Runs a conversion script: reads a corpus's file and writes it formatted, atomically.

    Args:
        description: the description for --help.
        read_rows: reads the rows of a file.
        argv: the command line; that of the process if None.

    Raises:
        OSError, ValueError: the file cannot be read, is not in its corpus's format, or is the
            output as well.
    """
    parser = ArgumentParser(description=description)
    parser.add_argument("input", help="the corpus's file")
    parser.add_argument("output", help="the formatted file to write, JSON lines")
    args = parser.parse_args(argv)
    check_apart([args.output], [args.input])
    rows = read_rows(args.input)
    if not rows:
        raise ValueError(f"{args.input}: holds no texts")
    write_json_lines(args.output, rows)
