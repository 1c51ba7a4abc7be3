"""Scores predictions against their references, for E2E, WebNLG and DART.

    python eval/measure_scores.py REFERENCES PREDICTIONS [-p]
    python eval/measure_scores.py -R PREFIX -H PREDICTIONS -nr N [-m bleu,meteor,ter,chrf++]

The first call is for E2E: `REFERENCES` has one reference per line and a blank line after each
group, `PREDICTIONS` one line for each group. The second call is for WebNLG and DART: the references
are in the files `PREFIX0` to `PREFIX<N-1>`, and line i of each belongs to line i of `PREDICTIONS`.
It is empty if that prediction has fewer references. `metrics.py` defines the scores.
"""

import argparse
import json
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from loralib.io.atomic import atomic_write_text
from loralib.io.command_line import ArgumentParser
from loralib.io.encoding import refuse_utf16_file
from loralib.training import process
from loralib.training.locks import in_turn
from metrics import E2E, WEBNLG_AND_DART, Metric, References, score

logger = logging.getLogger(__name__)

# Seconds to wait for other processes that write to the same JSON file.
_PATIENCE = 60.0


def main(argv: list[str] | None = None) -> None:
    """Reads the files and prints the scores; with ``--json`` also writes them."""
    args = _parse(argv)
    two_files = args.references is not None
    known = E2E if two_files else WEBNLG_AND_DART
    metrics = _choose(args.metrics, known)
    if args.json:  # a file of something else is an error before the scores are computed
        _read_table(args.json)
    if two_files:
        predictions_file = args.predictions
        check_order(args.references, predictions_file)
        references = read_groups(args.references)
    else:
        predictions_file = args.hypothesis
        references = read_reference_files(args.reference, args.num_refs)
    unsplit = two_files and len(references) == 1  # as if blank lines had been lost
    hint = f"; {args.references} needs a blank line after each group" if unsplit else ""
    predictions = read_predictions(predictions_file, len(references), hint)

    scores = score(metrics, references, predictions)
    if args.json:
        _add_scores_to(args.json, args.label, scores)
    print(_as_lines(metrics, scores) if two_files else _as_table(metrics, scores, args.label))


def start() -> None:
    """Runs `main` as a program."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    process.run(main)


# ------------------------------------------------------------------------------------------------
# Arguments
# ------------------------------------------------------------------------------------------------


# Flags of the release's eval.py, and the only value that each may have here.
_FIXED: dict[tuple[str, str], tuple[str | int, str]] = {
    ("-lng", "--language"): ("en", "the language"),
    ("-nc", "--ncorder"): (6, "chrF++: the longest n-grams of characters"),
    ("-nw", "--nworder"): (2, "chrF++: the longest n-grams of words"),
    ("-b", "--beta"): (2, "chrF++: the weight of recall"),
}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        description="Scores predictions against their references. With two files: E2E's metrics. "
        "With -R and -H: those of WebNLG and DART.",
        epilog=f"E2E: {_scales(E2E)}. WebNLG and DART: {_scales(WEBNLG_AND_DART)}. METEOR, ROUGE_L "
        "and CIDEr need Java and requirements-java.txt, and are skipped without them.",
    )
    _add_files(parser)
    _add_scores(parser)
    _add_fixed(parser)
    args = parser.parse_args(argv)
    _check(args)
    return args


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("references", nargs="?", help="E2E: one reference a line, a blank line after each group")
    add("predictions", nargs="?", help="E2E: one prediction a line, in the order of the groups")
    add(
        "-R",
        "--reference",
        metavar="PREFIX",
        help="WebNLG, DART: the references are the files PREFIX0, PREFIX1 and so on",
    )
    add("-H", "--hypothesis", metavar="FILE", help="WebNLG, DART: one prediction a line")
    add("-nr", "--num_refs", type=int, default=4, help="number of reference files (default: 4)")


def _add_scores(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-m",
        "--metrics",
        help=f"some of {','.join(E2E)} with two files, of {','.join(WEBNLG_AND_DART)} with -R and "
        "-H (default: all of them)",
    )
    add(
        "--json",
        metavar="FILE",
        help="write the scores to this file, unrounded, null where skipped, in place of those "
        "that it holds under this label; those under others are kept",
    )
    add(
        "--label",
        default="all",
        help="what these scores are called in the JSON file and the table, such as all, seen, "
        "unseen (default: all)",
    )


def _add_fixed(parser: argparse.ArgumentParser) -> None:
    """Adds the release's flags that have no effect here."""
    add = parser.add_argument
    add(
        "-p",
        "--python",
        action="store_true",
        help="accepted as in the release: BLEU and NIST are always computed in Python",
    )
    for flags, (value, meaning) in _FIXED.items():
        add(
            *flags,
            default=value,
            type=type(value),
            metavar=str(value).upper(),
            help=f"{meaning}; accepted as in the release, but can only be {value}",
        )


def _check(args: argparse.Namespace) -> None:
    for flags, (value, _) in _FIXED.items():
        if getattr(args, flags[-1].lstrip("-")) != value:
            raise ValueError(f"{flags[0]}: can only be {value}")
    paths = (args.references, args.predictions, args.reference, args.hypothesis)
    given = [path is not None for path in paths]
    if given not in ([True, True, False, False], [False, False, True, True]):
        raise ValueError("give either REFERENCES PREDICTIONS, or -R PREFIX -H PREDICTIONS")


def _scales(metrics: Mapping[str, Metric]) -> str:
    return ", ".join(f"{metric.label} {metric.scale}" for metric in metrics.values())


