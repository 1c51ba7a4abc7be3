"""The families as rows of a table: how each is built, saved and computed, by the same names.

Bases, the batch and an adapter of PEFT's for each family are those of peft_fixture.safetensors:
tiny models of upstream's, whose logits PEFT computed.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from encoder_options import NO_DROPOUT
from make_peft_fixture import FAMILIES as SHAPES
from make_peft_fixture import PeftFixture
from paths import ROOT
from torch import Tensor, nn

from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import write_adapter
from transformers import AutoModelForSequenceClassification
from transformers.adaptation_settings import targets_of_modules

sys.path.insert(0, str(ROOT / "NLG" / "src"))

import checkpoints
import lora_flags
import model as gpt2

PEFT = PeftFixture()
# The terms of successive sums in 2 layers, which are 32 wide and at most 4 · 32 inside: four
# products, attention over 18 positions, the second feed-forward product; a convolution; embeddings
# and a head.
TERMS = 2 * (4 * 32 + 8 + 18 + 4 * 32) + 3 * 32 + 3 * 32


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Args:
        name: as in the fixture.
        case: PEFT's adapter of the fixture.
        open: `open(base folder, adapter or None)`: a model in evaluation mode, without dropout, as
            this family's scripts build it; with the adapter in LoRA layers, if one is given.
        write: `write(model, folder)`: the adapter's file, as this family's scripts save it.
        logits: `logits(model, ids, mask)`: (rows, labels), or (rows, length, vocabulary).
        delta: `delta(A, B)`: what a layer's LoRA adds to its weight, without the scaling.
    """

    name: str
    case: str
    open: Callable[[Path, Adapter | None], nn.Module]
    write: Callable[[nn.Module, Path], Path]
    logits: Callable[[nn.Module, Tensor, Tensor], Tensor]
    delta: Callable[[Tensor, Tensor], Tensor]


# ---- RoBERTa and DeBERTa-v2 ----


def _open_encoder(base: Path, adapter: Adapter | None) -> nn.Module:
    if adapter is None:
        return AutoModelForSequenceClassification.from_pretrained(base, **NO_DROPOUT)
    known = adapter.metadata
    positions = {} if known.positions is None else {"lora_positions": known.positions}
    model = AutoModelForSequenceClassification.from_pretrained(
        base,
        apply_lora=True,
        lora_r=known.rank,
        lora_alpha=known.alpha,
        lora_targets=targets_of_modules(known.targets),
        **positions,
        **NO_DROPOUT,
    )
    assert model.load_adapters([adapter]) == []
    return model


def _write_encoder(model: nn.Module, folder: Path) -> Path:
    write_adapter(folder / "pytorch_model_lora.safetensors", model.adapter())
    return folder / "pytorch_model_lora.safetensors"


def _encoder_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=mask).logits


def _product(A: Tensor, B: Tensor) -> Tensor:
    return B @ A


# ---- GPT-2 ----


def _tiny_config_of(card: str, **lora_fields) -> gpt2.GPT2Config:
    names = ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
    return gpt2.GPT2Config(**{name: SHAPES["gpt2"][0][name] for name in names}, **lora_fields)


def _open_gpt2(base: Path, adapter: Adapter | None) -> nn.Module:
    parser = argparse.ArgumentParser()
    lora_flags.add_model_params(parser)
    args = parser.parse_args(["--init_checkpoint", str(base / "model.safetensors")])
    source = None if adapter is None else adapter.source
    with mock.patch.object(checkpoints, "config_of", _tiny_config_of):
        model, opened = checkpoints.open_model(args, source)
    model.base = opened
    return model.eval()


def _write_gpt2(model: nn.Module, folder: Path) -> Path:
    checkpoints.save_model(folder / "model.pt", model, model.base, lora_only=True)
    return folder / "model.pt"


def _gpt2_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return model(ids) * mask[..., None]


def _blocks(A: Tensor, B: Tensor) -> Tensor:
    """A block for the query and one for the value; the key's third stays; (inputs, outputs)."""
    (A_query, A_value), (B_query, B_value) = A.chunk(2), B.chunk(2)
    query, value = B_query @ A_query, B_value @ A_value
    return torch.cat((query, torch.zeros_like(query), value)).T


FAMILIES = (
    Family(
        "roberta",
        "roberta_query_value",
        _open_encoder,
        _write_encoder,
        _encoder_logits,
        _product,
    ),
    Family(
        "deberta",
        "deberta_query_value",
        _open_encoder,
        _write_encoder,
        _encoder_logits,
        _product,
    ),
    Family(
        "gpt2",
        "gpt2_blocks",
        _open_gpt2,
        _write_gpt2,
        _gpt2_logits,
        _blocks,
    ),
)
