"""The GLUE tasks: one table of what their files hold, and thin processors over it.

`GLUE_TASKS` holds folder names, file names, columns, label words and the spellings of task names;
`glue_task` finds a task under any spelling. Source: the files that the benchmark publishes
(https://gluebenchmark.com), and the column names of its copy on the hub.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loralib.io.digests import file_digest

from ..text_labels import is_finite
from .utils import DataProcessor, InputExample, read_tsv

if TYPE_CHECKING:  # else imported where data is read: --help and wrong flags need not wait for it
    from datasets import Dataset

_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_FILES = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}


@dataclass(frozen=True)
class GlueTask:
    """What the files of one task hold.

    Args:
        name: the task's name on the hub and for `run_glue.py --task_name`.
        folder: the folder that the task's zip unpacks to.
        text_keys: names of the one or two texts on the hub, as run_glue.py uses them.
        text_columns: names of the same columns in the TSV files.
        label_column: name of the label's column in the TSV files.
        label_words: the labels as written in the files, in the order of their class indices;
            empty where the label is a score.
        files: the file of each split.
        headless: the column names of splits whose files have no header.
        spellings: other lower-case names that the task goes by.
        train_examples: rows of the training set; None without one.
    """

    name: str
    folder: str
    text_keys: tuple[str, str | None]
    text_columns: tuple[str, str | None]
    label_column: str = "label"
    label_words: tuple[str, ...] = _BINARY
    files: Mapping[str, str] = field(default_factory=lambda: _FILES)
    headless: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spellings: tuple[str, ...] = ()
    train_examples: int | None = None

    @property
    def output_mode(self) -> str:
        """ "classification", or "regression" where the label is a score."""
        return "classification" if self.label_words else "regression"

    @property
    def num_labels(self) -> int:
        """Outputs that a model needs: one per class, or one for a score."""
        return len(self.label_words) or 1

    def check_split(self, split: str) -> None:
        """Refuses the name of a split that the task does not have.

        Raises:
            ValueError: there is no such split.
        """
        if split not in self.files:
            raise ValueError(f"{self.name} has no split {split!r} (it has {', '.join(self.files)})")


_COLA_COLUMNS = ("source", "label", "annotation", "sentence")
_COLA = GlueTask(
    name="cola",
    folder="CoLA",
    text_keys=("sentence", None),
    text_columns=("sentence", None),
    headless={"train": _COLA_COLUMNS, "validation": _COLA_COLUMNS},
    train_examples=8_551,
)
_SST2 = GlueTask(
    name="sst2",
    folder="SST-2",
    text_keys=("sentence", None),
    text_columns=("sentence", None),
    spellings=("sst-2", "sst"),
    train_examples=67_349,
)
_MRPC = GlueTask(
    name="mrpc",
    folder="MRPC",
    text_keys=("sentence1", "sentence2"),
    text_columns=("#1 String", "#2 String"),
    label_column="Quality",
    train_examples=3_668,
)
_STSB = GlueTask(
    name="stsb",
    folder="STS-B",
    text_keys=("sentence1", "sentence2"),
    text_columns=("sentence1", "sentence2"),
    label_column="score",
    label_words=(),
    spellings=("sts-b", "sts"),
    train_examples=5_749,
)
_QQP = GlueTask(
    name="qqp",
    folder="QQP",
    text_keys=("question1", "question2"),
    text_columns=("question1", "question2"),
    label_column="is_duplicate",
    train_examples=363_846,
)
_MNLI = GlueTask(
    name="mnli",
    folder="MNLI",
    text_keys=("premise", "hypothesis"),
    text_columns=("sentence1", "sentence2"),
    label_column="gold_label",
    label_words=("entailment", "neutral", "contradiction"),
    files={
        "train": "train.tsv",
        "validation_matched": "dev_matched.tsv",
        "validation_mismatched": "dev_mismatched.tsv",
        "test_matched": "test_matched.tsv",
        "test_mismatched": "test_mismatched.tsv",
    },
    train_examples=392_702,
)
_MNLI_MM = replace(
    _MNLI,
    name="mnli-mm",
    files={
        "train": "train.tsv",
        "validation": "dev_mismatched.tsv",
        "test": "test_mismatched.tsv",
    },
    spellings=("mnli_mm", "mnli_mismatched"),
)
_QNLI = GlueTask(
    name="qnli",
    folder="QNLI",
    text_keys=("question", "sentence"),
    text_columns=("question", "sentence"),
    label_words=_ENTAILMENT,
    train_examples=104_743,
)
_RTE = GlueTask(
    name="rte",
    folder="RTE",
    text_keys=("sentence1", "sentence2"),
    text_columns=("sentence1", "sentence2"),
    label_words=_ENTAILMENT,
    train_examples=2_490,
)
_WNLI = GlueTask(
    name="wnli",
    folder="WNLI",
    text_keys=("sentence1", "sentence2"),
    text_columns=("sentence1", "sentence2"),
    train_examples=635,
)
_AX = replace(
    _MNLI,
    name="ax",
    folder="diagnostic",
    files={"test": "diagnostic.tsv"},
    spellings=("diagnostic",),
    train_examples=None,
)

GLUE_TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (_COLA, _SST2, _MRPC, _STSB, _QQP, _MNLI, _MNLI_MM, _QNLI, _RTE, _WNLI, _AX)
}
"""Every task under the name that run_glue.py and the hub give it."""

_BY_SPELLING = {
    spelling: task for task in GLUE_TASKS.values() for spelling in (task.name, *task.spellings)
}


def glue_task(name: str) -> GlueTask:
    """Returns the task of this name, in any usual spelling: "sst2", "SST-2" and "SST" are the same.

    Raises:
        ValueError: there is no such task.
    """
    task = _BY_SPELLING.get(name.lower())
    if task is None:
        raise ValueError(f"unknown GLUE task {name!r} (known: {', '.join(GLUE_TASKS)})")
    return task


def similar_glue_task(name: str) -> str | None:
    """Returns the name of the task that a misspelled one may mean, or None."""
    near = difflib.get_close_matches(name.lower(), _BY_SPELLING, 1, 0.7)
    return _BY_SPELLING[near[0]].name if near else None


def glue_file(task: GlueTask, data_dir: str | PathLike, split: str) -> Path:
    """Returns the path of a split's file.

    Args:
        task: a row of `GLUE_TASKS`.
        data_dir: the task's folder, or the folder that holds it.
        split: a key of `task.files`.

    Raises:
        ValueError: the task has no such split.
        FileNotFoundError: the file is not there.
        NotADirectoryError: `data_dir` is a file.
    """
    task.check_split(split)
    folder = Path(data_dir)
    if folder.is_file():
        raise NotADirectoryError(f"{folder}: is a file; give its folder")
    is_tasks_own = folder.name == task.folder or (folder / task.files[split]).is_file()
    if (folder / task.folder).is_dir() or not is_tasks_own:
        folder = folder / task.folder
    path = folder / task.files[split]
    if not path.is_file():
        command = download_command(task, folder.parent)
        raise FileNotFoundError(f"{path}: no such file; `{command}` fetches it")
    return path


def download_command(task: GlueTask, data_dir: str | PathLike) -> str:
    """Returns the command that fetches a task's files into its folder in `data_dir`."""
    folder = shlex.quote(str(data_dir))
    return f"python utils/download_glue_data.py --data_dir {folder} --tasks {task.folder}"


