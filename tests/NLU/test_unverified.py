"""Warnings about an adapter's file that does not record its base or alpha."""

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
def logged(tmp_path, caplog):
    """``logged(file, **flags)``: what an evaluation of this file logs."""

    def check(file, **flags):
        arguments = AdaptedModelArguments(
            model_name_or_path="some/base", apply_lora=True, lora_path=str(tmp_path / file), **flags
        )
        run = TrainingArguments(output_dir=str(tmp_path / "out"), do_eval=True)
        caplog.clear()
        check_arguments(arguments, run, read_adapters(arguments))
        return caplog.text

    return check


def test_a_file_without_base_and_alpha_gives_two_warnings(tmp_path, logged):
    torch.save(tensors_of("roberta"), tmp_path / "lora.bin")
    text = logged("lora.bin", lora_alpha=32)
    assert f"lora.bin {BASE}" in text
    assert "lora.bin does not record its alpha: cannot check that it is 32" in text


def test_a_file_without_base_gives_a_warning(tmp_path, logged):
    metadata = replace(INFOS["roberta"], base=None, base_fingerprint=None)
    write_adapter(tmp_path / "a.safetensors", Adapter(tensors_of("roberta"), metadata))
    text = logged("a.safetensors", lora_alpha=3)
    assert f"a.safetensors {BASE}" in text
    assert "its alpha" not in text


def test_a_file_that_records_both_gives_no_warning(tmp_path, logged):
    write_adapter(tmp_path / "a.safetensors", Adapter(tensors_of("roberta"), INFOS["roberta"]))
    assert "cannot check" not in logged("a.safetensors")
