"""Fixtures with a tiny GPT-2 in place of every model card, and its files."""

import pytest
import torch
from gpt2_files import BLOCKS, POSITIONS, VOCABULARY, WIDTH, draw_base, parse
from torch import nn

import checkpoints
import loralib as lora
from checkpoints import open_model, save_model
from model import GPT2Config


@pytest.fixture(autouse=True)
def tiny_card(monkeypatch):
    """Every model card stands for one tiny shape."""

    def tiny(card, **lora_fields):
        return GPT2Config(WIDTH, BLOCKS, 2, VOCABULARY, POSITIONS, **lora_fields)

    monkeypatch.setattr(checkpoints, "config_of", tiny)


@pytest.fixture
def base_path(tmp_path):
    path = tmp_path / "base.bin"
    torch.save(draw_base(), path)
    return path


@pytest.fixture
def open_lora(base_path):
    """``open_lora(*flags)``: a model whose random A and B alone are trained, and its base."""

    def open_lora(*flags):
        flags = flags or ("--lora_dim", 2, "--lora_alpha", 6)
        model, base = open_model(parse("--init_checkpoint", base_path, *flags))
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
        lora.mark_only_lora_as_trainable(model)
        return model, base

    return open_lora


@pytest.fixture
def lora_path(tmp_path, open_lora):
    """A file of LoRA alone, as this project writes it: rank 2, alpha 6, trained on `base_path`."""
    save_model(tmp_path / "model.5.pt", *open_lora(), lora_only=True)
    return tmp_path / "model.5.pt"
