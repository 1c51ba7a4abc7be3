"""Download the tasks of GLUE.

    python utils/download_glue_data.py --data_dir glue_data --tasks all

Each task becomes a folder of TSV files in --data_dir, and no folder is ever incomplete: the files
are written to a hidden folder, their rows are counted, and only then is the folder renamed. A
download that stops is kept as FILE.part and continued by the next run. A complete task is skipped.
"""

import argparse
import logging
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin, urlsplit

from loralib.io.archives import ZIP_ERRORS, is_of_the_disk
from loralib.io.atomic import sync_file
from loralib.io.command_line import ArgumentParser
from loralib.io.downloads import download
from loralib.training.process import error_in_words, run
from transformers.data.processors.glue import GlueTask, glue_task, iterate_glue_split
from transformers.data.processors.utils import read_tsv

logger = logging.getLogger("download_glue_data")

BASE_URL = "https://dl.fbaipublicfiles.com/glue/data"
SENTEVAL = "../../senteval/senteval_data"  # relative to BASE_URL
MRPC_TRAIN = "msr_paraphrase_train.txt"
MRPC_TEST = "msr_paraphrase_test.txt"
MRPC_DEV_IDS = "mrpc_dev_ids.tsv"
MRPC_IDS = ("#1 ID", "#2 ID")
MRPC_COLUMNS = ("Quality", *MRPC_IDS, "#1 String", "#2 String")


@dataclass(frozen=True)
class Release:
    """The published files of a task.

    Args:
        files: the files' addresses relative to --base_url.
        rows: the number of rows in each split.
    """

    files: tuple[str, ...]
    rows: Mapping[str, int]


def _rows(task: str, dev: int, test: int) -> dict[str, int]:
    return {"train": glue_task(task).train_examples, "validation": dev, "test": test}


RELEASES = {
    "CoLA": Release(("CoLA.zip",), _rows("CoLA", 1_043, 1_063)),
    "SST": Release(("SST-2.zip",), _rows("SST", 872, 1_821)),
    "MRPC": Release(
        (f"{SENTEVAL}/{MRPC_TRAIN}", f"{SENTEVAL}/{MRPC_TEST}", MRPC_DEV_IDS),
        _rows("MRPC", 408, 1_725),
    ),
    "QQP": Release(("QQP-clean.zip",), _rows("QQP", 40_430, 390_965)),
    "STS": Release(("STS-B.zip",), _rows("STS", 1_500, 1_379)),
    "MNLI": Release(
        ("MNLI.zip",),
        {
            "train": glue_task("MNLI").train_examples,
            "validation_matched": 9_815,
            "validation_mismatched": 9_832,
            "test_matched": 9_796,
            "test_mismatched": 9_847,
        },
    ),
    "QNLI": Release(("QNLIv2.zip",), _rows("QNLI", 5_463, 5_463)),
    "RTE": Release(("RTE.zip",), _rows("RTE", 277, 3_000)),
    "WNLI": Release(("WNLI.zip",), _rows("WNLI", 71, 146)),
    "diagnostic": Release(("AX.tsv",), {"test": 1_104}),
}
"""Releases by the names that --tasks takes; `glue_task` also knows other spellings."""


def _known() -> str:
    """Returns the tasks by GLUE's own names, which are those of their folders."""
    return ", ".join(glue_task(key).folder for key in RELEASES)


def parse_tasks(names: str) -> dict[str, GlueTask]:
    """Parses a list of tasks, separated by commas or blanks, or "all".

    Returns:
        {key of `RELEASES`: task}, without duplicates, in the order given.

    Raises:
        ValueError: a name is not one of GLUE's tasks, or the list is empty.
    """
    published = {glue_task(key).name: key for key in RELEASES}
    wanted = list(RELEASES) if names.strip().lower() == "all" else names.replace(",", " ").split()
    tasks = {}
    for name in wanted:
        try:
            task = glue_task(name)
            tasks[published[task.name]] = task
        except (ValueError, KeyError):
            raise ValueError(f"unknown task {name!r} (known: {_known()}, or all)") from None
    if not tasks:
        raise ValueError("no task is named")
    return tasks


