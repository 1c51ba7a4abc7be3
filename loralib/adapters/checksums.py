"""Computes the checksum in an adapter's metadata, and compares it when a file is read."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..io.tensors import is_safetensors, read_tensors
from .adapter import Kind
from .metadata import AdapterMetadata


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Returns the SHA-256 of the metadata and of the tensors' names, dtypes, shapes and bytes."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def with_checksum(tensors: Mapping[str, Tensor], metadata: AdapterMetadata) -> dict[str, str]:
    """Returns an adapter's metadata as its file holds it, with the checksum."""
    fields = metadata.to_metadata()
    return {**fields, "digest": checksum(tensors, fields)}


def read_checked(path: Path, kind: Kind) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the tensors and metadata of a file of this kind, and compares its checksum if any.

    Raises:
        CheckpointError: for the reasons of `read_tensors`, or because the checksum is wrong, or is
            missing in a file that must have one.
    """
    tensors, metadata = read_tensors(path, verify=True)
    metadata.pop("format", None)
    recorded = metadata.pop("digest", None)
    if recorded is not None:
        if not all(isinstance(text, str) for entry in metadata.items() for text in entry):
            raise CheckpointError(f"{path}: its metadata is damaged (not text)")
        if recorded != checksum(tensors, metadata):
            raise CheckpointError(
                f"{path}: damaged: its content is not what was written (checksum)"
            )
    # A torch archive has its own checksums, which cover its metadata as well.
    elif kind.metadata.own & metadata.keys() and is_safetensors(path):
        raise CheckpointError(f"{path}: damaged: the checksum that belongs to it is missing")
    return tensors, metadata
