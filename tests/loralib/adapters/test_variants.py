"""Tests that an adapter's variant is recorded, and that all that use the adapter compute it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter, lora_metadata
from loralib.adapters.loading import load_into
from loralib.errors import CheckpointError

RANK, ALPHA = 4, 6


def model_with(variant: str | None) -> nn.Sequential:
    """One linear layer, with LoRA of this variant, or plain."""
    torch.manual_seed(0)
    settings = {"r": RANK, "lora_alpha": ALPHA, "variant": variant} if variant else {}
    layer = (lora.Linear if variant else nn.Linear)(5, 7, **settings)
    if variant:
        nn.init.normal_(layer.lora_B)
    return nn.Sequential(layer)


@pytest.fixture
def trained():
    return model_with("rslora")


@pytest.fixture
def adapter(trained):
    tensors = {name: t.detach() for name, t in trained.state_dict().items() if "lora_" in name}
    return Adapter(tensors, replace(lora_metadata(tensors, RANK, ALPHA), variant="rslora"), "mine")


def test_a_file_records_the_variant(adapter, tmp_path):
    lora.write_adapter(tmp_path / "a.safetensors", adapter)
    assert lora.read_adapter(tmp_path / "a.safetensors").metadata == adapter.metadata


def test_a_peft_folder_records_the_variant(adapter, tmp_path):
    lora.write_adapter(tmp_path / "a", adapter, "peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["r"], config["lora_alpha"]) == (True, RANK, ALPHA)
    assert lora.read_adapter(tmp_path / "a").metadata == adapter.metadata


def test_an_unknown_variant_is_refused(adapter, tmp_path):
    for variant in ("qlora", ["rslora"], 1):
        changed = replace(adapter, metadata=replace(adapter.metadata, variant=variant))
        with pytest.raises(CheckpointError, match="variant"):
            lora.write_adapter(tmp_path / "a.safetensors", changed)


def test_an_adapter_is_loaded_only_into_layers_of_its_variant(adapter, trained):
    same = model_with("rslora")
    load_into(same, adapter, backbones=["0."])
    assert torch.equal(same[0].lora_B, trained[0].lora_B)
    other = model_with("lora")
    nn.init.zeros_(other[0].lora_B)
    with pytest.raises(CheckpointError, match="variant rslora, the model was built with lora"):
        load_into(other, adapter, backbones=["0."])
    assert not other[0].lora_B.any()
    plain = replace(adapter, metadata=replace(adapter.metadata, variant=None))
    with pytest.raises(CheckpointError, match="variant lora, the model was built with rslora"):
        load_into(same, plain, backbones=["0."])


def test_plain_lora_is_not_recorded_as_a_variant(adapter):
    metadata = replace(adapter.metadata, variant="lora")
    assert metadata.variant is None
    assert "variant" not in metadata.to_metadata()
