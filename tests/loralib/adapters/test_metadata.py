"""Tests of an adapter's metadata: its fields, unknown ones, and invalid ones."""

import json
import re
from dataclasses import replace

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


def test_each_field_of_metadata_is_json(tmp_path):
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


@pytest.mark.parametrize("columns", [("review",), ("premise", "claim")])
def test_there_are_one_or_two_text_columns(tmp_path, columns):
    write_adapter(tmp_path / "a.safetensors", tiny_adapter(replace(INFO, text_columns=columns)))
    assert read_adapter(tmp_path / "a.safetensors").metadata.text_columns == columns


def test_unknown_fields_are_not_written(tmp_path):
    info = LoraMetadata(rank=2, alpha=16, targets=("query", "value"))
    assert info.to_metadata().keys() == {"rank", "alpha", "targets", "bias"}
    write_adapter(tmp_path / "a.safetensors", tiny_adapter(info))
    assert read_adapter(tmp_path / "a.safetensors").metadata == info


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "task": '"rte"', "who": "knows"}])
def test_files_without_our_metadata_have_none(tmp_path, metadata):
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
        ({"rank": "0"}, "invalid rank 0 in its metadata"),
        ({"text_columns": '"review"'}, "its metadata is damaged ('review' is not a list of names)"),
        ({"text_columns": "[]"}, "invalid text_columns () in its metadata"),
        ({"text_columns": '["a", "a"]'}, "invalid text_columns ("),
        ({"text_columns": '["a", "b", "c"]'}, "invalid text_columns ("),
        ({"rank": "2.5"}, "invalid rank 2.5 in its metadata"),
        ({"alpha": '"4"'}, "invalid alpha '4' in its metadata"),
        ({"positions": '"yes"'}, "invalid positions 'yes' in its metadata"),
        ({"positions": "1"}, "invalid positions 1 in its metadata"),
        ({"head": '["token_classification"]'}, "invalid head ['token_classification'] in its"),
        ({"is_decoder": '"yes"'}, "invalid is_decoder 'yes' in its metadata"),
    ],
)
def test_damaged_metadata_is_refused(tmp_path, changed, message):
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


def test_a_checksum_does_not_depend_on_how_tensors_lie_in_memory():
    values = torch.arange(6.0)
    digest = checksum({"a": values}, {})
    assert checksum({"a": torch.stack([values, values], 1)[:, 0]}, {}) == digest
    for other in ({"b": values}, {"a": values.reshape(2, 3)}, {"a": values.view(torch.int32)}):
        assert checksum(other, {}) != digest


@pytest.mark.parametrize("alpha", [0, -1, float("inf"), float("nan"), "8"])
def test_metadata_need_a_finite_positive_alpha(tmp_path, alpha):
    tensors = {"roberta.query.lora_A": torch.ones(2, 4), "roberta.query.lora_B": torch.ones(4, 2)}
    path = tmp_path / "lora.safetensors"
    info = LoraMetadata(rank=2, alpha=alpha, targets=("query",))
    with pytest.raises(CheckpointError, match="alpha"):
        write_adapter(path, Adapter(tensors, info))
    metadata = info.to_metadata()
    write_tensors(path, tensors, {**metadata, "digest": checksum(tensors, metadata)})
    with pytest.raises(CheckpointError, match="alpha"):
        read_adapter(path)


# ---- fields of patterns and variants ----

FULL = LoraMetadata(
    rank=2,
    alpha=4,
    targets=("query", "value"),
    variant="rslora+dora",
    rank_pattern={"layer.0.query": 3, "layer.0.value": 2},
    alpha_pattern={"layer.0.value": 0.5},
    initialization="pissa",
    freeze_A=True,
    embeddings=("words",),
    slices={"layer.1.qkv": [True, False]},
)


def test_fields_of_patterns_and_variants_are_written_and_read(tmp_path):
    metadata = FULL.to_metadata()
    assert {key: json.loads(metadata[key]) for key in metadata.keys() - {"targets", "bias"}} == {
        "rank": 2,
        "alpha": 4,
        "variant": "rslora+dora",
        "rank_pattern": {"layer.0.query": 3},
        "alpha_pattern": {"layer.0.value": 0.5},
        "initialization": "pissa",
        "freeze_A": True,
        "embeddings": ["words"],
        "slices": {"layer.1.qkv": [True, False]},
    }
    assert LoraMetadata.from_metadata(metadata, tmp_path) == FULL
    assert FULL.slices == {"layer.1.qkv": (True, False)}


def test_rank_of_and_alpha_of_follow_the_patterns():
    assert FULL.rank_pattern == {"layer.0.query": 3}
    assert [FULL.rank_of(f"layer.0.{name}") for name in ("query", "value")] == [3, 2]
    assert [FULL.alpha_of(f"layer.0.{name}") for name in ("query", "value")] == [4, 0.5]
    assert (FULL.rank_of("layer.1.query"), FULL.alpha_of("layer.1.query")) == (2, 4)


