"""Tests of what an adapter holds, and that its files are bit-exact."""

import copy
import os
import stat

import pytest
import torch
from compare import assert_same_bits
from tiny_adapters import FORMATS, INFO, A, Tiny, tiny_adapter
from torch import nn

from loralib.adapters.adapter import adapter_tensors, base_biases
from loralib.adapters.canonical import canonical_names
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors

# ---- names ----


@pytest.mark.parametrize(
    ("others", "of_base"),
    [
        ((), {"a.bias", "a.k_bias_k"}),
        (("a.weight",), set()),  # a head with one layer
        # A head that ends in a bias, or an attention of the base whose out_proj is trained.
        (("a.dense.weight", "a.norm.weight"), {"a.k_bias_k"}),
        (("a.gain",), set()),
        (("a.parametrizations.weight.original0",), {"a.k_bias_k"}),
        (("a.dense.lora_A", "a.dense.lora_B"), {"a.bias", "a.k_bias_k"}),
        (("a.x.lora_A", "a.out.weight"), {"a.bias", "a.k_bias_k"}),  # a base with a head in it
        (("ab.weight",), {"a.bias", "a.k_bias_k"}),
    ],
)
def test_biases_of_a_base_of_no_registered_family_are_recognized(others, of_base):
    assert base_biases(["a.bias", "a.k_bias_k", *others]) == of_base


# ---- files ----


def test_a_files_content_decides_its_format(tmp_path):
    adapter = tiny_adapter()
    write_adapter(tmp_path / "a.safetensors", adapter)
    (tmp_path / "a.safetensors").rename(tmp_path / "a.bin")
    assert_same_bits(read_adapter(tmp_path / "a.bin").tensors, adapter.tensors)
    assert read_adapter(tmp_path / "a.bin").metadata == INFO


@pytest.mark.parametrize("name", FORMATS)
def test_a_deep_copy_of_an_adapter_is_checked_before_writing(tmp_path, name):
    adapter = copy.deepcopy(tiny_adapter())
    write_adapter(tmp_path / name, adapter)
    assert_same_bits(read_adapter(tmp_path / name, lora_alpha=4).tensors, adapter.tensors)
    (tmp_path / name).unlink()
    del adapter.tensors[A]
    with pytest.raises(CheckpointError, match=rf"lacks {A}, the other half of a pair"):
        write_adapter(tmp_path / name, adapter)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_saved_on_a_gpu_are_read_to_the_cpu(monkeypatch, tmp_path, zipped):
    tensors, path = tiny_adapter().tensors, tmp_path / "gpu.bin"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    assert b"cuda:0" in path.read_bytes()
    assert_same_bits(read_adapter(path).tensors, tensors)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_may_be_overwritten_while_its_tensors_are_in_use(tmp_path, name):
    first, second = tiny_adapter(seed=1), tiny_adapter(seed=2)
    write_adapter(tmp_path / name, first)
    loaded = read_adapter(tmp_path / name)
    write_adapter(tmp_path / name, second)
    assert_same_bits(loaded.tensors, first.tensors)
    write_adapter(tmp_path / name, loaded)
    assert_same_bits(read_adapter(tmp_path / name).tensors, first.tensors)


def test_wrapped_tensors_can_be_read(tmp_path):
    tensors = tiny_adapter().tensors
    torch.save({"model_state_dict": tensors}, tmp_path / "wrapped.pt")
    assert_same_bits(read_adapter(tmp_path / "wrapped.pt").tensors, tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds something other than named tensors"),
        ({"a": 1}, "holds something other than named tensors"),
        ({1: torch.zeros(1)}, "holds something other than named tensors"),
        ({"model_state_dict": {"a": "b"}}, "holds something other than named tensors"),
        ({"a": torch.zeros(1)}, "none of its 1 tensors is LoRA's"),
        ({}, "none of its 0 tensors is LoRA's"),
        ({"a.lora_a": torch.zeros(1)}, "ends in lora_A or lora_B; a.lora_a is a name of another"),
        ({"a.lora_magnitude_vector": torch.zeros(1)}, "no tensor ends in lora_A or lora_B$"),
        (nn.Linear(2, 2), "not loaded for safety"),
    ],
)
def test_files_without_an_adapter_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=f"x.bin: .*{message}"):
        read_adapter(tmp_path / "x.bin")


def test_missing_files_are_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"none.bin: no such checkpoint file"):
        read_adapter(tmp_path / "none.bin")
    with pytest.raises(
        CheckpointError,
        match=r"holds no adapter: none of pytorch_model_lora.safetensors, pytorch_model_lora.bin",
    ):
        read_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint file"):
        read_tensors(tmp_path)


def test_in_a_folder_safetensors_are_preferred(tmp_path):
    write_adapter(tmp_path / "pytorch_model_lora.bin", tiny_adapter(seed=1))
    assert read_adapter(tmp_path).metadata is None
    write_adapter(tmp_path / "pytorch_model_lora.safetensors", tiny_adapter(seed=2))
    loaded = read_adapter(str(tmp_path))
    assert loaded.metadata == INFO
    assert loaded.source == str(tmp_path / "pytorch_model_lora.safetensors")
    assert_same_bits(loaded.tensors, tiny_adapter(seed=2).tensors)


# ---- names ----


def test_debertas_earlier_names_become_canonical():
    layer = "deberta.encoder.layer.3.attention.self"
    old = {
        f"{layer}.query_lora_a.weight": torch.tensor(1.0),
        f"{layer}.query_lora_b.weight": torch.tensor(2.0),
        f"{layer}.value_lora_a.weight": torch.tensor(3.0),
        f"{layer}.value_lora_b.weight": torch.tensor(4.0),
        f"{layer}.query_proj.weight": torch.tensor(5.0),
        "classifier.weight": torch.tensor(6.0),
    }
    new = {
        f"{layer}.query_proj.lora_A": 1.0,
        f"{layer}.query_proj.lora_B": 2.0,
        f"{layer}.value_proj.lora_A": 3.0,
        f"{layer}.value_proj.lora_B": 4.0,
        f"{layer}.query_proj.weight": 5.0,
        "classifier.weight": 6.0,
    }
    assert {name: t.item() for name, t in canonical_names(old, "old.bin").items()} == new
    del new[f"{layer}.query_proj.weight"]
    assert adapter_tensors(canonical_names(old, "old.bin")).keys() == new.keys()


def test_an_adapter_holds_lora_and_all_but_the_backbone():
    state = Tiny().state_dict()
    names = set(adapter_tensors(state))
    assert names == {name for name in state if "lora_" in name} | {
        "classifier.weight",
        "classifier.bias",
    }
    assert len(names) == 10
    assert "roberta.layer.0.query.weight" in adapter_tensors(state, ["bert"])


# ---- writing ----


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@pytest.mark.parametrize("name", ["a.bin", "a.safetensors"])
def test_files_have_the_permissions_of_new_files(tmp_path, umask, mode, name):
    old = os.umask(umask)
    try:
        write_adapter(tmp_path / name, tiny_adapter())
        assert os.umask(umask) == umask
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        write_adapter(tmp_path / "none" / "a.bin", tiny_adapter())
