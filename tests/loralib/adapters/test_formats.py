"""The formats of an adapter: each is recognised, and none loses a bit."""

import json
import math
from dataclasses import replace

import all_families  # noqa: F401
import pytest
import torch
from adapter_files import (
    FAMILIES,
    HEADS,
    INFOS,
    MODULES,
    RELEASE,
    TARGETS,
    adapter_of,
    drawn,
    listing,
    refused,
    refused_file,
    tensors_of,
    user_model,
)
from compare import assert_same_bits
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.canonical import without_ddp_prefix
from loralib.adapters.deltas import deltas_of
from loralib.adapters.formats import FORMATS, read_adapter, why_not_expressible, write_adapter
from loralib.adapters.metadata import LoraMetadata
from transformers.adapter_kinds import BITFIT, BOTTLENECK, BiasMetadata, BottleneckMetadata

# ---- recognition ----


@pytest.mark.parametrize("zipped", [True, False])
def test_the_releases_format_for_roberta(tmp_path, zipped):
    path = tmp_path / "roberta_base_lora_mnli.bin"
    torch.save(tensors_of("roberta"), path, _use_new_zipfile_serialization=zipped)
    adapter = read_adapter(path)
    assert_same_bits(adapter.tensors, tensors_of("roberta"))
    assert (adapter.metadata, adapter.format) == (None, "release")


