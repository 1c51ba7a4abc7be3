"""Examples, features, the processor's interface, and the reader of tab-separated files."""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike

from loralib.io.encoding import refuse_utf16_file


@dataclass(slots=True)
class InputExample:
    """One row of a classification or regression task, as text.

    Args:
        guid: name of the row, unique within the task: "train-0".
        text_a: the first (or only) sentence.
        text_b: the second sentence of a pair.
        label: the label's word, or the score's digits; None if it is not known.
    """

    guid: str
    text_a: str
    text_b: str | None = None
    label: str | None = None

    def to_json_string(self) -> str:
        """Returns the example as JSON, one line per field."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class InputFeatures:
    """One row of a task, as the model takes it.

    Args:
        input_ids: token ids, one per token.
        attention_mask: 1 for a token to attend to, 0 for padding; as long as `input_ids`.
        token_type_ids: 0 for the first sentence, 1 for the second; as long as `input_ids`.
        label: class index (int) or score (float).
    """

    input_ids: list[int]
    attention_mask: list[int] | None = None
    token_type_ids: list[int] | None = None
    label: int | float | None = None

    def to_json_string(self) -> str:
        """Returns the features as one line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


class DataProcessor(ABC):
    """Turns the files of one task into lists of `InputExample`."""

    @abstractmethod
    def get_train_examples(self, data_dir: str | PathLike) -> list[InputExample]:
        """Returns the rows to train on."""

    @abstractmethod
    def get_dev_examples(self, data_dir: str | PathLike) -> list[InputExample]:
        """Returns the rows to evaluate on."""

    @abstractmethod
    def get_test_examples(self, data_dir: str | PathLike) -> list[InputExample]:
        """Returns the rows to predict; their labels may be None."""

    @abstractmethod
    def get_labels(self) -> list[str | None]:
        """Returns the label words in the order of their class indices; [None] for a score."""


def read_tsv(
    path: str | PathLike, columns: Sequence[str] | None = None, required: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Reads a tab-separated UTF-8 file row by row; quotes have no meaning in it.

    Only a line feed (after an optional carriage return) ends a row: GLUE's texts contain other
    characters that Python's text mode takes for line ends.

    Args:
        path: the file.
        columns: the column names of a file without a header; None reads them from line 1.
        required: columns that a header has to name.

    Yields:
        (line number from 1, {column: field}) for each row.

    Raises:
        ValueError: "FILE:LINE: …" for a row with another number of columns or one that is not
            UTF-8; a header without a required column; a file without rows, or in UTF-16.
    """
    refuse_utf16_file(path)
    lines = numbered_lines(path)
    if columns is None:
        columns = _header(path, lines, required)
    number = 0
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise ValueError(
                f"{path}:{number}: expected {len(columns)} tab-separated columns, "
                f"found {len(fields)}"
            )
        yield number, dict(zip(columns, fields, strict=True))
    if not number:
        raise ValueError(f"{path}: the file holds no rows")


def _header(
    path: str | PathLike, lines: Iterator[tuple[int, str]], required: Sequence[str]
) -> list[str]:
    for number, line in lines:
        columns = line.split("\t")
        missing = [name for name in required if name not in columns]
        if missing:
            raise ValueError(
                f"{path}:{number}: no column {', '.join(missing)} in the header "
                f"({', '.join(columns)})"
            )
        return columns
    return []


def numbered_lines(path: str | PathLike) -> Iterator[tuple[int, str]]:
    """Yields the lines of a UTF-8 file, without their ends, with their numbers from 1.

    Raises:
        ValueError: a line is not UTF-8.
    """
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8 text ({error.reason})") from error
            yield number, line.removesuffix("\n").removesuffix("\r")