def find_fault(task: GlueTask, rows: Mapping[str, int], data_dir: Path) -> str | None:
    """Returns what is wrong with a task's folder in `data_dir`; None if nothing is."""
    for split, expected in rows.items():
        file = f"{task.folder}/{task.files[split]}"
        if not (data_dir / file).is_file():
            return f"{file} is missing"
        try:
            found = sum(1 for _ in iterate_glue_split(task.name, data_dir, split))
        except ValueError as error:
            return str(error).removeprefix(f"{data_dir}{os.sep}")
        if found != expected:
            return f"{file}: expected {expected:,} rows, found {found:,}"
    return None


def install(key: str, task: GlueTask, data_dir: Path, base_url: str, mrpc: Path | None) -> None:
    """Downloads one task's folder to `data_dir`, unless it exists.

    Args:
        key: the task's key in `RELEASES`.
        task: the task.
        data_dir: the folder in which the task's folder is made.
        base_url: the address of the folder with the zips.
        mrpc: a folder with the files of the Microsoft Research paraphrase corpus, if given.

    Raises:
        OSError: the network, the server or the disk failed.
        ValueError: the downloaded files are not the task's data, or the existing folder is not
            complete.
    """
    release, folder = RELEASES[key], data_dir / task.folder
    if not folder.exists():
        _download(key, task, data_dir, base_url, mrpc)
    elif fault := find_fault(task, release.rows, data_dir):
        raise ValueError(
            f"{folder} exists but is not complete ({fault}); move it away and run again"
        )
    logger.info("%s is complete", folder)


def _download(key: str, task: GlueTask, data_dir: Path, base_url: str, mrpc: Path | None) -> None:
    release = RELEASES[key]
    own = _own_files(mrpc) if mrpc is not None and key == "MRPC" else {}
    sources, by_hand, fetched = [], [], []
    for file in release.files:
        name = PurePosixPath(file).name
        path = data_dir / name
        sources.append(own.get(name, path))
        if name in own:
            continue
        if path.exists():
            by_hand.append(path)
        else:
            way_out = f"run again, or put the file at {path} yourself"
            if name == MRPC_DEV_IDS:
                way_out += (
                    f"; MRPC's dev split needs this list: put it, with {MRPC_TRAIN} and "
                    f"{MRPC_TEST}, into a folder and name that with --path_to_mrpc"
                )
            download(urljoin(f"{base_url}/", file), path, way_out)
            fetched.append(path)
    try:
        assemble(task, release.rows, sources, data_dir)
    except ValueError as error:
        _remove(fetched)
        if by_hand:
            there = ", ".join(map(str, by_hand))
            raise ValueError(
                f"{error}; remove {there} to download it again, or put the published file there"
            ) from error
        if not fetched:
            raise
        raise ValueError(f"{error}; the download was removed; run again to repeat it") from error
    _remove(fetched)


def _own_files(folder: Path) -> dict[str, Path]:
    """Returns the user's files of the paraphrase corpus: {published name: path}."""
    files = {name: folder / name for name in (MRPC_TRAIN, MRPC_TEST)}
    for path in files.values():
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file (from --path_to_mrpc)")
    for name in (MRPC_DEV_IDS, "dev_ids.tsv"):
        if (folder / name).is_file():
            files.setdefault(MRPC_DEV_IDS, folder / name)
    return files


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink()


