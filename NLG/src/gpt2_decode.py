"""Turns predicted token ids into text, and lays out the references for scoring.

    python src/gpt2_decode.py --vocab vocab --sample_file predict.jsonl \\
        --input_file data/e2e/test_formatted.jsonl \\
        --output_ref_file e2e_ref.txt --output_pred_file e2e_pred.txt

Rows with the same context (or the same key in --ref_unique_file) are one group: their completions
are its references, the prediction for its first row is its prediction. Groups come in the order in
which they first appear in the input.

--ref_type e2e writes one file of references, one per line, with a blank line after each group.
webnlg and dart write a folder with the files reference0 … reference{N-1}, N being --ref_num, with
one line for each group. A group with fewer references repeats its first. A folder that holds more
such files, for example from an earlier call with a larger --ref_num, is an error.
"""

import argparse
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from encoded import context_digest, token_ids
from encoder import END_OF_TEXT, VOCAB_HELP, Encoder, get_encoder
from formatted import Row, read_formatted
from json_lines import read_json_lines, read_lines, write_lines
from loralib.io.atomic import check_apart
from loralib.io.command_line import ArgumentParser
from loralib.text import counted
from script import add_log_level, run, set_up_logging

logger = logging.getLogger(__name__)


@dataclass
class Group:
    """Rows of the input that share their references and one prediction.

    Args:
        rows: the rows' numbers, from 0.
        references: the rows' texts.
    """

    rows: list[int]
    references: list[str]


def cut(text: str) -> str:
    """Returns the text up to ``<|endoftext|>`` or a blank line, as one line."""
    # The output files hold one text per line.
    return " ".join(_kept(text).strip().splitlines())


def _kept(text: str) -> str:
    return text.split(END_OF_TEXT)[0].split("\n\n")[0]


def loses_text(text: str) -> bool:
    """Returns whether `cut` drops more than ``<|endoftext|>`` and white space."""
    return bool(text[len(_kept(text)) :].replace(END_OF_TEXT, "").strip())


def normalize(text: str, *, tokenize: bool, lower: bool) -> str:
    """Returns a text as it is scored.

    Args:
        text: one line.
        tokenize: whether every character except letters, digits and underscores is set apart by
            spaces.
        lower: whether the text is lower-cased.
    """
    if lower:
        text = text.lower()
    if tokenize:
        text = " ".join(re.sub(r"(\W)", r" \1 ", text).split())
    return text


def read_keys(path: str, rows: int) -> list[str]:
    """Reads a --ref_unique_file, which has the key of each row of the input on a line.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, or has another number of lines than the input.
    """
    keys = read_lines(path)
    if len(keys) != rows:
        raise ValueError(f"{path}: has {len(keys):,} lines, but the input has {rows:,} rows")
    return [key.strip() for key in keys]


def group_rows(rows: list[Row], keys: list[str], kept: Iterable[int], path: str) -> list[Group]:
    """Groups the rows that are kept, in the order of each group's first row.

    Warns of references that `cut` shortens.

    Args:
        rows: the rows of the input.
        keys: the key of each row; rows with the same key are one group.
        kept: the numbers of the rows that are kept, ascending.
        path: the input's file, for errors.

    Raises:
        ValueError: a row's reference is empty after it is cut.
    """
    groups: dict[str, Group] = {}
    shortened = []
    for number in kept:
        completion = rows[number]["completion"]
        reference = cut(completion)
        if loses_text(completion):
            shortened.append(number)
        if not reference:
            raise ValueError(f"{path}:{number + 1}: the completion is empty")
        group = groups.setdefault(keys[number], Group([], []))
        group.rows.append(number)
        group.references.append(reference)
    if shortened:
        logger.warning(
            "%s: references are cut at a blank line or %s, like predictions, and the rest is not "
            "scored: this shortens %d of them, the first in line %d",
            *(path, END_OF_TEXT, len(shortened), shortened[0] + 1),
        )
    return list(groups.values())


def kept_rows(rows: list[Row], which: str, path: str) -> list[int]:
    """Returns the numbers of the rows that --filter keeps.

    Args:
        rows: the rows of the input.
        which: ``all``, or ``seen`` or ``unseen`` for rows whose category is or is not in the
            training data.
        path: the input's file, for errors.

    Raises:
        ValueError: a row does not say whether its category is seen, or no row is left.
    """
    if which == "all":
        return list(range(len(rows)))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("cate"), bool):
            raise ValueError(f'{path}:{number}: --filter {which} needs "cate", true or false')
    kept = [number for number, row in enumerate(rows) if row["cate"] == (which == "seen")]
    if not kept:
        raise ValueError(f"{path}: has no row of {which} category")
    return kept


