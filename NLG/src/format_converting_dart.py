"""Converts DART's JSON to formatted rows: triples as context, a text as completion.

    python src/format_converting_dart.py data/dart/dart-v1.1.1-full-train.json \\
        data/dart/train_formatted.jsonl

Relations are lower-cased.
"""

from formatted import Row, convert, join_triples, make_row, read_json
from script import run


def read_rows(path: str) -> list[Row]:
    """Reads the rows of a file, one for each annotation.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not in DART's format; the message names file and entry.
    """
    entries = read_json(path)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: not DART's format, it is not a list")
    rows = []
    for number, entry in enumerate(entries, start=1):
        where = f"{path}: entry {number}"
        try:
            rows += _entry_rows(entry, where)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: not in DART's format ({error!r})") from error
    return rows


def _entry_rows(entry: dict, where: str) -> list[Row]:
    if any(not isinstance(triple, list) or len(triple) != 3 for triple in entry["tripleset"]):
        raise ValueError(f"{where}: a triple does not have three parts")
    context = join_triples(
        (subject, relation.lower(), object_) for subject, relation, object_ in entry["tripleset"]
    )
    return [make_row(context, text["text"], where) for text in entry["annotations"]]


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and converts."""
    convert("Convert DART's JSON to formatted rows.", read_rows, argv)


if __name__ == "__main__":
    run(main)
