"""Tests that convert.py extracts LoRA and head from a full model's checkpoint."""

import json
import shutil

import pytest
import torch
from conversions import ENCODERS, LABELS, OUT, assert_same_tensors, write_as_peft
from safetensors.torch import save_file

from loralib.adapters.formats import read_adapter
from loralib.io.tensors import read_tensors, write_wrapped_tensors
from transformers import AutoModelForSequenceClassification
from transformers.weight_files import read_weights


@pytest.mark.parametrize("has_metadata", [True, False])
def test_lora_is_extracted_from_a_full_gpt2_checkpoint(
    convert, failure, trained, tmp_path, has_metadata
):
    """The release's scripts write it without metadata, this project's with metadata."""
    one = trained["gpt2"]
    names = {
        f"transformer.{name.removeprefix('transformer.')}": tensor
        for name, tensor in read_weights(one.base).items()
        if not name.startswith("lm_head")
    }
    everything = {f"module.{k}": v for k, v in {**names, **one.adapter.tensors}.items()}
    metadata = one.adapter.metadata.to_metadata() if has_metadata else {}
    write_wrapped_tensors(tmp_path / "model.100.pt", everything, metadata)
    alpha = [] if has_metadata else ["--lora_alpha", one.adapter.metadata.alpha]
    if not has_metadata:
        line = failure(tmp_path / "model.100.pt", tmp_path / "e2e", "--to", "peft")
        assert "does not record the alpha it was trained with" in line
    assert convert(tmp_path / "model.100.pt", "--info", *alpha)["format"] == "in a full model"
    for format in ("lora", "release", "peft"):
        out = tmp_path / OUT[format]
        notes = convert(tmp_path / "model.100.pt", out, "--to", format, *alpha)["notes"]
        assert notes[0].endswith("is a full model: only its LoRA and head are taken")
        found = read_adapter(out)
        assert_same_tensors(found.tensors, one.adapter.tensors)
        if has_metadata and format == "lora":
            assert found.metadata == one.adapter.metadata
        out.unlink() if out.is_file() else shutil.rmtree(out)


def test_a_full_gpt2_checkpoint_without_lora_is_refused(failure, trained, tmp_path):
    base = dict(read_weights(trained["gpt2"].base))
    torch.save(base, tmp_path / "base.pt")
    line = failure(tmp_path / "base.pt", tmp_path / "out.safetensors")
    assert f"base.pt: none of its {len(base)} tensors is LoRA's" in line


@pytest.mark.parametrize("family", ENCODERS)
def test_lora_is_extracted_from_a_full_encoder_checkpoint(convert, trained, tmp_path, family):
    """Rank, alpha and labels are those of the config.json next to it."""
    one = trained[family]
    settings = {"id2label": dict(enumerate(LABELS)), "lora_r": 2, "lora_alpha": 6}
    model = AutoModelForSequenceClassification.from_pretrained(
        one.base, apply_lora=True, **settings
    )
    model.load_adapters([one.adapter])
    model.save_pretrained(tmp_path / "checkpoint")
    whole = tmp_path / "checkpoint" / "pytorch_model.bin"
    if not whole.is_file():
        whole = tmp_path / "checkpoint" / "model.safetensors"
    notes = convert(whole, tmp_path / "out.safetensors")["notes"]
    assert notes[0].endswith("is a full model: only its LoRA and head are taken")
    found = read_adapter(tmp_path / "out.safetensors")
    assert_same_tensors(found.tensors, one.adapter.tensors)
    assert (found.metadata.alpha, found.metadata.labels) == (one.adapter.metadata.alpha, LABELS)
    # If the folder has the adapter's own file as well, as after training, that file is read.
    (tmp_path / "out.safetensors").rename(whole.with_name("pytorch_model_lora.safetensors"))
    assert convert(whole.parent, "--info")["format"] == "lora"


def sharded(trained, folder):
    """Writes a full checkpoint in two files, one of which looks complete; returns its adapter."""
    one = trained["roberta"]
    tensors = read_tensors(one.base / "model.safetensors")[0]
    whole = {f"roberta.{n}": t for n, t in tensors.items()} | one.adapter.tensors
    parts = [{n: t for n, t in whole.items() if ("layer.1" in n) == second} for second in (0, 1)]
    folder.mkdir()
    for number, part in enumerate(parts):
        save_file({n: t.clone() for n, t in part.items()}, folder / f"part-{number}.safetensors")
    files = {name: f"part-{i}.safetensors" for i, part in enumerate(parts) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    settings = {"model_type": "roberta", "apply_lora": True, "lora_r": 2, "lora_alpha": 6}
    (folder / "config.json").write_text(json.dumps(settings))
    return one.adapter


def test_all_files_of_a_checkpoint_are_read(convert, failure, trained, tmp_path):
    adapter = sharded(trained, tmp_path / "full")
    line = failure(tmp_path / "full" / "part-0.safetensors", tmp_path / "a.safetensors")
    assert "is one shard of a model (see model.safetensors.index.json)" in line
    convert(tmp_path / "full", tmp_path / "a.safetensors")
    assert_same_tensors(read_adapter(tmp_path / "a.safetensors").tensors, adapter.tensors)


def test_a_full_model_without_lora_in_a_folder(failure, trained, tmp_path):
    line = failure(trained["roberta"].base, tmp_path / "a.safetensors")
    assert "holds no LoRA weights; give a checkpoint that was trained with them" in line


def test_pefts_adapter_with_weights_of_the_base_is_refused(failure, tmp_path):
    query = "roberta.encoder.layer.0.attention.self.query"
    norm = "roberta.encoder.layer.0.output.LayerNorm.weight"
    tensors = {f"{query}.lora_A.weight": torch.ones(4, 16), norm: torch.ones(16)}
    tensors[f"{query}.lora_B.weight"] = torch.ones(16, 4)
    modules = {"target_modules": ["query"], "modules_to_save": ["LayerNorm"]}
    write_as_peft(tmp_path / "in", tensors, **modules)
    line = failure(tmp_path / "in", tmp_path / "a.safetensors")
    reason = (
        f"holds {norm}, a weight of the base, which adapters here cannot hold: merge it with PEFT"
    )
    assert line.endswith(reason)


def test_a_full_checkpoint_without_settings_next_to_it(convert, failure, trained, tmp_path):
    one = trained["roberta"]
    tensors = read_tensors(one.base / "model.safetensors")[0]
    tensors = {f"roberta.{name}": tensor for name, tensor in tensors.items()}
    torch.save(tensors | one.adapter.tensors, tmp_path / "whole.bin")
    line = failure(tmp_path / "whole.bin", tmp_path / "out.safetensors")
    assert "does not record the alpha it was trained with" in line
    convert(tmp_path / "whole.bin", tmp_path / "out.bin")
    assert_same_tensors(read_adapter(tmp_path / "out.bin").tensors, one.adapter.tensors)