def _choose(names: str | None, known: Mapping[str, Metric]) -> list[Metric]:
    """Returns the metrics in `names`, separated by commas; all `known` ones if None."""
    if names is None:
        return list(known.values())
    chosen = [name.strip().lower() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise ValueError(f"no metric {name!r} for these arguments; known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(chosen)]


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------


def read_groups(path: str) -> References:
    """Reads a file with one reference per line and a blank line after each group.

    Raises:
        ValueError: the file holds no reference, or a group without one.
    """
    lines = _read_lines(path)
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise ValueError(f"{path}: holds no references")
    for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), start=1):
        if not before and not line:
            raise ValueError(f"{path}:{number}: a blank line, but no references before it")
    return _groups(lines)


def _groups(lines: Sequence[str]) -> References:
    """Returns the groups of lines between blank ones."""
    return [list(group) for filled, group in groupby(lines, key=bool) if filled]


def check_order(references_file: str, predictions_file: str) -> None:
    """Checks that references and predictions have not been swapped.

    If they have, the second file has one group for each line of the first. Files in the right order
    never have that, unless there is only one group.

    Raises:
        ValueError: they have been swapped.
    """
    lines, groups = _read_lines(references_file), _groups(_read_lines(predictions_file))
    if len(groups) == len(lines) > 1:
        raise ValueError(
            f"{predictions_file} has a group for each of the {len(lines)} lines of "
            f"{references_file}: give the references first, then the predictions"
        )


def read_reference_files(prefix: str, count: int) -> References:
    """Reads the files `prefix`0 to `prefix`<count - 1>; a single one may be called `prefix`.

    Warns if there is a `prefix`<count>.

    Returns:
        For each line its distinct references; one of them is empty if a file's line is.

    Raises:
        ValueError: a file is missing or has another length than the first, or a line is empty in
            all files.
    """
    if count < 1:
        raise ValueError(f"-nr is {count}; there must be at least one file of references")
    paths = [f"{prefix}{i}" for i in range(count)]
    if count == 1 and os.path.isfile(prefix):
        paths = [prefix]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise ValueError(f"no such file: {', '.join(missing)} (with -nr {count})")
    if paths != [prefix] and os.path.isfile(f"{prefix}{count}"):
        logger.warning("%s%d and later files do not count with -nr %d", prefix, count, count)
    files = [_read_lines(path) for path in paths]
    for path, lines in zip(paths, files, strict=True):
        if len(lines) != len(files[0]):
            raise ValueError(f"{paths[0]} has {len(files[0])} lines, but {path} has {len(lines)}")
    if not any(line for lines in files for line in lines):
        raise ValueError(f"{', '.join(paths)}: no references")
    # A row with fewer references than others has empty lines, which BLEU and TER count, or repeats
    # its first reference. No metric depends on how often a reference occurs.
    rows = [list(dict.fromkeys(row)) for row in zip(*files, strict=True)]
    for number, row in enumerate(rows, start=1):
        if row == [""]:
            raise ValueError(f"{paths[0]}:{number}: empty, in the other reference files too")
    return rows


def read_predictions(path: str, count: int, hint: str = "") -> list[str]:
    """Reads a file of `count` predictions, one per line; warns of empty ones.

    `hint` is added to the error if there are more: what may be wrong with the references instead.

    Raises:
        ValueError: there are more or fewer.
    """
    predictions = _read_lines(path)
    if len(predictions) != count:
        hint = hint if len(predictions) > count else ""
        raise ValueError(
            f"{path}: {len(predictions)} predictions for {count} rows of references{hint}"
        )
    empty = predictions.count("")
    if empty:
        logger.warning("%s: %d of %d predictions are empty", path, empty, count)
    return predictions


def _read_lines(path: str) -> list[str]:
    refuse_utf16_file(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 ({error.reason})") from error
    # Only a line feed ends a line. Python's splitlines would also split at characters that may
    # occur within a text.
    return [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []


def _read_table(path: str) -> dict[str, dict[str, float | None]]:
    """Reads the scores that an earlier run wrote to `path`, by label."""
    if not os.path.exists(path):
        return {}
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: exists, but is not JSON ({error})") from error
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise ValueError(f"{path}: exists, but holds no scores by label")
    return table


def _add_scores_to(path: str, label: str, scores: Mapping[str, float | None]) -> None:
    """Adds a label's scores to a file, to which other processes may add theirs meanwhile."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with in_turn(Path(f"{path}.lock"), _PATIENCE):
        # Earlier ones of this label may be of other predictions.
        table = {**_read_table(path), label: scores}
        atomic_write_text(path, json.dumps(table, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------
# Print
# ------------------------------------------------------------------------------------------------


def _as_lines(metrics: list[Metric], scores: Mapping[str, float | None]) -> str:
    """Returns one line per metric, as the E2E challenge's program prints them."""
    return "\n".join(f"{metric.label}: {_number(metric, scores)}" for metric in metrics)


def _as_table(metrics: list[Metric], scores: Mapping[str, float | None], label: str) -> str:
    """Returns a line of names, one of numbers, and one of the metrics' scales."""
    rows = [
        ["", *(metric.label for metric in metrics)],
        [label, *(_number(metric, scores) for metric in metrics)],
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    scales = ", ".join(f"{metric.label} {metric.scale}" for metric in metrics)
    return "\n".join([*lines, f"({scales})"])


def _number(metric: Metric, scores: Mapping[str, float | None]) -> str:
    value = scores[metric.label]
    return "skipped" if value is None else f"{value:.{metric.decimals}f}"


if __name__ == "__main__":
    start()
