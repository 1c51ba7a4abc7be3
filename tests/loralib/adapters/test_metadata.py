"""An adapter's metadata: field by field, unknown, damaged."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_adapters import INFO, tiny_adapter

from loralib.adapters.adapter import Adapter
from loralib.adapters.checksums import checksum
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError
from loralib.io.tensors import write_tensors


def test_metadata_is_json_by_field(tmp_path):
    write_adapter(tmp_path / "a.safetensors", tiny_adapter())
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata.pop("format") == "pt"
    assert len(metadata.pop("digest")) == 64
    assert {key: json.loads(value) for key, value in metadata.items()} == {
        "rank": 2,
        "alpha": 4.0,
        "targets": ["query", "value"],
        "bias": "none",
        "base": "some/base",
        "base_fingerprint": "0123456789abcdef",
        "task": "mnli",
        "labels": ["entailment", "neutral", "contradiction"],
    }


def test_what_is_unknown_is_not_written(tmp_path):
    info = LoraMetadata(rank=2, alpha=16, targets=("query", "value"))
    assert info.to_metadata().keys() == {"rank", "alpha", "targets", "bias"}
    write_adapter(tmp_path / "a.safetensors", tiny_adapter(info))
    assert read_adapter(tmp_path / "a.safetensors").metadata == info


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "task": '"rte"', "who": "knows"}])
def test_files_without_metadata(tmp_path, metadata):
    save_file(tiny_adapter().tensors, tmp_path / "a.safetensors", metadata)
    assert read_adapter(tmp_path / "a.safetensors").metadata is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": "two"}, "its metadata is damaged"),
        ({"rank": None}, "its metadata is damaged"),
        ({"alpha": None}, "its metadata is damaged"),
        ({"targets": "3"}, "its metadata is damaged"),
        ({"labels": "true"}, "its metadata is damaged"),
        ({"rank": "0"}, "rank 0 in its metadata"),
        ({"rank": "2.5"}, "rank 2.5 in its metadata"),
        ({"alpha": '"4"'}, "alpha '4' in its metadata"),
    ],
)
def test_damaged_metadata(tmp_path, changed, message):
    metadata = {**INFO.to_metadata(), **changed}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path, tensors = tmp_path / "a.safetensors", tiny_adapter().tensors
    right = {"digest": checksum(tensors, metadata)}
    wrong = {"digest": checksum(tensors, INFO.to_metadata())}
    for digest, expected in ((right, message), (wrong, "damaged"), ({}, "damaged: the checksum")):
        save_file(tensors, path, metadata | digest)
        with pytest.raises(
            CheckpointError, match=f"a.safetensors: {re.escape(expected)}"
        ) as caught:
            read_adapter(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("alpha", [0, -1, float("inf"), float("nan"), "8"])
def test_an_alpha_that_is_not_above_0(tmp_path, alpha):
    tensors = {"roberta.query.lora_A": torch.ones(2, 4), "roberta.query.lora_B": torch.ones(4, 2)}
    path = tmp_path / "lora.safetensors"
    info = LoraMetadata(rank=2, alpha=alpha, targets=("query",))
    with pytest.raises(CheckpointError, match="alpha"):
        write_adapter(path, Adapter(tensors, info))
    metadata = info.to_metadata()
    write_tensors(path, tensors, {**metadata, "digest": checksum(tensors, metadata)})
    with pytest.raises(CheckpointError, match="alpha"):
        read_adapter(path)
