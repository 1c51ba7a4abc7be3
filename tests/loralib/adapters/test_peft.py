"""Tests of PEFT's format: what its folders hold, and what they cannot hold."""

import json
from dataclasses import replace

import all_families  # noqa: F401
import pytest
import torch
from adapter_files import (
    FAMILIES,
    MODULES,
    adapter_of,
    as_peft,
    drawn,
    listing,
    peft_folder,
    refused,
    tensors_of,
)
from compare import assert_same_bits
from safetensors.torch import load_file

from loralib.adapters import peft_writing
from loralib.adapters.adapter import Adapter, lora_metadata, lora_modules
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata


@pytest.mark.parametrize("given", ["folder", "config", "weights"])
@pytest.mark.parametrize("torch_file", [True, False])
def test_a_peft_folder_can_be_read(tmp_path, given, torch_file):
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


@pytest.mark.parametrize("around", ["the model", "PEFT's model", "a layer"])
def test_the_folder_of_a_compiled_model_can_be_read(tmp_path, around):
    """PEFT 0.21 keeps what `torch.compile` adds to names, and finds none of its updates then."""
    name, compiled = {
        "the model": ("base_model.model.", "base_model.model._orig_mod."),
        "PEFT's model": ("base_model.", "_orig_mod.base_model."),
        "a layer": (".layer.0.", ".layer.0._orig_mod."),
    }[around]
    tensors = as_peft(tensors_of("roberta"))
    tensors = {n.replace(name, compiled): tensor for n, tensor in tensors.items()}
    assert any("_orig_mod" in name for name in tensors)
    adapter = read_adapter(peft_folder(tmp_path / "adapter", tensors))
    assert_same_bits(adapter.tensors, tensors_of("roberta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(2, 6), (3, 6)])
def test_two_peft_tensors_with_one_canonical_name_are_refused(tmp_path, dtype, shape):
    tensors = as_peft(tensors_of("roberta"))
    name = "base_model.model.classifier.dense.modules_to_save.default.weight"
    tensors[name] = torch.ones(shape).to(dtype)
    folder = peft_folder(tmp_path / "adapter", tensors)
    refused(
        lambda: read_adapter(folder),
        folder / "adapter_model.safetensors",
        "holds classifier.dense.weight under two names",
    )


def test_pefts_original_copy_of_a_head_is_ignored(tmp_path):
    tensors = as_peft(tensors_of("roberta"))
    tensors["base_model.model.classifier.original_module.dense.bias"] = torch.ones(2)
    tensors["base_model.model.classifier.modules_to_save.default.dense.bias"] = tensors[
        "base_model.model.classifier.dense.bias"
    ].clone()
    adapter = read_adapter(peft_folder(tmp_path / "adapter", tensors))
    assert_same_bits(adapter.tensors, tensors_of("roberta"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_folder_has_pefts_settings_and_names(tmp_path, family):
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


def test_a_head_of_which_only_biases_were_trained_is_not_a_module_to_save(tmp_path):
    """PEFT would look for its weight. With "all" biases, it saves a head's without the weight."""
    tensors = tensors_of("deberta") | {"deberta.embeddings.LayerNorm.bias": torch.ones(6)}
    del tensors["pooler.dense.weight"]
    metadata = replace(adapter_of("deberta").lora, bias="all")
    write_adapter(tmp_path / "a", Adapter(tensors, metadata), "peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["bias"], config["modules_to_save"]) == ("all", ["classifier"])
    assert_same_bits(read_adapter(tmp_path / "a").tensors, tensors)


def test_gpt2s_two_updates_become_blocks_of_one(tmp_path):
    """The blocks are as drawn in peft.py, and the rest of B is zero."""
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
def test_an_update_of_all_of_c_attn_stays_one_update(tmp_path, stray):
    """One value outside of the blocks makes it one. This project's layers cannot hold it."""
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


def test_a_failed_write_of_pefts_settings_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(peft_writing.json, "dumps", fail)
    info = LoraMetadata(rank=2, alpha=3, targets=("query", "value"))
    with pytest.raises(KeyboardInterrupt):
        write_adapter(tmp_path / "a", replace(adapter_of("roberta"), metadata=info), "peft")
    assert listing(tmp_path) == set()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embed.lora_A": drawn(2, 6), "embed.lora_B": drawn(6, 2)}, "embedding"),
        ({"transformer.wte.lora_A": drawn(2, 6), "transformer.wte.lora_B": drawn(6, 2)}, "embed"),
    ],
)
def test_modules_that_seem_to_be_embeddings_are_refused_unless_listed(tmp_path, tensors, message):
    metadata = lora_metadata(tensors, rank=2, alpha=3)
    adapter = Adapter(tensors, metadata, "this adapter")
    refused(lambda: write_adapter(tmp_path / "a", adapter, "peft"), "this adapter", message)
    assert listing(tmp_path) == set()
    listed = replace(metadata, embeddings=tuple(lora_modules(tensors)))
    write_adapter(tmp_path / "a", replace(adapter, metadata=listed), "peft")
    assert read_adapter(tmp_path / "a").lora.embeddings == listed.embeddings


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"scale": drawn(6)}, "brings scale, a parameter of the model itself"),
        ({"head.0": drawn(6)}, "brings head.0, whose module is an nn.ParameterList"),
        ({"layer.scale": drawn(6)}, "save all of it, including layer.attention, which has LoRA"),
        (
            {"head.base_layer.bias": drawn(6)},
            "in which PEFT takes base_layer for a part",
        ),
        ({"original_module.weight": drawn(6, 6)}, "in which PEFT takes original_module for a part"),
        (
            {"modules_to_save.lora_A": drawn(2, 6), "modules_to_save.lora_B": drawn(6, 2)},
            "in which PEFT takes modules_to_save for a part that it has added",
        ),
    ],
)
def test_parameters_that_peft_does_not_save_are_refused(tmp_path, tensors, message):
    layer = "layer.attention"
    tensors = {f"{layer}.lora_A": drawn(2, 6), f"{layer}.lora_B": drawn(6, 2)} | tensors
    adapter = Adapter(tensors, lora_metadata(tensors, rank=2, alpha=3), "this adapter")
    refused(lambda: write_adapter(tmp_path / "a", adapter, "peft"), "this adapter", message)
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("where", range(2))
def test_stacked_and_other_updates_can_be_in_one_folder(tmp_path, where):
    """In the folder, they have different ranks with the same scaling.

    Its `r` and `lora_alpha` are those of most modules: here of the two with stacked updates.
    """
    other = f"transformer.h.{where}.mlp.c_proj"
    tensors = {**tensors_of("gpt2")}
    tensors |= {f"{other}.lora_A": drawn(2, 24, seed=5), f"{other}.lora_B": drawn(6, 2, seed=5)}
    metadata = lora_metadata(tensors, rank=2, alpha=3)
    write_adapter(tmp_path / "a", Adapter(tensors, metadata, "this adapter"), "peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert config["rank_pattern"] == {other: 2}
    assert config["alpha_pattern"] == {other: 3}
    adapter = read_adapter(tmp_path / "a")
    assert_same_bits(adapter.tensors, tensors)
    assert adapter.metadata == metadata
    assert set(adapter.metadata.targets) == {"c_attn", "mlp.c_proj"}


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_settings_name_the_adapted_layers(tmp_path, layers):
    """Otherwise PEFT would adapt the other layers too, for which there are no tensors."""
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
