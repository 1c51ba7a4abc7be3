"""Files of the Hugging Face hub, with errors that a user can act on."""

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)


def hub_files(
    repo: str, forms: Sequence[Sequence[str]], folder: str | os.PathLike | None = None
) -> list[Path]:
    """The local paths of a repository's files, fetched unless they are there.

    huggingface_hub obeys ``HF_ENDPOINT``, ``HF_HOME`` and ``HF_HUB_OFFLINE``, and checks sizes.

    Args:
        repo: a repository's name, such as ``gpt2``.
        forms: names of files that belong together; the first form that can be had is taken.
        folder: where to put the files; by default the hub library's cache.

    Raises:
        OSError: there is no such repository, it has none of the forms, or it cannot be reached.
    """
    missing = []
    for names in forms:
        try:
            return [_hub_file(repo, name, folder) for name in names]
        except FileNotFoundError as error:
            missing.append(error)
    raise missing[0]


def _hub_file(repo: str, name: str, folder: str | os.PathLike | None) -> Path:
    try:
        return Path(hf_hub_download(repo, name, local_dir=folder))
    except (HFValidationError, GatedRepoError, RepositoryNotFoundError) as error:
        raise OSError(f"'{repo}' is neither a local folder nor an open model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"'{repo}' is not a local folder, and its {name} is neither in the hub's cache nor to "
            f"be had from the hub ({_reason(error)})"
        ) from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"'{repo}' has no {name} on the hub") from error
    except Exception as error:
        # Its HTTP client's own errors come through, and which client it has changes.
        raise OSError(f"'{repo}': {name} cannot be fetched ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
