"""What a run says of an adapter's file that cannot confirm its flags."""

from dataclasses import replace

import pytest
import torch
from adapter_files import INFOS, tensors_of

from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import write_adapter
from transformers import TrainingArguments
from transformers.fine_tuning.adapted_model import check_arguments, read_adapters
from transformers.fine_tuning.arguments import AdaptedModelArguments

BASE = "does not record its base's fingerprint: cannot check that its base is some/base"


@pytest.fixture
def said(tmp_path, caplog):
    """``said(file, **flags)``: what an evaluation with this file logs."""

    def check(file, **flags):
        arguments = AdaptedModelArguments(
            model_name_or_path="some/base", apply_lora=True, lora_path=str(tmp_path / file), **flags
        )
        run = TrainingArguments(output_dir=str(tmp_path / "out"), do_eval=True)
        caplog.clear()
        check_arguments(arguments, run, read_adapters(arguments))
        return caplog.text

    return check


def test_a_file_without_base_and_alpha(tmp_path, said):
    torch.save(tensors_of("roberta"), tmp_path / "lora.bin")
    text = said("lora.bin", lora_alpha=32)
    assert f"lora.bin {BASE}" in text
    assert "lora.bin does not record its alpha: cannot check that it is 32" in text


def test_a_file_without_base(tmp_path, said):
    metadata = replace(INFOS["roberta"], base=None, base_fingerprint=None)
    write_adapter(tmp_path / "a.safetensors", Adapter(tensors_of("roberta"), metadata))
    text = said("a.safetensors", lora_alpha=3)
    assert f"a.safetensors {BASE}" in text
    assert "its alpha" not in text


def test_a_file_that_says_both(tmp_path, said):
    write_adapter(tmp_path / "a.safetensors", Adapter(tensors_of("roberta"), INFOS["roberta"]))
    assert "cannot check" not in said("a.safetensors")
