"""Where files come from, a local folder or the hub, and the base class of what models return."""

import os
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path

import huggingface_hub
from huggingface_hub import _CACHED_NO_EXIST
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


def is_offline_mode() -> bool:
    """Whether ``HF_HUB_OFFLINE`` or ``TRANSFORMERS_OFFLINE`` asks for cached files only."""
    on = {"1", "true", "yes", "on"}
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in on for name in switches)


def resolve_file(
    name_or_path: str | os.PathLike,
    filename: str,
    *,
    cache_dir: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Path | None:
    """The local path of `filename` in a model folder or in a repository of the hub.

    Args:
        name_or_path: a local folder, or a repository's name such as ``roberta-base``.
        filename: a file's name within it.
        cache_dir: where downloads are kept; the hub library's cache by default.
        revision: branch, tag or commit of the repository.
        token: True for the token that the hub library has stored, or a token.

    Returns:
        The path, or None where the folder or the repository has no such file.

    Raises:
        OSError: `name_or_path` is neither a folder nor a repository that can be reached.
    """
    name = os.fspath(name_or_path)
    if os.path.isdir(name):
        path = Path(name, filename)
        return path if path.is_file() else None
    where = {"revision": revision, "cache_dir": cache_dir}
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                name, filename, token=token or None, local_files_only=is_offline_mode(), **where
            )
        )
    except GatedRepoError as error:
        raise OSError(f"'{name}' needs access rights: log in with `hf auth login`") from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise OSError(
            f"'{name}' is neither a local folder nor a model on the hub "
            "(a private one needs `hf auth login` and --use_auth_token)"
        ) from error
    except RevisionNotFoundError as error:
        raise OSError(f"'{name}' has no revision '{revision}' on the hub") from error
    except LocalEntryNotFoundError as error:
        if _is_absent(name, filename, where):
            return None
        offline = "offline mode is on and it is not in the cache"
        why = offline if is_offline_mode() else _reason(error)
        raise OSError(f"'{name}' is not a local folder and cannot be fetched: {why}") from error
    except EntryNotFoundError:
        return None
    except Exception as error:
        # Its HTTP client's own errors come through, and which client it has changes.
        raise OSError(f"'{name}' cannot be fetched from the hub: {_reason(error)}") from error


def _is_absent(name: str, filename: str, where: dict[str, str | None]) -> bool:
    """Whether the cache knows, or offline mode has to assume, that a repository lacks a file."""
    if huggingface_hub.try_to_load_from_cache(name, filename, **where) is _CACHED_NO_EXIST:
        return True
    # A cache that was filled by other means than ours holds no notes of absent files.
    cached = huggingface_hub.try_to_load_from_cache(name, CONFIG_NAME, **where)
    return is_offline_mode() and isinstance(cached, str)


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ModelOutput(OrderedDict):
    """What a model returns: a dataclass whose set fields are also dict entries and a tuple's items.

    ``output.logits``, ``output["logits"]`` and ``output[1]`` name the same tensor; fields that are
    None are skipped in the dict and in the tuple.
    """

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if value is None:
            self.pop(name, None)
        else:
            super().__setitem__(name, value)

    def __setitem__(self, key, value):
        setattr(self, key, value)

    def to_tuple(self) -> tuple:
        """The set fields, in the order of their declaration."""
        return tuple(self[field.name] for field in fields(self) if field.name in self)
