"""Downloads what the NLG experiments need: the vocabulary, the corpora and pretrained GPT-2.

    python src/download.py vocab e2e webnlg dart gpt2 gpt2-medium gpt2-large

Files are written atomically, under the names that the other scripts expect; existing ones are kept.
A download that stops is kept as FILE.part, and continued by the next run. The corpora
and the vocabulary come from the addresses where they are published, the checkpoints from the
Hugging Face hub (``HF_ENDPOINT`` names a mirror).
"""

import logging
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from format_converting_e2e import as_lines
from hub import hub_files
from json_lines import write_lines
from loralib.io.archives import ZIP_ERRORS, is_of_the_disk
from loralib.io.command_line import ArgumentParser
from loralib.io.downloads import download
from loralib.io.tensors import read_tensors, write_tensors
from loralib.training.process import error_in_words
from script import run

logger = logging.getLogger(__name__)

VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
E2E_URL = "https://github.com/tuetschek/e2e-dataset/releases/download/v1.0.0/e2e-dataset.zip"
# WebNLG publishes its challenge of 2017 as XML, the release has it as JSON.
WEBNLG_URL = "https://raw.githubusercontent.com/microsoft/LoRA/main/NLG/data/webnlg_challenge_2017"
DART_URL = "https://raw.githubusercontent.com/Yale-LILY/dart/master/data/v1.1.1"


@dataclass(frozen=True)
class File:
    """A file that is kept as it is published.

    Args:
        path: the path to write, relative to the folder NLG.
        url: the file's address.
        size: the size in bytes, if it is known beforehand.
    """

    path: str
    url: str
    size: int | None = None


def _webnlg(split: str, size: int | None = None) -> File:
    return File(f"data/webnlg_challenge_2017/{split}.json", f"{WEBNLG_URL}/{split}.json", size)


def _dart(split: str, size: int | None = None) -> File:
    name = f"dart-v1.1.1-full-{split}.json"
    return File(f"data/dart/{name}", f"{DART_URL}/{name}", size)


FILES = {
    "vocab": (
        File("vocab/encoder.json", f"{VOCAB_URL}/encoder.json", 1_042_301),
        File("vocab/vocab.bpe", f"{VOCAB_URL}/vocab.bpe", 456_318),
    ),
    "webnlg": (_webnlg("train"), _webnlg("dev", 2_596_106), _webnlg("test")),
    "dart": (_dart("train"), _dart("dev", 2_370_637), _dart("test")),
}
"""The files that are kept as published."""

E2E_ARCHIVE = "data/e2e/e2e-dataset.zip"
"""E2E's archive, below the folder NLG: if it exists, it is not downloaded."""

E2E_SPLITS = (
    ("trainset.csv", "data/e2e/train.txt", 42_061),
    ("devset.csv", "data/e2e/valid.txt", 4_672),
    ("testset_w_refs.csv", "data/e2e/test.txt", 4_693),
)
"""E2E's published files in their archive, the files made of them, and their number of lines."""

CHECKPOINTS = ("gpt2", "gpt2-medium", "gpt2-large")


def fetch_files(files: tuple[File, ...], root: Path) -> None:
    """Downloads files below `root`, except those that exist.

    Raises:
        OSError: a file cannot be downloaded.
        ValueError: a file exists, but has another size.
    """
    for file in files:
        path = root / file.path
        if not path.exists():
            _fetch(file.url, path, file.size)
        elif file.size not in (None, path.stat().st_size):
            raise ValueError(
                f"{path} has {path.stat().st_size:,} bytes, not {file.size:,}; "
                "move it away and run again"
            )
        logger.info("%s exists", path)


