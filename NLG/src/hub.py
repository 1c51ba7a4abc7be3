"""Fetches files from the Hugging Face hub that belong together."""

import os
from collections.abc import Sequence
from pathlib import Path

from loralib.io.hub import fetch_file


def hub_files(
    repo: str, formats: Sequence[Sequence[str]], folder: str | os.PathLike | None = None
) -> list[Path]:
    """Returns the local paths of a repository's files; fetches them unless they exist.

    Args:
        repo: a repository's name, such as ``gpt2``.
        formats: groups of files that belong together; the first one that is complete is taken.
        folder: where to put the files; by default the hub library's cache.

    Raises:
        OSError: there is no such repository, it has none of the formats, or it cannot be reached.
    """
    missing = []
    for names in formats:
        try:
            return [fetch_file(repo, name, folder=folder) for name in names]
        except FileNotFoundError as error:
            missing.append(error)
    raise missing[0]
