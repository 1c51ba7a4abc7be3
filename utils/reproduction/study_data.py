"""Prepares the study's data: a corpus for both bases, and the sets for the methods.

The corpus is the text of the training sets, and of the development sets of DART and WebNLG, without
any text on which methods are measured.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers.data.processors import InputExample, load_glue_split

TUNING_SHARE = 0.2
"""The share of the training set that learning rates are chosen on."""
DATA_SEED = 0
E2E_SOURCE = "e2e"
"""The source of DART's rows from E2E, which the study reserves for adapting GPT-2."""


@dataclass(frozen=True)
class StudyTask:
    """A task of GLUE as the study uses it.

    Args:
        name: the task's name in run_glue.py.
        title: its title in the tables.
        metric: the one of the task's metrics that the tables show.
        metric_title: the metric's title in the tables.
        train_rows: the largest number of rows of the training set, chosen at random.
    """

    name: str
    title: str
    metric: str
    metric_title: str
    train_rows: int


TASKS = (
    StudyTask("sst2", "SST-2", "accuracy", "accuracy", 5000),
    StudyTask("cola", "CoLA", "matthews_correlation", "Matthews correlation", 2000),
    StudyTask("rte", "RTE", "accuracy", "accuracy", 600),
    StudyTask("stsb", "STS-B", "pearson", "Pearson correlation", 1500),
)


def prepare_task(task: StudyTask, glue_dir: Path) -> dict[str, list[InputExample]]:
    """Returns the study's splits of a task, among them "train" in random order, and "validation".

    "tuning_train" and "tuning" are two parts of "train". Learning rates are chosen by training on
    the first and measuring on the second.
    """
    train = load_glue_split(task.name, glue_dir, "train")
    random.Random(DATA_SEED).shuffle(train)
    train = train[: task.train_rows]
    cut = round(len(train) * (1 - TUNING_SHARE))
    return {
        "train": train,
        "tuning_train": train[:cut],
        "tuning": train[cut:],
        "validation": load_glue_split(task.name, glue_dir, "validation"),
    }


def find_file(folder: Path, pattern: str) -> Path:
    """Returns the first file in a folder that matches a pattern.

    Raises:
        ValueError: no file does.
    """
    found = sorted(folder.glob(pattern))
    if not found:
        raise ValueError(
            f"{folder}: no file {pattern}; NLG/download_data.sh fetches it: give its data folder "
            "with --nlg_dir"
        )
    return found[0]


def _dart_texts(path: Path) -> Iterator[str]:
    for entry in json.loads(path.read_text(encoding="utf-8")):
        for annotation in entry["annotations"]:
            if annotation["source"] != E2E_SOURCE:
                yield annotation["text"]


def _webnlg_texts(path: Path) -> Iterator[str]:
    for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
        for record in entry.values():
            for lexicalisation in record["lexicalisations"]:
                yield lexicalisation["lex"]


def _texts(rows: Iterable[InputExample]) -> Iterator[str]:
    for row in rows:
        yield from filter(None, (row.text_a, row.text_b))


def whole_sentences(texts: Iterable[str]) -> list[str]:
    """Returns the texts that are not a part of another text, longest first.

    SST-2's training set repeats parts of most sentences as phrases, down to single words.
    """
    kept: list[str] = []
    parts: set[tuple[str, ...]] = set()
    for text in sorted(set(texts), key=lambda text: (-len(text), text)):
        words = tuple(text.split())
        if words in parts:
            continue
        kept.append(text)
        count = len(words)
        parts.update(
            words[start:end] for start in range(count) for end in range(start + 1, count + 1)
        )
    return kept


def _plain(text: str) -> str:
    """Returns a text in lower case without spaces, for comparing texts."""
    return "".join(text.lower().split())


def corpus_sentences(glue_dir: Path, nlg_dir: Path) -> list[str]:
    """Returns the sentences of the corpus, in random order.

    Args:
        glue_dir: the folder with GLUE's files, as utils/download_glue_data.py makes it.
        nlg_dir: the folder with E2E, WebNLG and DART, as NLG/download_data.sh makes it.

    Raises:
        ValueError: a file is missing, or is not in its format.
    """
    texts: list[str] = []
    for task in TASKS:
        own = _texts(load_glue_split(task.name, glue_dir, "train"))
        texts += whole_sentences(own) if task.name == "sst2" else own
    texts += _dart_texts(find_file(nlg_dir, "dart/dart-v1.1.1-full-dev.json"))
    texts += _webnlg_texts(find_file(nlg_dir, "webnlg*/dev.json"))
    measured = {
        _plain(text)
        for task in TASKS
        for text in _texts(load_glue_split(task.name, glue_dir, "validation"))
    }
    lines = {_plain(text): " ".join(text.split()) for text in texts}
    kept = [line for plain, line in lines.items() if plain and plain not in measured]
    random.Random(DATA_SEED).shuffle(kept)
    return kept