def test_fields_with_default_values_are_the_same_as_none():
    plain = LoraMetadata(rank=2, alpha=4, targets=("query",))
    spelled = LoraMetadata(
        rank=2,
        alpha=4,
        targets=("query",),
        variant="lora",
        rank_pattern={"a.query": 2},
        alpha_pattern={},
        initialization="default",
        freeze_A=False,
        embeddings=(),
        slices={},
    )
    assert spelled == plain
    assert spelled.to_metadata() == plain.to_metadata()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank_pattern", {"query": 0}),
        ("rank_pattern", {"query": 2.5}),
        ("rank_pattern", {"query": True}),
        ("rank_pattern", {"query": None}),
        ("rank_pattern", [3]),
        ("rank_pattern", 3),
        ("alpha_pattern", {"query": 0}),
        ("alpha_pattern", {"query": "3"}),
        ("alpha_pattern", {"query": float("nan")}),
        ("alpha_pattern", {"roberta.layer.0.query": "3"}),
        ("alpha_pattern", {"roberta.layer.0.query": 0}),
        ("alpha_pattern", {"roberta.layer.0.query": 0, "roberta.layer.0.value": 3}),
        ("alpha_pattern", "query"),
        ("initialization", "svd"),
        ("initialization", ["pissa"]),
        ("initialization", 1),
        ("freeze_A", "yes"),
        ("freeze_A", 1),
        ("embeddings", "words"),
        ("embeddings", [1]),
        ("embeddings", 3),
        ("slices", {"query": True}),
        ("slices", {"query": []}),
        ("slices", {"query": [False, False]}),
        ("slices", {"query": [1, 0]}),
        ("slices", [True]),
        ("variant", "qlora"),
    ],
)
def test_fields_of_a_wrong_type_are_refused(tmp_path, field, value):
    metadata = INFO.to_metadata() | {field: json.dumps(value)}
    path, tensors = tmp_path / "a.safetensors", tiny_adapter().tensors
    save_file(tensors, path, metadata | {"digest": checksum(tensors, metadata)})
    with pytest.raises(CheckpointError, match=r"a\.safetensors: ") as caught:
        read_adapter(path)
    assert "\n" not in str(caught.value)


def test_targets_may_be_in_any_order(tmp_path):
    metadata = replace(INFO, targets=INFO.targets[::-1])
    write_adapter(tmp_path / "a.safetensors", tiny_adapter(metadata))
    assert read_adapter(tmp_path / "a.safetensors").metadata == metadata


QUERY = "roberta.layer.0.query"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_pattern": {QUERY: 3}}, f"says rank 3 in {QUERY}, its tensors have 2"),
        (
            {"rank_pattern": {"query": 2, "x": 3}},
            "says rank_pattern of x, its tensors have no such",
        ),
        ({"alpha_pattern": {"x": 3}}, "says alpha_pattern of x, its tensors have no such update"),
        ({"embeddings": ["words"]}, "says embeddings of words, its tensors have no such update"),
        ({"slices": {"qkv": [True, False]}}, "says slices of qkv, its tensors have no such update"),
        (
            {"variant": "dora"},
            f"lacks {QUERY}.lora_magnitude_vector, which LoRA of the variant dora and the "
            "initialization default",
        ),
        (
            {"initialization": "olora"},
            f"lacks {QUERY}.lora_A_start, which LoRA of the variant lora and the "
            "initialization olora",
        ),
    ],
)
def test_fields_that_contradict_the_tensors_are_refused(tmp_path, changes, message):
    """Such an adapter is neither read nor written."""
    values = {key: json.dumps(value) for key, value in changes.items()}
    metadata = INFO.to_metadata() | values
    path, tensors = tmp_path / "a.safetensors", tiny_adapter().tensors
    save_file(tensors, path, metadata | {"digest": checksum(tensors, metadata)})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_adapter(path)
    wrong = LoraMetadata.from_metadata(metadata, path)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        write_adapter(tmp_path / "b.safetensors", Adapter(tensors, wrong))
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize(
    "name", ["lora_magnitude_vector", "lora_A_start", "lora_B_start", "lora_C"]
)
@pytest.mark.parametrize("metadata", [INFO, None])
def test_tensors_that_do_not_fit_the_metadata_are_refused(tmp_path, name, metadata):
    tensors = {**tiny_adapter().tensors, f"{QUERY}.{name}": torch.ones(8)}
    fields = metadata.to_metadata() if metadata else {}
    digest = {"digest": checksum(tensors, fields)} if metadata else {}
    save_file(tensors, tmp_path / "a.safetensors", fields | digest)
    with pytest.raises(CheckpointError, match=f"{QUERY}.{name}"):
        read_adapter(tmp_path / "a.safetensors")
