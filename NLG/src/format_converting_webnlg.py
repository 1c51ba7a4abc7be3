"""Converts WebNLG 2017's JSON to formatted rows: triples as context, a text as completion.

    python src/format_converting_webnlg.py data/webnlg_challenge_2017/train.json \\
        data/webnlg_challenge_2017/train_formatted.jsonl

Rows have a field "cate": whether the training data has the entry's category.
"""

import logging

from formatted import Row, convert, join_triples, make_row, read_json
from script import run

logger = logging.getLogger(__name__)

GOOD = "good"
"""The comment that marks the texts to use."""

SEEN = frozenset(
    (
        "Airport",
        "Astronaut",
        "Building",
        "City",
        "ComicsCharacter",
        "Food",
        "Monument",
        "SportsTeam",
        "University",
        "WrittenWork",
    )
)
"""The categories of the training data."""


def read_rows(path: str) -> list[Row]:
    """Reads the rows of a file, one for each text marked as good; logs how many are not.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not in WebNLG's format (the message names file and entry), or no text is
            marked as good.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError(f'{path}: not WebNLG\'s format, it has no list of "entries"')
    rows: list[Row] = []
    texts = 0
    for number, entry in enumerate(content["entries"], start=1):
        where = f"{path}: entry {number}"
        try:
            rows += _entry_rows(entry[str(number)], where)
            texts += len(entry[str(number)]["lexicalisations"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: not in WebNLG's format ({error!r})") from error
    if texts and not rows:
        raise ValueError(
            f'{path}: no text has the comment "{GOOD}", which marks the texts to use: all '
            f"{texts:,} have another comment"
        )
    if len(rows) < texts:
        logger.info(
            '%s: left out %s of %s texts, whose comment is not "%s"',
            *(path, f"{texts - len(rows):,}", f"{texts:,}", GOOD),
        )
    return rows


def _entry_rows(entry: dict, where: str) -> list[Row]:
    context = join_triples(
        (triple["subject"], triple["property"], triple["object"])
        for triple in entry["modifiedtripleset"]
    )
    seen = entry["category"] in SEEN
    return [
        make_row(context, text["lex"], where) | {"cate": seen}
        for text in entry["lexicalisations"]
        if text["comment"] == GOOD
    ]


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and converts."""
    convert("Convert WebNLG 2017's JSON to formatted rows.", read_rows, argv)


if __name__ == "__main__":
    run(main)