def assemble(
    task: GlueTask, rows: Mapping[str, int], sources: Sequence[Path], data_dir: Path
) -> None:
    """Makes a task's folder from its downloaded files, atomically.

    Raises:
        ValueError: a source is damaged, or the folder would not hold the task's rows.
    """
    scratch = data_dir / f".{task.folder}.incomplete"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        (scratch / task.folder).mkdir(parents=True)
        if task.name == "mrpc":
            convert_mrpc(*sources, scratch / task.folder)
        elif task.name == "ax":
            shutil.copyfile(sources[0], scratch / task.folder / task.files["test"])
        else:
            unpack(sources[0], task.folder, scratch)
        fault = find_fault(task, rows, scratch)
        if fault is not None:
            raise ValueError(f"not the data of GLUE: {fault}")
        for path in (scratch / task.folder).rglob("*"):
            if path.is_file():
                sync_file(path)
        os.replace(scratch / task.folder, data_dir / task.folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def unpack(archive: Path, folder: str, target: Path) -> None:
    """Unpacks one folder of a zip file into `target`, after checking the whole file.

    Raises:
        ValueError: the zip is truncated or damaged, or names a path outside of `target`.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                if _leads_outside(name):
                    raise ValueError(f"{archive.name} names a path outside its folder: {name!r}")
            damaged = file.testzip()
            if damaged is not None:
                raise ValueError(f"{archive.name} is damaged: wrong checksum of {damaged}")
            file.extractall(target, [n for n in file.namelist() if n.startswith(f"{folder}/")])
    except (OSError, *ZIP_ERRORS) as error:
        if isinstance(error, OSError) and is_of_the_disk(error):
            raise
        raise ValueError(f"{archive.name} is damaged: {error}") from error


def _leads_outside(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", name) is not None


def convert_mrpc(train: Path, test: Path, dev_ids: Path, folder: Path) -> None:
    """Writes MRPC's train.tsv, dev.tsv and test.tsv from the paraphrase corpus.

    Args:
        train: the corpus's training part; rows whose ids are in `dev_ids` become the dev split.
        test: the corpus's test part; its labels are left out.
        dev_ids: a file with two ids per row, without a header.
        folder: the folder to write to.

    Raises:
        ValueError: a file has another layout.
    """
    listed = {(row["#1 ID"], row["#2 ID"]) for _, row in read_tsv(dev_ids, MRPC_IDS)}
    lines = {"train.tsv": ["\t".join(MRPC_COLUMNS)], "dev.tsv": ["\t".join(MRPC_COLUMNS)]}
    for _, row in read_tsv(train, required=MRPC_COLUMNS):
        file = "dev.tsv" if (row["#1 ID"], row["#2 ID"]) in listed else "train.tsv"
        lines[file].append("\t".join(row[column] for column in MRPC_COLUMNS))
    lines["test.tsv"] = ["\t".join(("index", *MRPC_COLUMNS[1:]))]
    for index, (_, row) in enumerate(read_tsv(test, required=MRPC_COLUMNS)):
        fields = [row[column] for column in MRPC_COLUMNS[1:]]
        lines["test.tsv"].append("\t".join((str(index), *fields)))
    for file, content in lines.items():
        (folder / file).write_text("\n".join(content) + "\n", encoding="utf-8", newline="\n")


def _url(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an http or https address")
    return text.rstrip("/")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; `tasks` are as `parse_tasks` returns them."""
    parser = ArgumentParser(description="Download the tasks of the GLUE benchmark.")
    parser.add_argument(
        "--data_dir",
        type=Path,
        default=Path("glue_data"),
        help="folder that gets one folder per task (default: glue_data)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["all"],
        help=f"names, or all (the default): {_known()}",
    )
    parser.add_argument(
        "--base_url",
        type=_url,
        default=BASE_URL,
        help="address of the folder with the zips, for a mirror; the files of MRPC are expected "
        f"at {SENTEVAL} relative to it (default: {BASE_URL})",
    )
    parser.add_argument(
        "--path_to_mrpc",
        type=Path,
        help=f"folder that holds {MRPC_TRAIN} and {MRPC_TEST}, and {MRPC_DEV_IDS} if there is no "
        "network: MRPC is made from these files instead of downloaded ones",
    )
    args = parser.parse_args(argv)
    try:
        args.tasks = parse_tasks(" ".join(args.tasks))
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and downloads; returns 0 if every task is complete, else 1."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    args = parse_args(argv)
    args.data_dir.mkdir(parents=True, exist_ok=True)
    failed = False
    for key, task in args.tasks.items():
        try:
            install(key, task, args.data_dir, args.base_url, args.path_to_mrpc)
        except (OSError, ValueError) as error:
            logger.error("%s: %s", task.folder, error_in_words(error))
            if isinstance(error, ConnectionError):  # the other tasks would fail in the same way
                return 1
            failed = True
    return int(failed)


if __name__ == "__main__":
    run(lambda: sys.exit(main()))
