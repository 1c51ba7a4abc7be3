"""Tests of an adapter's formats: each is recognized, and tensors stay bit-exact."""

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
from loralib.adapters.canonical import names_without_wrappers
from loralib.adapters.deltas import deltas_of
from loralib.adapters.formats import FORMATS, read_adapter, why_not_expressible, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.io.tensors import write_tensors
from transformers.adapter_kinds import BITFIT, BOTTLENECK, BiasMetadata, BottleneckMetadata

# ---- recognition ----


@pytest.mark.parametrize("zipped", [True, False])
def test_the_releases_format_for_roberta_can_be_read(tmp_path, zipped):
    path = tmp_path / "roberta_base_lora_mnli.bin"
    torch.save(tensors_of("roberta"), path, _use_new_zipfile_serialization=zipped)
    adapter = read_adapter(path)
    assert_same_bits(adapter.tensors, tensors_of("roberta"))
    assert (adapter.metadata, adapter.format) == (None, "release")


@pytest.mark.parametrize("generation", ["today's", "first"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_releases_formats_for_deberta_can_be_read(tmp_path, generation, prefix):
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
def test_the_releases_format_for_gpt2_can_be_read_unless_it_has_a_head(
    tmp_path, prefix, wrapped, head
):
    """A head that is not known to be the embedding would be lost: here the two are one tensor."""
    tensors, path = tensors_of("gpt2"), tmp_path / "GPT2_M.lora.pt"
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    start = prefix if prefix.endswith("transformer.") else f"{prefix}transformer."
    if prefix == "":
        start = ""  # names that begin with the layers, "h."
    renamed = {f"{start}{name}": tensor for name, tensor in renamed.items()}
    if head:
        renamed["module.lm_head.weight" if prefix else "lm_head.decoder.weight"] = drawn(9, 6)
    torch.save({"model_state_dict": renamed} if wrapped else renamed, path)
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
def test_lora_state_dict_of_any_model_can_be_read_and_converted(tmp_path, bias, format):
    state = lora.lora_state_dict(user_model(), bias)
    path = tmp_path / ("lora.safetensors" if bias == "all" else "lora.pt")
    write_tensors(path, state)
    adapter = read_adapter(path)
    assert_same_bits(adapter.tensors, state)
    assert (adapter.metadata, adapter.format) == (None, "plain")
    adapter = read_adapter(path, lora_alpha=8)
    assert adapter.metadata == LoraMetadata(rank=2, alpha=8, targets=("down", "up"), bias=bias)
    write_adapter(tmp_path / TARGETS[format], adapter, format)
    again = read_adapter(tmp_path / TARGETS[format], lora_alpha=8)
    assert_same_bits(again.tensors, state)
    assert again.metadata == adapter.metadata


@pytest.mark.parametrize("weight", ["weight", "gain", "parametrizations.weight.original0"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_heads_bias_is_not_taken_for_a_bias_of_the_base(tmp_path, format, weight):
    """A bias whose weight is in the file too belongs to a head."""
    head = {f"head.{weight}": drawn(3, 4), "head.bias": drawn(3)}
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
def test_a_convolutions_rank_is_r_times_the_kernel_width(tmp_path, bias):
    model = nn.ModuleDict({"conv": lora.Conv2d(3, 4, 3, r=2), "norm": nn.BatchNorm2d(4)})
    torch.save(lora.lora_state_dict(model, bias), tmp_path / "lora.pt")
    adapter = read_adapter(tmp_path / "lora.pt", lora_alpha=8)
    assert (adapter.metadata.rank, adapter.metadata.bias, adapter.format) == (6, bias, "plain")


def test_stacked_updates_of_unknown_slices_are_kept_but_not_converted(tmp_path):
    """It is unknown which slices they reach, so PEFT's format cannot hold them."""
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
def test_adapters_of_other_kinds_can_be_written_and_read(tmp_path, kind, tensors, info):
    adapter = Adapter(tensors, info, "theirs", kind)
    write_adapter(tmp_path / "a.safetensors", adapter)
    assert read_adapter(tmp_path / "a.safetensors", kind).metadata == info
    write_adapter(tmp_path, adapter, "release")
    assert_same_bits(read_adapter(tmp_path, kind).tensors, tensors)
    refused(lambda: read_adapter(tmp_path / "a.safetensors"), tmp_path / "a.safetensors", "LoRA")
    refused(lambda: write_adapter(tmp_path / "out", adapter, "peft"), "theirs")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_files_may_hold_parameters(tmp_path, format):
    """They may have been saved from `named_parameters()`."""
    tensors = {name: nn.Parameter(tensor) for name, tensor in tensors_of("gpt2").items()}
    torch.save(tensors, tmp_path / "x.pt")
    write_adapter(tmp_path / TARGETS[format], read_adapter(tmp_path / "x.pt", lora_alpha=3), format)
    assert_same_bits(read_adapter(tmp_path / TARGETS[format]).tensors, tensors_of("gpt2"))


# ---- names ----


def test_two_tensors_with_one_canonical_name_are_refused(tmp_path):
    name = f"{MODULES['roberta'][0]}.lora_A"
    tensors = {**tensors_of("roberta"), f"module.{name}": drawn(2, 6)}
    refused(
        lambda: names_without_wrappers(tensors, "a.bin"), "a.bin", f"holds {name} under two names"
    )
    refused_file(tmp_path, tensors, f"holds {name} under two names")


@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("added", ["_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_what_wrappers_add_to_names_is_removed(tmp_path, family, added):
    """As in `lora_state_dict` of a compiled model, which DDP may be around or in."""
    tensors = tensors_of(family)
    torch.save({added + name: tensor for name, tensor in tensors.items()}, tmp_path / "a.bin")
    assert_same_bits(read_adapter(tmp_path / "a.bin", lora_alpha=3).tensors, tensors)


def test_what_compiling_a_layer_adds_to_names_is_removed(tmp_path):
    tensors = {"up.lora_A": drawn(2, 6), "up.lora_B": drawn(6, 2), "my_orig_mod.bias": drawn(6)}
    compiled = {name.replace("up.", "up._orig_mod."): t for name, t in tensors.items()}
    torch.save(compiled, tmp_path / "a.bin")
    assert_same_bits(read_adapter(tmp_path / "a.bin", lora_alpha=3).tensors, tensors)


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
def test_remarks_name_the_fields_that_a_format_cannot_hold(tmp_path, family):
    adapter = adapter_of(family)
    own = write_adapter(tmp_path / "a.safetensors", adapter)
    assert [remark for remark in own if "modules are assumed to be linear" not in remark] == []
    losses = write_adapter(tmp_path / "a.bin", adapter)
    of_head = ("task", "labels", "text_columns")
    lost = LOST if HEADS[family] else {k: v for k, v in LOST.items() if k not in of_head}
    expected = {f"not in this format: {key} {value.format(family)}" for key, value in lost.items()}
    assert set(losses) == (set() if family == "gpt2" else expected)
    assert len(losses) == len(set(losses))
    remarks = write_adapter(tmp_path / "a", adapter, "peft")
    unseen = "base_fingerprint, task, labels, text_columns" if HEADS[family] else "base_fingerprint"
    assert remarks[-1] == f"in the metadata, where PEFT does not look: {unseen}"
    assert len(remarks) == (2 if family in ("gpt2", "plain") else 1)
    if family == "gpt2":
        for part in ("2 updates of rank 2", "c_attn", "one of rank 4 and alpha 6"):
            assert part in remarks[0]
    assert all(len(line.splitlines()) == 1 for line in [*losses, *remarks])


def test_there_are_no_remarks_if_nothing_is_lost(tmp_path):
    bare = replace(adapter_of("roberta"), metadata=None)
    assert write_adapter(tmp_path / "a.bin", bare) == []
    info = LoraMetadata(rank=2, alpha=3, targets=("query", "value"))
    losses = write_adapter(tmp_path / "a.bin", replace(bare, metadata=info))
    assert losses == ["not in this format: alpha 3"]
    assert write_adapter(tmp_path / "a", replace(bare, metadata=info), "peft") == []


def test_why_not_expressible_returns_a_reason_or_none():
    adapter = adapter_of("roberta")
    with_initialization = replace(
        adapter, metadata=replace(adapter.lora, initialization="orthogonal")
    )
    assert (
        why_not_expressible(with_initialization, "release") is None
    )  # a trained update does not depend on it
    adapter = adapter_of("gpt2")
    magnitudes = {f"{module}.lora_magnitude_vector": torch.ones(12) for module in MODULES["gpt2"]}
    info = replace(adapter.lora, variant="dora")
    dora = replace(adapter, tensors={**adapter.tensors, **magnitudes}, metadata=info)
    assert "c_attn has DoRA's magnitudes for slices" in str(why_not_expressible(dora, "peft"))
    # PEFT saves an attention that is not a target as a whole.
    pool = nn.MultiheadAttention(6, 1).state_dict(prefix="pool.")
    adapter = adapter_of("plain")
    with_head = replace(adapter, tensors={**adapter.tensors, **pool})
    assert why_not_expressible(with_head, "peft") is None


@pytest.mark.parametrize(
    ("head", "task", "saved"),
    [
        (None, None, "classifier.2"),
        ("multiple_choice", None, "classifier.2"),
        ("token_classification", "TOKEN_CLS", "classifier"),
    ],
)
def test_pefts_task_type_depends_on_the_head(tmp_path, head, task, saved):
    """For some tasks, PEFT saves the classifier as one module."""
    adapter = adapter_of("plain")
    tensors = {**adapter.tensors, "classifier.2.weight": torch.ones(2, 6)}
    metadata = replace(adapter.lora, head=head)
    write_adapter(tmp_path / "a", replace(adapter, tensors=tensors, metadata=metadata), "peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == (task, [saved])


def test_the_releases_format_is_plain_tensors(tmp_path):
    """The release's scripts load such files: for GPT-2 wrapped, and with DDP's names."""
    write_adapter(tmp_path / "a.bin", adapter_of("roberta"))
    assert_same_bits(torch.load(tmp_path / "a.bin", weights_only=True), tensors_of("roberta"))
    write_adapter(tmp_path / "a.pt", adapter_of("gpt2"))
    held = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = {f"module.{name}": tensor for name, tensor in tensors_of("gpt2").items()}
    assert_same_bits(held["model_state_dict"], expected)
    assert read_adapter(tmp_path / "a.pt").metadata == INFOS["gpt2"]


# ---- the release's published file ----


@pytest.mark.skipif(not RELEASE.is_file(), reason="the release's file is absent from ../shared")
def test_the_releases_published_file_stays_bit_exact_through_all_formats(tmp_path):
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


def test_formats_that_record_alpha_need_it(tmp_path):
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
def test_a_given_alpha_must_be_the_recorded_one(tmp_path, name):
    format = {name: format for format, name in TARGETS.items()}[name]
    adapter = adapter_of("roberta")
    if format != "release":  # which records no metadata
        adapter = replace(adapter, metadata=replace(adapter.metadata, task="rte"))
    write_adapter(tmp_path / name, adapter, format)
    assert read_adapter(tmp_path / name, lora_alpha=3.0).metadata.alpha == 3
    if format == "release":
        assert read_adapter(tmp_path / name, lora_alpha=4).metadata.alpha == 4
    else:
        unchanged = read_adapter(tmp_path / name).metadata
        assert read_adapter(tmp_path / name, lora_alpha=3).metadata == unchanged
        parts = ("trained with alpha 3", "lora_alpha is 4")
        refused(lambda: read_adapter(tmp_path / name, lora_alpha=4), tmp_path / name, *parts)
    for alpha in (0, -1, math.inf, math.nan):
        call = lambda alpha=alpha: read_adapter(tmp_path / name, lora_alpha=alpha)  # noqa: E731
        reason = "is too large" if alpha == math.inf else "has to be above 0"
        refused(call, tmp_path / name, f"lora_alpha {reason}")


# ---- any model ----


@pytest.mark.parametrize(("family", "is_unknown"), [("plain", True), ("roberta", False)])
@pytest.mark.parametrize("format", ["lora", "peft"])
def test_remarks_say_what_is_assumed_of_an_unknown_model(tmp_path, family, is_unknown, format):
    remarks = write_adapter(tmp_path / TARGETS[format], adapter_of(family), format)
    assert any("assumed to be linear layers" in remark for remark in remarks) is is_unknown
    of_places = [remark for remark in remarks if "in several places is adapted in all" in remark]
    assert len(of_places) == (is_unknown and format == "peft")
