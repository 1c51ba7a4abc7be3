"""What the tests of adapters on disk share: small adapters of every family and format."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import read_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError

RELEASE = Path(__file__).parents[3] / "shared" / "data" / "release" / "roberta_base_lora_mnli.bin"
TARGETS = {"lora": "out.safetensors", "release": "out.bin", "peft": "out"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLAIN, GPT2_LAYER = "encoder.0.up", "transformer.h.{}.attn.c_attn"
HEADS = {
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "deberta": ("pooler.dense", "classifier"),
    "gpt2": (),
    "plain": (),
}
MODULES = {
    "roberta": [
        f"roberta.encoder.layer.{number}.attention.self.{name}"
        for number in range(2)
        for name in ("query", "value")
    ],
    "deberta": [
        f"deberta.encoder.layer.{number}.attention.self.{name}"
        for number in range(2)
        for name in ("query_proj", "value_proj")
    ],
    "gpt2": [GPT2_LAYER.format(number) for number in range(2)],
    "plain": [PLAIN, "encoder.1.up", "last"],
}
INFOS = {
    family: LoraMetadata(
        rank=2,
        alpha=3,
        targets=targets,
        dropout=0.1,
        base=f"some/{family}",
        base_revision="main",
        base_fingerprint="0123456789abcdef",
        task="mnli" if HEADS[family] else None,
        head="sequence_classification" if HEADS[family] else None,
        labels=("no", "yes") if HEADS[family] else None,
        text_columns=("premise", "claim") if HEADS[family] else None,
    )
    for family, targets in {
        "roberta": ("query", "value"),
        "deberta": ("query_proj", "value_proj"),
        "gpt2": ("c_attn",),
        "plain": ("last", "up"),
    }.items()
}
FAMILIES = tuple(MODULES)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random normal values, and among them a negative zero, the largest number and a subnormal."""
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    tensor = torch.randn(shape, generator=generator).to(dtype)
    if tensor.numel() > 3:
        limits = torch.finfo(dtype)
        tensor.view(-1)[:3] = torch.tensor([-0.0, limits.max, limits.tiny / 4], dtype=dtype)
    return tensor


def tensors_of(family: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """An adapter of rank 2 for layers of width 6: GPT-2's has two updates in each."""
    stacked = 2 if family == "gpt2" else 1
    tensors = {}
    for seed, module in enumerate(MODULES[family]):
        tensors[f"{module}.lora_A"] = drawn(2 * stacked, 6, dtype=dtype, seed=seed)
        tensors[f"{module}.lora_B"] = drawn(6 * stacked, 2, dtype=dtype, seed=seed)
    for seed, head in enumerate(HEADS[family]):
        tensors[f"{head}.weight"] = drawn(2, 6, dtype=dtype, seed=seed)
        tensors[f"{head}.bias"] = drawn(2, dtype=dtype, seed=seed)
    return tensors


def adapter_of(family: str, dtype: torch.dtype = torch.float32) -> Adapter:
    return Adapter(tensors_of(family, dtype), INFOS[family], "this adapter")


def as_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's names, for adapters without stacked updates."""
    ends = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
    named = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        named[f"base_model.model.{module}.{ends.get(last, last)}"] = tensor
    return named


def peft_folder(
    path: Path, tensors: Mapping[str, Tensor] | None = None, torch_file: bool = False, **config
) -> Path:
    """A folder as PEFT writes it, without this project's metadata; `config` replaces settings."""
    tensors = as_peft(tensors_of("roberta")) if tensors is None else tensors
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["query", "value"]}
    path.mkdir()
    if torch_file:
        torch.save(tensors, path / "adapter_model.bin")
    else:
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    return path


def load_copied(path: Path) -> dict[str, Tensor]:
    """A safetensors file's tensors, which do not change if the file is overwritten.

    load_file() maps the file, and save_file() of safetensors before 0.8 writes into the mapping.
    """
    return load(path.read_bytes())


def refused(call, path: str | Path, *parts: str) -> str:
    """Asserts that `call` raises a CheckpointError of one line with `path` and all of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    assert str(path) in text
    for part in parts:
        assert part in text
    return text


def refused_file(tmp_path: Path, content: object, *parts: str, name: str = "x.bin") -> None:
    torch.save(content, tmp_path / name)
    refused(lambda: read_adapter(tmp_path / name), tmp_path / name, *parts)


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def user_model() -> nn.Module:
    """A user's own model: two adapted layers, one with a bias; a plain one; a convolution."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "up": lora.Linear(4, 6, r=2),
            "down": lora.Linear(6, 4, r=2, bias=False),
            "norm": nn.LayerNorm(4),
        }
    )
    for parameter in model.parameters():
        parameter.data.normal_()
    return model
