"""Reads a model's weights: safetensors or torch's files, sharded or not, of a folder or the hub."""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from loralib.errors import CheckpointError
from loralib.io.hub import commit_of, is_offline_mode, resolve_file
from loralib.io.tensors import read_tensors
from loralib.text import counted, listed

from .file_utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

WEIGHTS_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def read_weights(
    name_or_path: str | os.PathLike, verify: bool = False, **where: Any
) -> dict[str, Tensor]:
    """Reads all tensors of a model, preferably from safetensors, else from torch's files.

    Args:
        name_or_path: a folder, or a repository's name.
        verify: as in `read_tensors`.
        where: as in `resolve_file`.

    Raises:
        OSError: there is no such model, or it has no weights.
        CheckpointError: they are damaged.
    """
    name_or_path = os.fspath(name_or_path)
    for name in WEIGHTS_NAMES:
        path = resolve_file(name_or_path, name, **where)
        if path is None:
            continue
        if not name.endswith(".index.json"):
            return read_tensors(path, verify)[0]
        return _read_shards(name_or_path, path, verify, **where)
    raise OSError(
        f"'{name_or_path}' has no weights{_if_not_asked(name_or_path, **where)}: neither "
        f"{SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, nor an index of shards"
    )


def _if_not_asked(name: str, local_files_only: bool = False, **_: Any) -> str:
    """Returns text that says that only the cache was looked into; "" for a folder or if online."""
    if os.path.isdir(name) or not (local_files_only or is_offline_mode()):
        return ""
    why = "local_files_only is set" if local_files_only else "offline mode is on"
    return f" in the cache, and {why}"


def _read_shards(name_or_path: str, index: Path, verify: bool, **where: Any) -> dict[str, Tensor]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({os.fspath(shard) for shard in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of shards") from error
    commit = commit_of(index)
    if commit is not None:  # a branch may move while its shards are fetched
        where["revision"] = commit
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: '{shard}' is not the name of a file next to it")
        path = resolve_file(name_or_path, shard, **where)
        if path is None:
            missing = f"missing{_if_not_asked(name_or_path, **where)}"
            raise CheckpointError(f"{index}: names the shard {shard}, which is {missing}")
        tensors.update(read_tensors(path, verify)[0])
    absent = weight_map.keys() - tensors.keys()
    if absent:
        raise CheckpointError(
            f"{index}: its shards lack {counted(len(absent), 'tensor')}: {listed(absent)}"
        )
    return tensors