def iterate_glue_split(name: str, data_dir: str | PathLike, split: str) -> Iterator[InputExample]:
    """Reads one split row by row; arguments and errors are those of `load_glue_split`."""
    task = glue_task(name)
    path = glue_file(task, data_dir, split)
    may_lack_label = split.startswith("test")
    columns = [column for column in task.text_columns if column is not None]
    if not may_lack_label:
        columns.append(task.label_column)
    first, second = task.text_columns
    for index, (line, row) in enumerate(read_tsv(path, task.headless.get(split), columns)):
        label = row.get(task.label_column)
        if label is not None:
            _check_label(task, label, f"{path}:{line}")
        text_b = None if second is None else row[second]
        yield InputExample(f"{split}-{index}", row[first], text_b, label)


def load_glue_split(name: str, data_dir: str | PathLike, split: str) -> list[InputExample]:
    """Reads one split of a task from its TSV file; texts are not changed in any way.

    Args:
        name: the task, in any spelling.
        data_dir: the task's folder, or the folder that holds it.
        split: "train", "validation" or "test"; for MNLI "train", "validation_matched",
            "validation_mismatched", "test_matched" or "test_mismatched".

    Returns:
        One example per row, labeled with the file's own words (test files may have none).

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: unknown task or split; a row with a wrong number of columns, an unknown label
            or a score that is not a number (all with file and line); a file without rows.
    """
    return list(iterate_glue_split(name, data_dir, split))


