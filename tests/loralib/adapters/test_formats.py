"""The formats of an adapter: each is recognised, and none loses a bit."""

import json
import math
import os
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import all_families  # noqa: F401
import pytest
import torch
from adapter_files import (
    DTYPES,
    FAMILIES,
    HEADS,
    INFOS,
    MODULES,
    RELEASE,
    TARGETS,
    adapter_of,
    as_peft,
    drawn,
    listing,
    peft_folder,
    refused,
    refused_file,
    tensors_of,
    user_model,
)
from compare import assert_same_bits
from safetensors.torch import load_file
from torch import nn

import loralib as lora
from loralib.adapters import peft
from loralib.adapters.adapter import Adapter, lora_metadata
from loralib.adapters.canonical import canonical_names
from loralib.adapters.deltas import deltas_of
from loralib.adapters.formats import FORMATS, read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.io import tensors as tensor_files
from loralib.io.atomic import atomic_write_folder
from loralib.io.tensors import read_tensors
from transformers.adapter_kinds import BITFIT, BOTTLENECK, BiasMetadata, BottleneckMetadata

# ---- recognition ----


@pytest.mark.parametrize("family", FAMILIES)
def test_this_projects_form(tmp_path, family):
    path = tmp_path / "pytorch_model_lora.safetensors"
    write_adapter(path, adapter_of(family))
    for source in (path, tmp_path, str(tmp_path)):
        adapter = read_adapter(source)
        assert_same_bits(adapter.tensors, tensors_of(family))
        assert adapter.metadata == INFOS[family]
        assert adapter.format == "lora"
        assert adapter.source == str(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_the_releases_form_for_roberta(tmp_path, zipped):
    path = tmp_path / "roberta_base_lora_mnli.bin"
    torch.save(tensors_of("roberta"), path, _use_new_zipfile_serialization=zipped)
    adapter = read_adapter(path)
    assert_same_bits(adapter.tensors, tensors_of("roberta"))
    assert (adapter.metadata, adapter.format) == (None, "release")


@pytest.mark.parametrize("generation", ["today's", "first"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_releases_form_for_deberta(tmp_path, generation, prefix):
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
def test_the_releases_form_for_gpt2(tmp_path, prefix, wrapped, head):
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
        refused(lambda: read_adapter(path, lora_alpha=3), path, "lm_head", "a head of its own")
        return
    adapter = read_adapter(path, lora_alpha=3)
    assert_same_bits(adapter.tensors, tensors)
    assert adapter.format == "release"
    assert adapter.metadata == LoraMetadata(rank=2, alpha=3, targets=("c_attn",))
    assert {len(update.starts) for update in deltas_of(adapter).values()} == {2}


@pytest.mark.parametrize("given", ["folder", "config", "weights"])
@pytest.mark.parametrize("torch_file", [True, False])
def test_pefts_form(tmp_path, given, torch_file):
    folder = peft_folder(
        tmp_path / "adapter",
        torch_file=torch_file,
        base_model_name_or_path="some/base",
        revision="v2",
        lora_dropout=0.25,
    )
    weights = folder / ("adapter_model.bin" if torch_file else "adapter_model.safetensors")
    source = {"folder": folder, "config": folder / "adapter_config.json", "weights": weights}[given]
    adapter = read_adapter(source)
    assert_same_bits(adapter.tensors, tensors_of("roberta"))
    assert adapter.format == "peft"
    assert adapter.source == str(weights)
    assert adapter.metadata == LoraMetadata(
        rank=2,
        alpha=3,
        targets=("query", "value"),
        dropout=0.25,
        base="some/base",
        base_revision="v2",
    )


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
    refused(lambda: canonical_names(tensors, "a.bin"), "a.bin", f"holds {name} under two names")
    refused_file(tmp_path, tensors, f"holds {name} under two names")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(2, 6), (3, 6)])
def test_two_tensors_of_one_name_in_pefts_form(tmp_path, dtype, shape):
    tensors = as_peft(tensors_of("roberta"))
    name = "base_model.model.classifier.dense.modules_to_save.default.weight"
    tensors[name] = torch.ones(shape).to(dtype)
    folder = peft_folder(tmp_path / "adapter", tensors)
    refused(
        lambda: read_adapter(folder),
        folder / "adapter_model.safetensors",
        "holds classifier.dense.weight under two names",
    )


def test_the_heads_copies_that_peft_keeps_are_no_part_of_the_adapter(tmp_path):
    tensors = as_peft(tensors_of("roberta"))
    tensors["base_model.model.classifier.original_module.dense.bias"] = torch.ones(2)
    tensors["base_model.model.classifier.modules_to_save.default.dense.bias"] = tensors[
        "base_model.model.classifier.dense.bias"
    ].clone()
    adapter = read_adapter(peft_folder(tmp_path / "adapter", tensors))
    assert_same_bits(adapter.tensors, tensors_of("roberta"))


# ---- writing ----


LOST = {
    "alpha": "3",
    "dropout": "0.1",
    "base": "some/{}",
    "base_revision": "main",
    "base_fingerprint": "0123456789abcdef",
    "task": "mnli",
    "labels": "no, yes",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_form_cannot_hold(tmp_path, family):
    adapter = adapter_of(family)
    told = write_adapter(tmp_path / "a.safetensors", adapter)
    assert [remark for remark in told if "modules are taken for linear" not in remark] == []
    said = write_adapter(tmp_path / "a.bin", adapter)
    lost = LOST if HEADS[family] else {k: v for k, v in LOST.items() if k not in ("task", "labels")}
    expected = {f"not in this format: {key} {value.format(family)}" for key, value in lost.items()}
    assert set(said) == (set() if family == "gpt2" else expected)
    assert len(said) == len(set(said))
    remarks = write_adapter(tmp_path / "a", adapter, "peft")
    unseen = "base_fingerprint, task, labels" if HEADS[family] else "base_fingerprint"
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


def test_the_releases_form_is_plain_tensors(tmp_path):
    """What the release's own scripts load: for GPT-2 wrapped, with DDP's names."""
    write_adapter(tmp_path / "a.bin", adapter_of("roberta"))
    assert_same_bits(torch.load(tmp_path / "a.bin", weights_only=True), tensors_of("roberta"))
    write_adapter(tmp_path / "a.pt", adapter_of("gpt2"))
    held = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = {f"module.{name}": tensor for name, tensor in tensors_of("gpt2").items()}
    assert_same_bits(held["model_state_dict"], expected)
    assert read_adapter(tmp_path / "a.pt").metadata == INFOS["gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_pefts_folder(tmp_path, family):
    write_adapter(tmp_path / "a", adapter_of(family), "peft")
    assert listing(tmp_path / "a") == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    parts = 2 if family == "gpt2" else 1
    assert (config["r"], config["lora_alpha"]) == (2 * parts, 3 * parts)
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == f"some/{family}"
    assert config["lora_dropout"] == 0.1
    assert config["fan_in_fan_out"] == (family == "gpt2")
    held = load_file(tmp_path / "a" / "adapter_model.safetensors")
    if family != "gpt2":
        assert held.keys() == as_peft(tensors_of(family)).keys()
        assert_same_bits(held, as_peft(tensors_of(family)))
    assert {tensor.shape[0] for n, tensor in held.items() if "lora_A" in n} == {2 * parts}


def test_gpt2s_pair_is_pefts_blocks(tmp_path):
    """The blocks are where peft's head draws them, and the rest of B is zero."""
    adapter = adapter_of("gpt2")
    write_adapter(tmp_path / "a", adapter, "peft")
    held = load_file(tmp_path / "a" / "adapter_model.safetensors")
    for module in MODULES["gpt2"]:
        A, B = (adapter.tensors[f"{module}.lora_{ab}"] for ab in "AB")
        whole = torch.zeros(18, 4)
        whole[:6, :2], whole[12:, 2:] = B[:6], B[6:]
        assert torch.equal(held[f"base_model.model.{module}.lora_A.weight"], A)
        assert torch.equal(held[f"base_model.model.{module}.lora_B.weight"], whole)


@pytest.mark.parametrize("stray", [(7, 0), (7, 3), (0, 2), (17, 1)])
def test_an_update_of_all_of_c_attn_stays_whole(tmp_path, stray):
    """One value outside the blocks is enough; this project's layers cannot hold such an update."""
    write_adapter(tmp_path / "a", adapter_of("gpt2"), "peft")
    held = load_file(tmp_path / "a" / "adapter_model.safetensors")
    held[f"base_model.model.{MODULES['gpt2'][1]}.lora_B.weight"][stray] = 0.5
    folder = peft_folder(tmp_path / "b", held, r=4, lora_alpha=6)
    adapter = read_adapter(folder)
    assert (adapter.metadata.rank, adapter.metadata.alpha) == (4, 6)
    assert {name: t.shape for name, t in adapter.tensors.items()} == {
        f"{module}.lora_{ab}": shape
        for module in MODULES["gpt2"]
        for ab, shape in (("A", (4, 6)), ("B", (18, 4)))
    }
    for name in ("out.safetensors", "out.bin"):
        call = lambda name=name: write_adapter(tmp_path / name, adapter)  # noqa: E731
        refused(call, adapter.source, "merge it into its base")
    assert listing(tmp_path).isdisjoint({"out.safetensors", "out.bin"})
    write_adapter(tmp_path / "c", adapter, "peft")
    assert_same_bits(read_adapter(tmp_path / "c").tensors, adapter.tensors)


@pytest.mark.parametrize("name", ["pytorch_model_lora.safetensors", "pytorch_model_lora.bin"])
def test_a_folder_gets_the_file_of_a_run(tmp_path, name):
    format = "lora" if name.endswith("safetensors") else "release"
    write_adapter(tmp_path / "new" / "folder", adapter_of("roberta"), format)
    assert listing(tmp_path / "new" / "folder") == {name}
    assert_same_bits(read_adapter(tmp_path / "new" / "folder").tensors, tensors_of("roberta"))


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.bin", "lora"),
        ("a.pt", "lora"),
        ("a.json", "lora"),
        ("a.safetensors", "release"),
        ("a.txt", "release"),
        ("a.txt", None),
        ("a", None),
    ],
)
def test_a_name_that_does_not_fit_the_form(tmp_path, name, format):
    refused(lambda: write_adapter(tmp_path / name, adapter_of("roberta"), format), tmp_path / name)
    assert listing(tmp_path) == set()


# ---- round trips ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_through_all_forms_no_bit_changes(tmp_path, family, dtype):
    adapter, number = adapter_of(family, dtype), 0
    for way in permutations(FORMATS):
        current = adapter
        for format in (*way, way[0]):
            number += 1
            path = tmp_path / f"{number}" / TARGETS[format]
            path.parent.mkdir()
            write_adapter(path, current, format)
            current = read_adapter(path, lora_alpha=3)
            if family == "deberta":
                # From the release's format and from PEFT's it has opposite meanings: on a base that
                # shares no projection with positions it has neither.
                assert current.metadata.positions is {"release": False, "peft": None}.get(format)
                current = replace(current, metadata=replace(current.metadata, positions=None))
            assert (current.metadata.rank, current.metadata.alpha) == (2, 3)
            assert current.metadata.targets == INFOS[family].targets
            plain = format == "release" and family == "plain"
            assert current.format == ("plain" if plain else format)
        assert_same_bits(current.tensors, adapter.tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_info_comes_through_the_forms_that_hold_it(tmp_path, family):
    kept = ("lora", "release", "peft") if family == "gpt2" else ("lora", "peft")
    for way in permutations(kept):
        current = adapter_of(family)
        for format in way:
            folder = tmp_path / "-".join(way) / format
            folder.mkdir(parents=True)
            write_adapter(folder / TARGETS[format], current, format)
            current = read_adapter(folder / TARGETS[format])
        assert current.metadata == INFOS[family]


@pytest.mark.skipif(not RELEASE.is_file(), reason="the release's file is absent from ../shared")
def test_the_releases_published_file_through_all_forms(tmp_path):
    first = read_adapter(RELEASE, lora_alpha=16)
    assert first.metadata == LoraMetadata(rank=8, alpha=16, targets=("query", "value"))
    assert first.format == "release"
    current = first
    for number, format in enumerate(("lora", "peft", "release", "peft", "lora")):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_adapter(folder / TARGETS[format], current, format)
        current = read_adapter(folder / TARGETS[format], lora_alpha=16)
        assert current.metadata == first.metadata
        assert_same_bits(current.tensors, first.tensors)
    refused(lambda: read_adapter(folder, lora_alpha=8), folder, "no adapter")
    refused(lambda: read_adapter(folder / TARGETS[format], lora_alpha=8), folder, "alpha 16")


# ---- alpha ----


def test_alpha_has_to_be_known_where_it_is_written(tmp_path):
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
        refused(call, tmp_path / name, "lora_alpha has to be above 0")


# ---- one file beside another ----


@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_the_twin_says_what_the_releases_form_cannot(tmp_path, family):
    adapter = adapter_of(family)
    write_adapter(tmp_path, adapter, "release")
    path = tmp_path / "pytorch_model_lora.bin"
    assert read_adapter(path).metadata is None
    write_adapter(tmp_path, adapter, "lora")
    assert read_adapter(path).metadata == INFOS[family]
    assert read_adapter(path).format == "release"
    assert read_adapter(tmp_path).format == "lora"
    refused(lambda: read_adapter(path, lora_alpha=4), path, "alpha 3")
    path.rename(tmp_path / "other.bin")
    assert read_adapter(tmp_path / "other.bin").metadata is None


@pytest.mark.parametrize("other", ["value", "shape", "dtype", "less", "more"])
def test_a_twin_with_other_tensors_says_nothing(tmp_path, other):
    adapter = adapter_of("roberta")
    write_adapter(tmp_path, adapter, "release")
    tensors = dict(adapter.tensors)
    last = "classifier.out_proj.weight"
    if other == "less":
        del tensors[last]
    elif other == "more":
        tensors["classifier.more.weight"] = torch.ones(1)
    else:
        tensors[last] = {
            "value": tensors[last] + 1,
            "shape": tensors[last].reshape(4, 3),
            "dtype": tensors[last].double(),
        }[other]
    write_adapter(tmp_path, replace(adapter, tensors=tensors), "lora")
    assert read_adapter(tmp_path / "pytorch_model_lora.bin").metadata is None


def test_a_damaged_twin_is_not_passed_over(tmp_path):
    write_adapter(tmp_path, adapter_of("roberta"), "release")
    write_adapter(tmp_path, adapter_of("roberta"), "lora")
    sidecar = tmp_path / "pytorch_model_lora.safetensors"
    content = bytearray(sidecar.read_bytes())
    content[-1] ^= 1
    sidecar.write_bytes(content)
    refused(lambda: read_adapter(tmp_path / "pytorch_model_lora.bin"), sidecar, "damaged")


@pytest.mark.parametrize("format", ["lora", "release"])
def test_two_adapters_in_one_folder(tmp_path, format):
    folder = peft_folder(tmp_path / "both", base_model_name_or_path="theirs")
    write_adapter(folder, adapter_of("roberta"), format)
    (own,) = (path for path in folder.iterdir() if path.name.startswith("pytorch_model_lora"))
    refused(lambda: read_adapter(folder), folder, own.name, "adapter_config.json", "name one")
    assert read_adapter(own).format == format
    assert read_adapter(folder / "adapter_config.json").metadata.base == "theirs"


def test_folders_that_hold_no_adapter(tmp_path):
    refused(lambda: read_adapter(tmp_path), tmp_path, "holds no adapter")
    folder = peft_folder(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    for source in (folder, folder / "adapter_config.json"):
        refused(lambda source=source: read_adapter(source), folder, "adapter_model", "missing")
    folder = peft_folder(tmp_path / "b")
    (folder / "adapter_config.json").unlink()
    refused(lambda: read_adapter(folder), folder, "holds no adapter")
    weights = folder / "adapter_model.safetensors"
    refused(lambda: read_adapter(weights), weights, "adapter_config.json is missing")
    weights.rename(folder / "other.safetensors")
    refused(lambda: read_adapter(folder / "other.safetensors"), folder, "weights of PEFT")


# ---- writing that fails ----


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.pt", "peft", "new/folder"])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch, name, there):
    format = {"peft": "peft", "new/folder": "lora"}.get(name)
    path, adapter = tmp_path / name, adapter_of("gpt2")
    if there and format is None:
        write_adapter(path, adapter)
    elif there:
        path.mkdir(parents=True)  # an empty folder may be written into
    before = {entry: (tmp_path / entry).is_file() for entry in listing(tmp_path)}
    content = path.read_bytes() if path.is_file() else None

    def fail(tensors, target, **_):
        if hasattr(target, "write"):
            target.write(b"half of the n")
        else:
            Path(target).write_bytes(b"half of the n")
        raise OSError("no space left on device")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    monkeypatch.setattr(tensor_files.torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        write_adapter(path, adapter, format)
    after = {entry: (tmp_path / entry).is_file() for entry in listing(tmp_path)}
    assert [entry for entry, is_file in after.items() if is_file] == [
        entry for entry, is_file in before.items() if is_file
    ]
    assert not any(Path(entry).name.startswith(".") for entry in after)
    if name == "peft":
        assert after == before
    if content is not None:
        assert path.read_bytes() == content


def test_a_failed_write_of_pefts_settings_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(peft.json, "dumps", fail)
    info = LoraMetadata(rank=2, alpha=3, targets=("query", "value"))
    with pytest.raises(KeyboardInterrupt):
        write_adapter(tmp_path / "a", replace(adapter_of("roberta"), metadata=info), "peft")
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("there", ["peft", "file", "other"])
def test_an_existing_folder_is_not_written_over(tmp_path, there):
    path = tmp_path / "a"
    if there == "peft":
        write_adapter(path, adapter_of("deberta"), "peft")
    elif there == "file":
        path.write_text("something")
    else:
        path.mkdir()
        (path / "notes.txt").write_text("something")
    before = {entry: entry.read_bytes() for entry in tmp_path.rglob("*") if entry.is_file()}
    refused(lambda: write_adapter(path, adapter_of("roberta"), "peft"), path, "exists already")
    assert {e: e.read_bytes() for e in tmp_path.rglob("*") if e.is_file()} == before
    assert listing(tmp_path) == {str(entry.relative_to(tmp_path)) for entry in before} | {"a"}


def test_write_whole_folder(tmp_path):
    with atomic_write_folder(tmp_path / "new" / "a") as folder:
        assert not (tmp_path / "new" / "a").exists()
        (folder / "x").write_text("x")
    assert listing(tmp_path) == {"new", "new/a", "new/a/x"}
    assert oct((tmp_path / "new" / "a").stat().st_mode & 0o777) == oct(0o777 & ~umask())


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embed.lora_A": drawn(2, 6), "embed.lora_B": drawn(6, 2)}, "embedding"),
        ({"transformer.wte.lora_A": drawn(2, 6), "transformer.wte.lora_B": drawn(6, 2)}, "embed"),
    ],
)
def test_what_peft_cannot_hold(tmp_path, tensors, message):
    adapter = Adapter(tensors, lora_metadata(tensors, rank=2, alpha=3), "this adapter")
    refused(lambda: write_adapter(tmp_path / "a", adapter, "peft"), "this adapter", message)
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("where", range(2))
def test_peft_holds_stacked_updates_and_others(tmp_path, where):
    """They have several ranks there, with the same scaling, and one again when they are read."""
    other = f"transformer.h.{where}.mlp.c_proj"
    tensors = {**tensors_of("gpt2")}
    tensors |= {f"{other}.lora_A": drawn(2, 24, seed=5), f"{other}.lora_B": drawn(6, 2, seed=5)}
    metadata = lora_metadata(tensors, rank=2, alpha=3)
    write_adapter(tmp_path / "a", Adapter(tensors, metadata, "this adapter"), "peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["rank_pattern"] == dict.fromkeys(MODULES["gpt2"], 4)
    assert config["alpha_pattern"] == dict.fromkeys(MODULES["gpt2"], 6)
    adapter = read_adapter(tmp_path / "a")
    assert_same_bits(adapter.tensors, tensors)
    assert adapter.metadata == metadata
    assert set(adapter.metadata.targets) == {"c_attn", "mlp.c_proj"}


# ---- checksums of torch's files ----


@pytest.mark.parametrize("wrapped", [True, False])
def test_verify_reads_a_torch_archives_checksums(tmp_path, wrapped):
    path = tmp_path / "x.bin"
    tensors = {"a.lora_A": torch.full((2, 6), 1.5), "a.lora_B": torch.ones(6, 2)}
    torch.save({"model_state_dict": tensors} if wrapped else tensors, path)
    content = bytearray(path.read_bytes())
    content[content.index(b"\x00\x00\xc0\x3f" * 12) + 1] ^= 1
    path.write_bytes(content)
    assert read_tensors(path)[0]["a.lora_A"][0, 0] != 1.5
    refused(lambda: read_tensors(path, verify=True), path, "the checksum of x/data/")
    refused(lambda: read_adapter(path), path, "damaged")


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_pefts_settings_name_the_layers_that_are_adapted(tmp_path, layers):
    """Without them PEFT would adapt the others as well, and miss their tensors."""
    adapter = adapter_of("roberta")
    tensors = {
        name: tensor
        for name, tensor in adapter.tensors.items()
        if "lora_" not in name or any(f"layer.{layer}." in name for layer in layers)
    }
    write_adapter(tmp_path / "a", replace(adapter, tensors=tensors), "peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["query", "value"]
    assert config["layers_to_transform"] == layers
    assert_same_bits(read_adapter(tmp_path / "a").tensors, tensors)


@pytest.mark.parametrize(("family", "told"), [("plain", True), ("roberta", False)])
@pytest.mark.parametrize("format", ["lora", "peft"])
def test_of_a_model_that_is_not_known_a_user_is_told(tmp_path, family, told, format):
    remarks = write_adapter(tmp_path / TARGETS[format], adapter_of(family), format)
    assert any("taken for linear layers" in remark for remark in remarks) is told
