"""What the scripts share: their end, files of JSON lines, contexts, and a run's figures."""

import argparse
import codecs
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loralib.errors import (
    AlphaError,
    FullModelError,
    MissingLayersError,
    NeedsMergingError,
    WrongBaseError,
    adding_ways_out,
)
from loralib.io.atomic import atomic_write
from loralib.io.encoding import refuse_utf16_file
from loralib.training import process
from loralib.training.curves import HOW_TO_GET_IT, Place, is_matplotlib_available, write_curves
from loralib.training.reports import check_installed, check_none_is_alone, is_installed

logger = logging.getLogger(__name__)

# What the scripts' users can do about the library's errors.
WAYS_OUT = {
    AlphaError: "--lora_alpha",
    WrongBaseError: "--init_checkpoint",
    FullModelError: "utils/split_lora.py takes the adapter out, or give it as --init_checkpoint",
    MissingLayersError: "--lora_dim",
    NeedsMergingError: "utils/convert.py --to merged",
}


def run(main: Callable[[], None]) -> None:
    """Runs a script's `main`, as `process.run` does; errors are printed clear of progress bars.

    Errors of the library get the flags that resolve them.
    """
    set_up_logging()
    with_ways_out = adding_ways_out(WAYS_OUT)(main)
    process.run(with_ways_out, timeout="--ddp_timeout")


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Adds --log_level."""
    parser.add_argument(
        "--log_level",
        default="info",
        choices=process.LOG_LEVELS,
        help="the least level of messages to show; below warning, one process of several shows "
        "them; default: info",
    )


def set_up_logging(level: str = "info") -> None:
    """Shows messages on the console, those of this folder's modules too."""
    process.set_up_logging(level, own=[path.stem for path in Path(__file__).parent.glob("*.py")])


def read_json_lines(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The objects of a file of one JSON object a line; blank lines at its end do not count.

    A line is parsed, and its error raised, when its turn comes. Were all held at once, Python's
    garbage collector would look through them again and again, which takes longer than parsing.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object, or the file has none; the message names file and
            line.
    """
    number = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            raise ValueError(f"{path}:{number}: is empty, with more lines after it")
        try:
            row = json.loads(line)
        except ValueError as error:  # a JSONDecodeError, or a number of thousands of digits
            raise ValueError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not a JSON object: {line[:60]}")
        yield row
    if not number:
        raise ValueError(f"{path}: is empty")


def seen_from(path: str | os.PathLike) -> str:
    """For an error of a file that is not there: where a relative path was looked for."""
    return "" if os.path.isabs(path) else f" (seen from {os.getcwd()})"


def read_encoded(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The rows of a file of token ids, read as by `read_json_lines`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: likewise; where the first line is a text's, or no JSON, the message says what
            makes token ids of texts.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: is a folder; give a file of it, such as train.jsonl")
    rows = read_json_lines(path)
    try:
        first = next(rows)
    except ValueError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):  # no corpus is like that either
            raise
        raise ValueError(
            f"{error}; token ids are needed: format_converting_e2e.py (_webnlg, _dart) and then "
            "gpt2_encode.py make them of a corpus"
        ) from error
    if any(isinstance(first.get(field), str) for field in ("context", "completion")):
        raise ValueError(f"{path}:1: holds texts, not token ids: gpt2_encode.py makes these of it")
    yield first
    yield from rows


def read_lines(path: str | os.PathLike) -> list[str]:
    """The lines of a text file; blank ones at its end are left out. An empty file has one, blank.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not UTF-8; the message names file and line.
    """
    return list(_lines(path)) or [""]


def _lines(path: str | os.PathLike) -> Iterator[str]:
    refuse_utf16_file(path)
    content = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).rstrip()
    for number, line in enumerate(content.split(b"\n") if content else (), start=1):
        try:
            yield line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            where = f"{path}:{number}"
            reason = f"{error.reason} at byte {error.start}"
            raise ValueError(f"{where}: not UTF-8 ({reason})") from error


def write_json_lines(path: str | os.PathLike, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object a line, atomically; makes its folder if need be."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def context_digest(ids: Sequence[int], end: int) -> str:
    """What tells a context from others: 16 hexadecimal digits of the SHA-256 of its ids.

    Args:
        ids: the context's.
        end: the token that --add_bos puts after it, which does not count.
    """
    length = len(ids)
    while length and ids[length - 1] == end:
        length -= 1
    return hashlib.sha256(" ".join(map(str, ids[:length])).encode()).hexdigest()[:16]


METRICS_NAME = "metrics.jsonl"
# Where a line's figures are in the picture of a run.
_PLACES = {
    "loss": Place("loss", "training"),
    "valid_loss": Place("loss", "validation"),
    "lr": Place("learning rate", "learning rate"),
    "valid_ppl": Place("perplexity", "validation"),
    "best_ppl": Place("perplexity", "the best so far"),
}


REPORTERS = ("tensorboard", "plot")


def check_report_to(asked: Collection[str]) -> None:
    """Checks what ``--report_to`` asks for.

    Raises:
        ValueError: "none" and others, or TensorBoard by name where it is not installed.
    """
    check_none_is_alone(asked)
    if "tensorboard" in asked:
        check_installed("tensorboard")


class MetricsLog:
    """A run's figures: lines of ``metrics.jsonl``, and where else ``--report_to`` says.

    Lines of steps after the one that the run resumes from are removed: a killed run left them.

    Args:
        work_dir: the run's folder.
        after_step: the step that the run resumes from; 0 starts a new log.
        is_main: whether this is the process that writes; in others, nothing happens.
        report_to: some of `REPORTERS`, or "all" that are installed, or "none"; of them, what is not
            installed is left out. See `check_report_to`.
    """

    def __init__(
        self,
        work_dir: str | os.PathLike,
        after_step: int,
        is_main: bool = True,
        report_to: Collection[str] = ("all",),
    ):
        self.path = Path(work_dir, METRICS_NAME)
        self.is_main = is_main
        self._after_step = after_step
        asked = {*report_to}
        self._has_tensorboard = bool(asked & {"tensorboard", "all"}) and is_installed("tensorboard")
        self._draws = bool(asked & {"plot", "all"})
        self._writer = None
        if not is_main:
            return
        if self._draws and not is_matplotlib_available():
            level = logging.WARNING if "plot" in asked else logging.INFO
            logger.log(level, HOW_TO_GET_IT)
            self._draws = False
        kept = []
        if after_step > 0 and self.path.is_file():
            kept = [row for row in _sound_lines(self.path) if row["step"] <= after_step]
        write_json_lines(self.path, kept)

    def write(self, step: int, **figures: float) -> None:
        """Adds a line."""
        if not self.is_main:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self._has_tensorboard:
            self._show(step, figures)

    def draw(self) -> Path | None:
        """Writes ``learning_curves.png`` of the whole run, if that is asked for.

        Returns:
            Its path; None where there is no picture.
        """
        if not self.is_main or not self._draws:
            return None
        return write_curves(self.path.parent, _sound_lines(self.path), _PLACES.get)

    def _show(self, step: int, figures: dict[str, float]) -> None:
        """Adds figures to TensorBoard's file; the first ones open it, which takes seconds."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.path.with_name("runs")
            self._writer = SummaryWriter(folder, purge_step=self._after_step + 1)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def _sound_lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines, except those that a kill or a power cut has damaged."""
    rows, damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            row["step"] + 0  # every line of ours has it
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            damaged += 1
    if damaged:
        logger.warning("%s: left out %d lines that are damaged", path, damaged)
    return rows