@pytest.mark.parametrize("generation", ["today's", "first"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_releases_format_for_deberta(tmp_path, generation, prefix):
    tensors, path = tensors_of("deberta"), tmp_path / "deberta.bin"
    if generation == "first":
        first = {f"_proj.lora_{ab}": f"_lora_{ab.lower()}.weight" for ab in "AB"}
        renamed = {}
        for name, tensor in tensors.items():
            for new, old in first.items():
                name = name.replace(new, old)
            renamed[name] = tensor
        assert not any("_proj" in name for name in renamed)
    else:
        renamed = tensors
    torch.save({prefix + name: tensor for name, tensor in renamed.items()}, path)
    adapter = read_adapter(path, lora_alpha=3)
    assert_same_bits(adapter.tensors, tensors)
    assert adapter.format == "release"
    assert adapter.metadata == LoraMetadata(
        rank=2, alpha=3, targets=("query_proj", "value_proj"), positions=False
    )


@pytest.mark.parametrize("prefix", ["module.", "", "module.transformer."])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_the_releases_format_for_gpt2(tmp_path, prefix, wrapped, head):
    """A head that is not seen to be the embedding would be lost: GPT-2's are one tensor here."""
    tensors, path = tensors_of("gpt2"), tmp_path / "GPT2_M.lora.pt"
    held = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    start = prefix if prefix.endswith("transformer.") else f"{prefix}transformer."
    if prefix == "":
        start = ""  # names that begin with the layers, "h."
    held = {f"{start}{name}": tensor for name, tensor in held.items()}
    if head:
        held["module.lm_head.weight" if prefix else "lm_head.decoder.weight"] = drawn(9, 6)
    torch.save({"model_state_dict": held} if wrapped else held, path)
    if head:
        refused(
            lambda: read_adapter(path, lora_alpha=3), path, "lm_head", "as a separate head weight"
        )
        return
    adapter = read_adapter(path, lora_alpha=3)
    assert_same_bits(adapter.tensors, tensors)
    assert adapter.format == "release"
    assert adapter.metadata == LoraMetadata(rank=2, alpha=3, targets=("c_attn",))
    assert {len(update.starts) for update in deltas_of(adapter).values()} == {2}


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_users_own_model(tmp_path, bias, format):
    state, path = lora.lora_state_dict(user_model(), bias), tmp_path / "lora.pt"
    torch.save(state, path)
    adapter = read_adapter(path)
    assert_same_bits(adapter.tensors, state)
    assert (adapter.metadata, adapter.format) == (None, "plain")
    adapter = read_adapter(path, lora_alpha=8)
    assert adapter.metadata == LoraMetadata(rank=2, alpha=8, targets=("down", "up"), bias=bias)
    write_adapter(tmp_path / TARGETS[format], adapter, format)
    again = read_adapter(tmp_path / TARGETS[format], lora_alpha=8)
    assert_same_bits(again.tensors, state)
    assert again.metadata == adapter.metadata


@pytest.mark.parametrize("format", FORMATS)
def test_a_users_own_head_is_no_bias_of_the_base(tmp_path, format):
    """A bias whose weight is there as well was not trained in the base, but with the head."""
    head = {"head.weight": drawn(3, 4), "head.bias": drawn(3)}
    tensors = {**lora.lora_state_dict(user_model()), **head}
    torch.save(tensors, tmp_path / "lora.pt")
    adapter = read_adapter(tmp_path / "lora.pt", lora_alpha=8)
    assert adapter.metadata.bias == "none"
    write_adapter(tmp_path / TARGETS[format], adapter, format)
    assert_same_bits(read_adapter(tmp_path / TARGETS[format]).tensors, tensors)
    if format == "peft":
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (config["bias"], config["modules_to_save"]) == ("none", ["head"])


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_a_users_convolution(tmp_path, bias):
    model = nn.ModuleDict({"conv": lora.Conv2d(3, 4, 3, r=2), "norm": nn.BatchNorm2d(4)})
    torch.save(lora.lora_state_dict(model, bias), tmp_path / "lora.pt")
    adapter = read_adapter(tmp_path / "lora.pt", lora_alpha=8)
    # The convolution's rank is r times its kernel's width.
    assert (adapter.metadata.rank, adapter.metadata.bias, adapter.format) == (6, bias, "plain")


def test_a_users_stacked_updates_stay_as_they_are(tmp_path):
    """Which slices they belong to is not known, so that only files are read and written."""
    layer = lora.MergedLinear(4, 6, r=2, enable_lora=[True, True, False])
    torch.save(lora.lora_state_dict(nn.ModuleDict({"qkv": layer})), tmp_path / "lora.pt")
    adapter = read_adapter(tmp_path / "lora.pt", lora_alpha=8)
    assert adapter.metadata.rank == 2
    write_adapter(tmp_path / "lora.safetensors", adapter)
    assert_same_bits(read_adapter(tmp_path / "lora.safetensors").tensors, adapter.tensors)
    refused(
        lambda: write_adapter(tmp_path / "out", adapter, "peft"),
        adapter.source,
        "qkv has 2 stacked blocks",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "tensors", "info"),
    [
        (
            BOTTLENECK,
            {"roberta.layer.0.adapter.adapter_A.weight": drawn(2, 6), "classifier.bias": drawn(3)},
            BottleneckMetadata(adapter_type="houlsby", adapter_size=2),
        ),
        (
            BITFIT,
            {"roberta.layer.0.query.bias": drawn(6), "classifier.bias": drawn(3)},
            BiasMetadata(biases="all"),
        ),
    ],
)
def test_the_baselines_files(tmp_path, kind, tensors, info):
    adapter = Adapter(tensors, info, "theirs", kind)
    write_adapter(tmp_path / "a.safetensors", adapter)
    assert read_adapter(tmp_path / "a.safetensors", kind).metadata == info
    write_adapter(tmp_path, adapter, "release")
    assert_same_bits(read_adapter(tmp_path, kind).tensors, tensors)
    refused(lambda: read_adapter(tmp_path / "a.safetensors"), tmp_path / "a.safetensors", "LoRA")
    refused(lambda: write_adapter(tmp_path / "out", adapter, "peft"), "theirs")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_parameters_are_as_good_as_tensors(tmp_path, format):
    """A user may have saved `named_parameters()`."""
    tensors = {name: nn.Parameter(tensor) for name, tensor in tensors_of("gpt2").items()}
    torch.save(tensors, tmp_path / "x.pt")
    write_adapter(tmp_path / TARGETS[format], read_adapter(tmp_path / "x.pt", lora_alpha=3), format)
    assert_same_bits(read_adapter(tmp_path / TARGETS[format]).tensors, tensors_of("gpt2"))


# ---- names ----


def test_two_tensors_of_one_name(tmp_path):
    name = f"{MODULES['roberta'][0]}.lora_A"
    tensors = {**tensors_of("roberta"), f"module.{name}": drawn(2, 6)}
    refused(lambda: without_ddp_prefix(tensors, "a.bin"), "a.bin", f"holds {name} under two names")
    refused_file(tmp_path, tensors, f"holds {name} under two names")


# ---- writing ----

LOST = {
    "alpha": "3",
    "dropout": "0.1",
    "base": "some/{}",
    "base_revision": "main",
    "base_fingerprint": "0123456789abcdef",
    "task": "mnli",
    "labels": "no, yes",
    "text_columns": "premise, claim",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_format_cannot_hold(tmp_path, family):
    adapter = adapter_of(family)
    told = write_adapter(tmp_path / "a.safetensors", adapter)
    assert [remark for remark in told if "modules are assumed to be linear" not in remark] == []
    said = write_adapter(tmp_path / "a.bin", adapter)
    of_head = ("task", "labels", "text_columns")
    lost = LOST if HEADS[family] else {k: v for k, v in LOST.items() if k not in of_head}
    expected = {f"not in this format: {key} {value.format(family)}" for key, value in lost.items()}
    assert set(said) == (set() if family == "gpt2" else expected)
    assert len(said) == len(set(said))
    remarks = write_adapter(tmp_path / "a", adapter, "peft")
    unseen = "base_fingerprint, task, labels, text_columns" if HEADS[family] else "base_fingerprint"
    assert remarks[-1] == f"in the metadata, where PEFT does not look: {unseen}"
    assert len(remarks) == (2 if family in ("gpt2", "plain") else 1)
    if family == "gpt2":
        for part in ("2 updates of rank 2", "c_attn", "one of rank 4 and alpha 6"):
            assert part in remarks[0]
    assert all(len(line.splitlines()) == 1 for line in [*said, *remarks])


def test_nothing_is_said_where_nothing_is_lost(tmp_path):
    bare = replace(adapter_of("roberta"), metadata=None)
    assert write_adapter(tmp_path / "a.bin", bare) == []
    info = LoraMetadata(rank=2, alpha=3, targets=("query", "value"))
    said = write_adapter(tmp_path / "a.bin", replace(bare, metadata=info))
    assert said == ["not in this format: alpha 3"]
    assert write_adapter(tmp_path / "a", replace(bare, metadata=info), "peft") == []


def test_what_each_format_forbids():
    adapter = adapter_of("roberta")
    begun = replace(adapter, metadata=replace(adapter.lora, initialization="orthogonal"))
    assert why_not_expressible(begun, "release") is None  # it is trained as from any other A and B
    adapter = adapter_of("gpt2")
    magnitudes = {f"{module}.lora_magnitude_vector": torch.ones(12) for module in MODULES["gpt2"]}
    info = replace(adapter.lora, variant="dora")
    dora = replace(adapter, tensors={**adapter.tensors, **magnitudes}, metadata=info)
    assert "c_attn has DoRA's magnitudes for slices" in str(why_not_expressible(dora, "peft"))
    # Of an attention that is no target, PEFT saves all.
    pool = nn.MultiheadAttention(6, 1).state_dict(prefix="pool.")
    adapter = adapter_of("plain")
    with_head = replace(adapter, tensors={**adapter.tensors, **pool})
    assert why_not_expressible(with_head, "peft") is None


@pytest.mark.parametrize(
    ("head", "task"),
    [(None, "SEQ_CLS"), ("multiple_choice", None), ("token_classification", "TOKEN_CLS")],
)
def test_pefts_task_of_a_classifier(tmp_path, head, task):
    adapter = adapter_of("plain")
    tensors = {**adapter.tensors, "classifier.weight": torch.ones(2, 6)}
    metadata = replace(adapter.lora, head=head)
    write_adapter(tmp_path / "a", replace(adapter, tensors=tensors, metadata=metadata), "peft")
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["task_type"] == task


def test_the_releases_format_is_plain_tensors(tmp_path):
    """What the release's own scripts load: for GPT-2 wrapped, with DDP's names."""
    write_adapter(tmp_path / "a.bin", adapter_of("roberta"))
    assert_same_bits(torch.load(tmp_path / "a.bin", weights_only=True), tensors_of("roberta"))
    write_adapter(tmp_path / "a.pt", adapter_of("gpt2"))
    held = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = {f"module.{name}": tensor for name, tensor in tensors_of("gpt2").items()}
    assert_same_bits(held["model_state_dict"], expected)
    assert read_adapter(tmp_path / "a.pt").metadata == INFOS["gpt2"]


# ---- the release's published file ----


@pytest.mark.skipif(not RELEASE.is_file(), reason="the release's file is absent from ../shared")
def test_the_releases_published_file_through_all_formats(tmp_path):
    first = read_adapter(RELEASE, lora_alpha=16)
    assert first.metadata == LoraMetadata(rank=8, alpha=16, targets=("query", "value"))
    assert first.format == "release"
    current = first
    for number, format in enumerate(("lora", "peft", "release", "peft", "lora")):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_adapter(folder / TARGETS[format], current, format)
        current = read_adapter(folder / TARGETS[format], lora_alpha=16)
        assert replace(current.metadata, head=None) == first.metadata
        assert current.head == first.head == "sequence_classification"
        assert_same_bits(current.tensors, first.tensors)
    refused(lambda: read_adapter(folder, lora_alpha=8), folder, "no adapter")
    refused(lambda: read_adapter(folder / TARGETS[format], lora_alpha=8), folder, "alpha 16")


# ---- alpha ----


def test_alpha_has_to_be_given_where_it_is_written(tmp_path):
    adapter = replace(adapter_of("roberta"), metadata=None)
    for name, format in (("a.safetensors", "lora"), ("a", "lora"), ("b/c", "lora"), ("a", "peft")):
        refused(
            lambda name=name, format=format: write_adapter(tmp_path / name, adapter, format),
            adapter.source,
            "give it as lora_alpha",
        )
    assert listing(tmp_path) == set()
    refused(lambda: deltas_of(adapter), adapter.source, "give it as lora_alpha")


@pytest.mark.parametrize("name", ["out.safetensors", "out.bin", "out"])
def test_an_alpha_that_is_given(tmp_path, name):
    format = {name: format for format, name in TARGETS.items()}[name]
    write_adapter(tmp_path / name, adapter_of("roberta"), format)
    assert read_adapter(tmp_path / name, lora_alpha=3.0).metadata.alpha == 3
    if format == "release":
        assert read_adapter(tmp_path / name, lora_alpha=4).metadata.alpha == 4
    else:
        parts = ("trained with alpha 3", "lora_alpha is 4")
        refused(lambda: read_adapter(tmp_path / name, lora_alpha=4), tmp_path / name, *parts)
    for alpha in (0, -1, math.inf, math.nan):
        call = lambda alpha=alpha: read_adapter(tmp_path / name, lora_alpha=alpha)  # noqa: E731
        reason = "is too large" if alpha == math.inf else "has to be above 0"
        refused(call, tmp_path / name, f"lora_alpha {reason}")


# ---- any model ----


@pytest.mark.parametrize(("family", "told"), [("plain", True), ("roberta", False)])
@pytest.mark.parametrize("format", ["lora", "peft"])
def test_a_user_is_told_of_an_unknown_model(tmp_path, family, told, format):
    remarks = write_adapter(tmp_path / TARGETS[format], adapter_of(family), format)
    assert any("assumed to be linear layers" in remark for remark in remarks) is told
    of_places = [remark for remark in remarks if "in several places is adapted in all" in remark]
    assert len(of_places) == (told and format == "peft")