@dataclass(frozen=True)
class Prediction:
    """The prediction for a row of the input.

    Args:
        ids: the text's token ids; with its padding if the file does not have its length.
        context: the `context_digest` of the context that it is for, if the file has it.
    """

    ids: list[int]
    context: str | None


def read_predictions(path: str, rows: int) -> list[Prediction]:
    """Reads the prediction for each row of the input.

    Args:
        path: JSON lines ``{"id": row's number from 0, "predict": [ids]}``, in any order. Those of
            gpt2_beam.py also have "length", the number of ids without padding, and
            "context_digest".
        rows: the number of rows of the input.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not in this format, or the file does not have one prediction for each
            row of the input.
    """
    found: dict[int, Prediction] = {}
    for number, line in enumerate(read_json_lines(path), start=1):
        where, row = f"{path}:{number}", line.get("id")
        if type(row) is not int:
            raise ValueError(f'{where}: not a line {{"id": number, "predict": [ids]}}')
        ids = token_ids(line, "predict", where)
        if not 0 <= row < rows:
            raise ValueError(f"{where}: id {row}, but the input's rows are 0 to {rows - 1}")
        if row in found:
            raise ValueError(f"{where}: a second prediction of id {row}")
        length = line.get("length", len(ids))
        if type(length) is not int or not 0 <= length <= len(ids):
            raise ValueError(f'{where}: "length" must be from 0 to the number of ids in "predict"')
        found[row] = Prediction(ids[:length], line.get("context_digest"))
    missing = [row for row in range(rows) if row not in found]
    if missing:
        more = f" and {counted(len(missing) - 1, 'other')}" if len(missing) > 1 else ""
        raise ValueError(
            f"{path}: has no prediction of id {missing[0]}{more}; the input's rows are 0 to "
            f"{rows - 1}"
        )
    return [found[row] for row in range(rows)]


def check_contexts(
    args: argparse.Namespace, rows: list[Row], predictions: list[Prediction], encoder: Encoder
) -> None:
    """Checks that predictions are for the input's contexts; those without a digest always pass.

    Raises:
        ValueError: a prediction is for another context.
    """
    contexts = encoder.encode_batch([row["context"] for row in rows])
    others = [
        number
        for number, (prediction, ids) in enumerate(zip(predictions, contexts, strict=True))
        if prediction.context not in (None, context_digest(ids))
    ]
    if others:
        raise ValueError(
            f"{args.sample_file}: {len(others):,} of {len(rows):,} predictions, that of id "
            f"{others[0]} first, are for contexts other than those of {args.input_file}: give the "
            "--input_file and --vocab that gpt2_beam.py's --data was encoded from"
        )


def decode_groups(
    groups: list[Group], predictions: list[Prediction], encoder: Encoder, path: str
) -> list[str]:
    """Returns the predicted text of each group, shortened by `cut`.

    Args:
        groups: the groups of the input's rows.
        predictions: the prediction for each row of the input.
        encoder: the encoder of the vocabulary.
        path: the predictions' file, for errors.

    Raises:
        ValueError: an id is not in the vocabulary.
    """
    texts = []
    for group in tqdm(groups, desc="decode", unit="text", disable=None):
        first = group.rows[0]
        try:
            texts.append(cut(encoder.decode(predictions[first].ids)))
        except ValueError as error:
            raise ValueError(f"{path}: id {first}: {error}") from error
    differing = sum(
        any(predictions[row].ids != predictions[group.rows[0]].ids for row in group.rows)
        for group in groups
    )
    if differing:
        logger.warning(
            "%s: %d of %d inputs have several predictions that differ; the first counts",
            path,
            differing,
            len(groups),
        )
    return texts


def reference_columns(groups: list[Group], count: int) -> list[list[str]]:
    """Returns `count` columns: the n-th has each group's n-th reference or, if missing, its first.

    Warns of references that do not fit into them.
    """
    beyond = sum(max(len(group.references) - count, 0) for group in groups)
    if beyond:
        logger.warning("--ref_num %d leaves out %s", count, counted(beyond, "reference"))
    return [
        [(group.references[n : n + 1] or group.references)[0] for group in groups]
        for n in range(count)
    ]


def reference_files(args: argparse.Namespace) -> list[Path]:
    """Returns the files that the references are written to, which depend on --ref_type."""
    if args.ref_type == "e2e":
        return [Path(args.output_ref_file)]
    return [Path(args.output_ref_file, f"reference{n}") for n in range(args.ref_num)]


