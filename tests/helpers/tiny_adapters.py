"""A tiny model with LoRA and a head, and its adapter."""

import all_families  # noqa: F401
import pytest
import torch
from compare import assert_same_bits
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter, adapter_tensors
from loralib.adapters.loading import load_into
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError

FORMATS = ("lora.bin", "lora.pt", "lora.safetensors")


class Layer(nn.Module):
    def __init__(self, targets, rank, alpha):
        super().__init__()
        for name in ("query", "key", "value"):
            linear = lora.Linear(8, 8, r=rank if name in targets else 0, lora_alpha=alpha)
            setattr(self, name, linear)


class Tiny(nn.Module):
    """A backbone of two layers under `roberta.`, and a head outside."""

    def __init__(self, targets=("query", "value"), rank=2, alpha=4, labels=3, seed=0):
        super().__init__()
        self.roberta = nn.ModuleDict(
            {"layer": nn.ModuleList(Layer(targets, rank, alpha) for _ in "ab")}
        )
        self.classifier = nn.Linear(8, labels)
        torch.manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.normal_()


INFO = LoraMetadata(
    rank=2,
    alpha=4.0,
    targets=("query", "value"),
    base="some/base",
    base_fingerprint="0123456789abcdef",
    task="mnli",
    labels=("entailment", "neutral", "contradiction"),
)
A = "roberta.layer.0.query.lora_A"


def tiny_adapter(metadata=INFO, **settings):
    return Adapter(adapter_tensors(Tiny(**settings).state_dict()), metadata, "lora file")


def refuses(model, adapter, *parts, **arguments):
    """Asserts that `load_into` raises one line with all of `parts`, and changes nothing."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_into(model, adapter, **arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert adapter.source in text
    for part in parts:
        assert part in text
    assert_same_bits(model.state_dict(), before)
