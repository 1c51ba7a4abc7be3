"""convert.py takes LoRA and head out of a full model's checkpoint."""

import shutil

import pytest
import torch
from conversions import ENCODERS, LABELS, OUT, assert_same_tensors

from loralib.adapters.formats import read_adapter
from loralib.io.tensors import read_tensors, write_wrapped_tensors
from transformers import AutoModelForSequenceClassification
from transformers.weight_files import read_weights


@pytest.mark.parametrize("said", [True, False])
def test_a_full_gpt2_checkpoint_has_its_lora_taken_out(convert, failure, trained, tmp_path, said):
    """As the release's scripts write it, and as this project's do, with metadata."""
    one = trained["gpt2"]
    names = {
        f"transformer.{name.removeprefix('transformer.')}": tensor
        for name, tensor in read_weights(one.base).items()
        if not name.startswith("lm_head")
    }
    everything = {f"module.{k}": v for k, v in {**names, **one.adapter.tensors}.items()}
    metadata = one.adapter.metadata.to_metadata() if said else {}
    write_wrapped_tensors(tmp_path / "model.100.pt", everything, metadata)
    alpha = [] if said else ["--lora_alpha", one.adapter.metadata.alpha]
    if not said:
        line = failure(tmp_path / "model.100.pt", tmp_path / "e2e", "--to", "peft")
        assert "does not say with what alpha it was trained" in line
    assert convert(tmp_path / "model.100.pt", "--info", *alpha)["format"] == "in a full model"
    for format in ("lora", "release", "peft"):
        out = tmp_path / OUT[format]
        notes = convert(tmp_path / "model.100.pt", out, "--to", format, *alpha)["notes"]
        assert notes[0].endswith("is a full model: its LoRA and head were taken")
        found = read_adapter(out)
        assert_same_tensors(found.tensors, one.adapter.tensors)
        if said and format == "lora":
            assert found.metadata == one.adapter.metadata
        out.unlink() if out.is_file() else shutil.rmtree(out)


def test_a_full_gpt2_checkpoint_without_lora_is_refused(failure, trained, tmp_path):
    base = dict(read_weights(trained["gpt2"].base))
    torch.save(base, tmp_path / "base.pt")
    line = failure(tmp_path / "base.pt", tmp_path / "out.safetensors")
    assert f"base.pt: none of its {len(base)} tensors is LoRA's" in line


@pytest.mark.parametrize("family", ENCODERS)
def test_a_full_encoder_checkpoint_has_its_lora_taken_out(convert, trained, tmp_path, family):
    """Rank, alpha and labels are those of the config.json beside it."""
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
    assert notes[0].endswith("is a full model: its LoRA and head were taken")
    found = read_adapter(tmp_path / "out.safetensors")
    assert_same_tensors(found.tensors, one.adapter.tensors)
    assert (found.metadata.alpha, found.metadata.labels) == (one.adapter.metadata.alpha, LABELS)


def test_a_full_checkpoint_without_settings_beside_it(convert, failure, trained, tmp_path):
    one = trained["roberta"]
    tensors = read_tensors(one.base / "model.safetensors")[0]
    tensors = {f"roberta.{name}": tensor for name, tensor in tensors.items()}
    torch.save(tensors | one.adapter.tensors, tmp_path / "whole.bin")
    line = failure(tmp_path / "whole.bin", tmp_path / "out.safetensors")
    assert "does not say with what alpha it was trained" in line
    convert(tmp_path / "whole.bin", tmp_path / "out.bin")
    assert_same_tensors(read_adapter(tmp_path / "out.bin").tensors, one.adapter.tensors)