def glue_table(name: str, data_dir: str | PathLike, split: str, cache_dir: str | None) -> Dataset:
    """Reads one split from its TSV file as the hub has it: texts, and class indices or scores.

    It is written to the cache of datasets, with the digest of the file as a part of the key. So
    later runs, and this run's other processes, find there what was made of it, such as its tokens.

    Args:
        name, data_dir, split: as in `load_glue_split`, which raises the same errors.
        cache_dir: the cache's folder; by default that of datasets.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    task = glue_task(name)
    content = file_digest(glue_file(task, data_dir, split))
    source = {"name": name, "data_dir": str(data_dir), "split": split}
    try:
        return Dataset.from_generator(
            _table_rows,
            gen_kwargs={**source, "sha256": content},
            cache_dir=cache_dir,
        )
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def _table_rows(
    name: str, data_dir: str, split: str, sha256: str
) -> Iterator[dict[str, str | int | float]]:
    """Yields the rows; `sha256` is not used, but all arguments make up the cache's key."""
    task = glue_task(name)
    number = task.label_words.index if task.label_words else float
    for example in iterate_glue_split(name, data_dir, split):
        texts = zip(task.text_keys, (example.text_a, example.text_b), strict=True)
        row: dict[str, Any] = {key: text for key, text in texts if key}
        yield row if example.label is None else {**row, "label": number(example.label)}


def _check_label(task: GlueTask, label: str, where: str) -> None:
    if task.label_words:
        if label not in task.label_words:
            expected = ", ".join(task.label_words)
            raise ValueError(f"{where}: unknown label {label!r} (expected {expected})")
    elif not is_finite(label):
        raise ValueError(f"{where}: unknown label {label!r} (expected a number)")


class GlueProcessor(DataProcessor):
    """What the processors of all tasks share; a subclass names its task.

    Attributes:
        task: the row of `GLUE_TASKS`.
        dev_split: the split that `get_dev_examples` reads.
        test_split: the split that `get_test_examples` reads.
    """

    task: GlueTask
    dev_split = "validation"
    test_split = "test"

    def get_train_examples(self, data_dir: str | PathLike) -> list[InputExample]:
        """Returns the rows of train.tsv; see `load_glue_split` for `data_dir` and errors."""
        return load_glue_split(self.task.name, data_dir, "train")

    def get_dev_examples(self, data_dir: str | PathLike) -> list[InputExample]:
        """Returns the rows of the dev file; see `load_glue_split` for `data_dir` and errors."""
        return load_glue_split(self.task.name, data_dir, self.dev_split)

    def get_test_examples(self, data_dir: str | PathLike) -> list[InputExample]:
        """Returns the rows of the test file; see `load_glue_split` for `data_dir` and errors."""
        return load_glue_split(self.task.name, data_dir, self.test_split)

    def get_labels(self) -> list[str | None]:
        """Returns the label words in the order of their class indices; [None] for a score."""
        return list(self.task.label_words) or [None]


class ColaProcessor(GlueProcessor):
    """CoLA: is a sentence acceptable?"""

    task = _COLA


class MnliProcessor(GlueProcessor):
    """MultiNLI, evaluated on the genres it was trained on (matched)."""

    task = _MNLI
    dev_split = "validation_matched"
    test_split = "test_matched"


class MnliMismatchedProcessor(GlueProcessor):
    """MultiNLI, evaluated on other genres (mismatched)."""

    task = _MNLI_MM


class MrpcProcessor(GlueProcessor):
    """MRPC: does one sentence paraphrase the other?"""

    task = _MRPC


class Sst2Processor(GlueProcessor):
    """SST-2: is a film review's phrase positive?"""

    task = _SST2


class StsbProcessor(GlueProcessor):
    """STS-B: how similar are two sentences, from 0 to 5?"""

    task = _STSB


class QqpProcessor(GlueProcessor):
    """QQP: do two questions ask the same?"""

    task = _QQP


class QnliProcessor(GlueProcessor):
    """QNLI: does the sentence answer the question?"""

    task = _QNLI


class RteProcessor(GlueProcessor):
    """RTE: does the first sentence entail the second?"""

    task = _RTE


class WnliProcessor(GlueProcessor):
    """WNLI: is the pronoun replaced by what it stands for?"""

    task = _WNLI


_PROCESSORS: tuple[type[GlueProcessor], ...] = (
    ColaProcessor,
    MnliProcessor,
    MnliMismatchedProcessor,
    MrpcProcessor,
    Sst2Processor,
    StsbProcessor,
    QqpProcessor,
    QnliProcessor,
    RteProcessor,
    WnliProcessor,
)

glue_processors: dict[str, type[GlueProcessor]] = {
    spelling: processor
    for processor in _PROCESSORS
    for spelling in (processor.task.name, *processor.task.spellings)
}
"""The processor of each task, under every lower-case spelling of its name."""

glue_output_modes: dict[str, str] = {
    spelling: processor.task.output_mode for spelling, processor in glue_processors.items()
}
""""classification" or "regression", under the same names."""

glue_tasks_num_labels: dict[str, int] = {
    spelling: processor.task.num_labels for spelling, processor in glue_processors.items()
}
"""Outputs that a model needs for the task, under the same names."""