def _fetch(url: str, path: Path, size: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    download(url, path, f"try again, or put the file at {path} yourself", size)


def fetch_e2e(root: Path) -> None:
    """Downloads E2E below `root`, in the release's format, unless its archive is there.

    Raises:
        OSError: the archive cannot be downloaded.
        ValueError: the existing files, or the downloaded ones, are not the corpus.
    """
    wanted = [split for split in E2E_SPLITS if not (root / split[1]).exists()]
    if wanted:
        archive = root / E2E_ARCHIVE
        is_own = archive.exists()
        if not is_own:
            _fetch(E2E_URL, archive)
        try:
            _unpack_e2e(archive, str(archive) if is_own else E2E_URL, wanted, root)
        except (OSError, ValueError) as error:
            if not is_own:
                raise
            raise ValueError(
                f"{error}; remove it to download it again, or put the published file there"
            ) from error
        finally:
            if not is_own:
                archive.unlink()
    for _, target, rows in E2E_SPLITS:
        found = (root / target).read_bytes().count(b"\n")
        if found != rows:
            raise ValueError(
                f"{root / target} has {found:,} lines, not {rows:,}; move it away and run again"
            )
        logger.info("%s exists", root / target)


def _unpack_e2e(archive: Path, source: str, splits: list[tuple[str, str, int]], root: Path) -> None:
    """Converts splits in E2E's archive, which errors call `source`."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, target, rows in splits:
            table = Path(scratch, name)
            table.write_bytes(_read_member(archive, source, f"e2e-dataset/{name}"))
            try:
                lines = as_lines(table)
            except ValueError as error:
                reason = str(error).removeprefix(f"{scratch}{os.sep}")
                raise ValueError(f"{source}: {reason}") from error
            if len(lines) != rows:
                raise ValueError(f"{source}: {name} has {len(lines):,} rows, not {rows:,}")
            write_lines(root / target, lines)


def _read_member(archive: Path, source: str, name: str) -> bytes:
    """Returns the content of a file in an archive, which errors call `source`."""
    try:
        with zipfile.ZipFile(archive) as file:
            return file.read(name)
    except (KeyError, ValueError, OSError, *ZIP_ERRORS) as error:
        if isinstance(error, OSError) and is_of_the_disk(error):
            raise OSError(error_in_words(error)) from error
        reason = str(error) or "it is truncated"
        raise ValueError(f"{source}: holds no {name} ({reason})") from error


def fetch_checkpoint(name: str, root: Path) -> None:
    """Downloads a pretrained model as ``pretrained_checkpoints/NAME-pytorch_model.bin`` in `root`.

    Raises:
        OSError: the hub does not have it, or cannot be reached.
    """
    path = root / "pretrained_checkpoints" / f"{name}-pytorch_model.bin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # On the same disk, so that the file can be moved instead of copied.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{name}.") as folder:
            formats = (["pytorch_model.bin"], ["model.safetensors"])
            try:
                (source,) = hub_files(f"openai-community/{name}", formats, folder)
            except OSError as error:
                raise OSError(
                    f"{error}; try again, or put its pytorch_model.bin at {path} yourself"
                ) from error
            if source.suffix == ".bin":
                source.replace(path)
            else:
                write_tensors(path, read_tensors(source)[0])
    logger.info("%s exists", path)


def _fetcher(name: str) -> Callable[[Path], None]:
    if name == "e2e":
        return fetch_e2e
    return partial(fetch_files, FILES[name]) if name in FILES else partial(fetch_checkpoint, name)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and fetches everything it names, even if some of it fails.

    Raises:
        OSError: the last failure; earlier ones have been logged.
    """
    parser = ArgumentParser(
        description="Fetch GPT-2's vocabulary, the corpora, and pretrained models."
    )
    parser.add_argument(
        "names", nargs="+", choices=("e2e", *FILES, *CHECKPOINTS), help="what to fetch"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="folder for vocab, data and pretrained_checkpoints (default: here)",
    )
    args = parser.parse_args(argv)
    failures = []
    for name in args.names:
        try:
            _fetcher(name)(args.folder)
        except (OSError, ValueError) as error:
            failures.append(f"{name}: {error_in_words(error)}")
    for failure in failures[:-1]:
        logger.error("%s", failure)
    if failures:
        raise OSError(failures[-1])


if __name__ == "__main__":
    run(main)