def other_references(args: argparse.Namespace) -> list[Path]:
    """Returns the files of references in the folder that this call does not write, by number."""
    if args.ref_type == "e2e":
        return []
    folder = Path(args.output_ref_file)
    names = (path.name for path in folder.glob("reference*") if path.is_file())
    found = (re.fullmatch(r"reference(0|[1-9][0-9]*)", name) for name in names)
    numbers = sorted(int(name[1]) for name in found if name)
    return [folder / f"reference{number}" for number in numbers if number >= args.ref_num]


def check_no_others(args: argparse.Namespace, others: list[Path]) -> None:
    """Checks that the folder has no more files of references than this call writes.

    A scorer that reads the other files as well would mix two inputs up. They are not deleted,
    because they may be from an earlier call with a larger --ref_num or the user's own.

    Args:
        args: the flags.
        others: the result of `other_references`.

    Raises:
        ValueError: there are other files.
    """
    if others:
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        raise ValueError(
            f"{others[0]}{more} would be taken for references of this call, with --ref_num "
            f"{args.ref_num}: delete what an earlier call has left, or give another "
            "--output_ref_file"
        )


def write_references(args: argparse.Namespace, groups: list[Group]) -> None:
    """Writes the references in the format of --ref_type, to --output_ref_file."""
    if args.ref_type == "e2e":
        columns = [[line for group in groups for line in (*group.references, "")]]
    else:
        columns = reference_columns(groups, args.ref_num)
    for path, column in zip(reference_files(args), columns, strict=True):
        write_lines(path, column)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = ArgumentParser(
        description="Turn predicted token ids into text, and lay out the references for scoring."
    )
    add = parser.add_argument
    add("--vocab", required=True, help=VOCAB_HELP)
    add("--sample_file", required=True, help="the predictions, as gpt2_beam.py writes them")
    add("--input_file", required=True, help="the formatted file that they are predictions for")
    add(
        "--output_ref_file",
        required=True,
        help="where the references go: a file for e2e, a folder for webnlg and dart",
    )
    add("--output_pred_file", required=True, help="file for the predicted texts, one a line")
    add(
        "--ref_unique_file",
        help="file with a key for each line of the input; lines of one key are grouped, rather "
        "than lines of one context",
    )
    add(
        "--ref_type",
        default="e2e",
        choices=["e2e", "webnlg", "dart"],
        help="how references are laid out (default: e2e)",
    )
    add(
        "--ref_num",
        type=int,
        default=4,
        help="number of reference files for webnlg and dart (default: 4)",
    )
    add("--tokenize", action="store_true", help="separate every non-word character")
    add("--lower", action="store_true", help="put texts into lower case")
    add(
        "--filter",
        default="all",
        choices=["all", "seen", "unseen"],
        help="which categories of WebNLG to keep (default: all)",
    )
    add_log_level(parser)
    args = parser.parse_args(argv)
    if args.ref_num < 1:
        parser.error(f"--ref_num {args.ref_num}: must be 1 or more")
    return args


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and decodes.

    Raises:
        OSError, ValueError: a file cannot be read, is not in its format, or is an output as well;
            or the predictions do not cover the input, or are for another one. Nothing is written
            then.
    """
    args = parse_arguments(argv)
    set_up_logging(args.log_level)
    given = (args.sample_file, args.input_file, args.ref_unique_file)
    others = other_references(args)
    check_apart(
        # With the others, so that no file that this call reads is reported as left over.
        [args.output_pred_file, *reference_files(args), *others],
        [path for path in given if path is not None],
    )
    check_no_others(args, others)
    rows = read_formatted(args.input_file)
    if args.ref_unique_file is None:
        keys = [row["context"] for row in rows]
    else:
        keys = read_keys(args.ref_unique_file, len(rows))
    kept = kept_rows(rows, args.filter, args.input_file)
    groups = group_rows(rows, keys, kept, args.input_file)
    predictions = read_predictions(args.sample_file, len(rows))
    encoder = get_encoder(args.vocab)
    check_contexts(args, rows, predictions, encoder)
    texts = decode_groups(groups, predictions, encoder, args.sample_file)

    def finish(text: str) -> str:
        return normalize(text, tokenize=args.tokenize, lower=args.lower)

    for group in groups:
        group.references = [finish(text) for text in group.references]
    write_references(args, groups)
    write_lines(args.output_pred_file, map(finish, texts))
    logger.info("%d predictions for %d rows", len(groups), len(kept))


if __name__ == "__main__":
    run(main)
