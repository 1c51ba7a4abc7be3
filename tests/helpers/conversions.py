"""Bases and adapters for convert.py: tiny RoBERTa, DeBERTa-v2 and GPT-2."""

import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from compare import assert_close_to_rounding
from encoder_options import RELATIVE
from paths import ROOT
from safetensors.torch import save_file

from loralib.adapters.adapter import Adapter
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.metadata import LoraMetadata
from transformers import (
    AutoModelForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)
from transformers.configuration_utils import OWN_SETTINGS

sys.path.append(str(ROOT / "NLG" / "src"))

SCRIPT = ROOT / "utils" / "convert.py"
FAMILIES = ("roberta", "deberta", "gpt2")
ENCODERS = ("roberta", "deberta")
OUT = {"lora": "out.safetensors", "release": "out.bin", "peft": "out", "merged": "out"}
LABELS = ("yes", "no", "maybe")
# Settings with which a model's LoRA computes the same as PEFT's.
SETTINGS_LIKE_PEFT = {"roberta": {}, "deberta": {"lora_positions": True}}

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 30,
    "initializer_range": 0.3,
}
# The terms of successive sums: in each layer four products of 16 columns, one of at most 64, and
# attention; a convolution; embeddings and a head.
TERMS = 2 * (4 * 16 + 64 + 8 + 12) + 3 * 16 + 3 * 16
GPT2_SHAPE = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 30}
MODELS = {
    "roberta": {
        "plain": RobertaModel,
        "lm": RobertaForMaskedLM,
        "classifier": RobertaForSequenceClassification,
    },
    "deberta": {
        "plain": DebertaV2Model,
        "lm": DebertaV2ForMaskedLM,
        "classifier": DebertaV2ForSequenceClassification,
    },
}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file's content, and every folder, hidden ones too."""
    paths = folder.rglob("*")
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in paths
    }


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def write_as_peft(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> None:
    """Writes a folder as PEFT does: LoRA of rank 4 and alpha 10, and other tensors that it saves.

    Args:
        folder: a new one.
        tensors: by the model's names, without ``base_model.model.``.
        config: target_modules and other settings.
    """
    folder.mkdir(parents=True)
    named = {f"base_model.model.{name}": tensor.clone() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], format: str) -> None:
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if format == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin")


def make_base(
    folder: Path,
    family: str,
    head: str = "plain",
    format: str = "safetensors",
    gamma: bool = False,
    dtype: torch.dtype = torch.float32,
    number: int = 0,
    **settings,
) -> Path:
    """A base's folder as upstream writes it: without this fork's own settings, with a tokenizer."""
    folder.mkdir(parents=True)
    if family == "gpt2":
        return make_gpt2(folder, format, dtype, number, **settings)
    torch.manual_seed(number)
    own = {"type_vocab_size": 1} if family == "roberta" else RELATIVE
    config = {"roberta": RobertaConfig, "deberta": DebertaV2Config}[family]
    model = MODELS[family][head](config(**{**SHAPE, **own, **settings}))
    for name, parameter in model.named_parameters():
        if "bias" in name or "Norm" in name:
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.2)
    tensors = {name: tensor.to(dtype) for name, tensor in model.full_state_dict().items()}
    if gamma:
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, name in itertools.product(old, list(tensors)):
            if name.endswith(new):
                tensors[name.removesuffix(new) + old[new]] = tensors.pop(name)
    write_weights(folder, tensors, format)
    values = {k: v for k, v in model.config.to_dict().items() if k not in OWN_SETTINGS}
    values |= {"architectures": ["Other"], "torch_dtype": "float16", "dtype": "float16"}
    values |= {"transformers_version": "4.30.0", "model_type": config.model_type}
    (folder / "config.json").write_text(json.dumps(values))
    for name in ("vocab.json", "merges.txt", "spm.model", "tokenizer_config.json"):
        (folder / name).write_text(f"{name} of {folder.name}")
    (folder / "training_args.bin").write_text("not to be copied")
    return folder


def gpt2_model(**settings):
    from model import GPT2Config, GPT2LMModel

    return GPT2LMModel(GPT2Config(**{**GPT2_SHAPE, **settings}))


def make_gpt2(folder: Path, format: str, dtype: torch.dtype, number: int, **settings) -> Path:
    torch.manual_seed(number)
    model = gpt2_model(**settings)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape), alpha=model.config.n_embd**-0.5)
    # Under the names of the published files.
    tensors = {
        name.removeprefix("transformer."): tensor.detach().to(dtype)
        for name, tensor in model.named_parameters()
    }
    write_weights(folder, tensors, format)
    values = {**GPT2_SHAPE, **settings, "model_type": "gpt2", "activation_function": "gelu_new"}
    values |= {"architectures": ["GPT2Model"], "dtype": "float16", "n_ctx": 30}
    (folder / "config.json").write_text(json.dumps(values))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text(f"{name} of {folder.name}")
    return folder


BATCH = {
    "input_ids": torch.randint(5, 40, (3, 9), generator=seed(1)),
    "attention_mask": (torch.arange(9) < torch.tensor([9, 4, 7])[:, None]).long(),
}


@dataclass(frozen=True)
class Trained:
    """An adapter, its base's folder, and the logits of both with LoRA layers."""

    base: Path
    adapter: Adapter
    logits: torch.Tensor


def train(base: Path, family: str, bias: str = "none", **settings) -> Trained:
    """An adapter as if trained on a base; `settings` are the model's."""
    torch.manual_seed(8)
    if family == "gpt2":
        return train_gpt2(base)
    settings = {
        "id2label": dict(enumerate(LABELS)),
        "finetuning_task": "mnli",
        "text_columns": ("premise", "claim"),
        "lora_dropout": 0.1,
        "lora_r": 2,
        "lora_alpha": 6,
        **settings,
    }
    model = AutoModelForSequenceClassification.from_pretrained(base, apply_lora=True, **settings)
    model.eval()
    targets = {name.rpartition(".")[0] for name in model.state_dict() if "lora_" in name}
    biases = {}
    for name, parameter in model.named_parameters():
        in_base = name.startswith(f"{model.base_model_prefix}.")
        is_own = name.rpartition(".")[0] in targets or bias == "all"
        if bias != "none" and in_base and is_own and name.endswith("bias"):
            biases[name] = parameter
        if name in biases or "lora_" in name or not in_base:
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.5)
    with torch.no_grad():
        logits = model(**BATCH).logits
    adapter = model.adapter()
    tensors = adapter.tensors | {name: p.detach() for name, p in biases.items()}
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return Trained(base, Adapter(tensors, replace(adapter.metadata, bias=bias)), logits)


def train_gpt2(base: Path) -> Trained:
    from conversion import gpt2_folder
    from weights import canonical_names, load_base

    settings = json.loads((base / "config.json").read_text())
    plain = canonical_names(gpt2_folder.read_weights(base), str(base))
    shape = {key: settings[key] for key in GPT2_SHAPE}
    model = load_base(gpt2_model(**shape, lora_attn_dim=2, lora_attn_alpha=6).config, plain, "base")
    lora = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for parameter in lora.values():
        parameter.data.add_(torch.randn(parameter.shape), alpha=2 * shape["n_embd"] ** -0.5)
    model.eval()
    with torch.no_grad():
        logits = model(BATCH["input_ids"])
    info = LoraMetadata(
        rank=2,
        alpha=6,
        targets=("c_attn",),
        base=str(base),
        base_fingerprint=fingerprint(plain),
    )
    tensors = {name: parameter.detach().clone() for name, parameter in lora.items()}
    return Trained(base, Adapter(tensors, info), logits)


def for_formats(trained: dict[str, Trained], family: str, *formats: str) -> Trained:
    """The adapter that these formats can express: for PEFT's, DeBERTa's reaches positions."""
    return trained["deberta as PEFT's" if family == "deberta" and "peft" in formats else family]


def plain_logits(folder: Path, family: str) -> torch.Tensor:
    """The logits of a merged folder, read as a plain model."""
    if family == "gpt2":
        from conversion import gpt2_folder

        model = gpt2_folder.read_gpt2(str(folder))[0]
        with torch.no_grad():
            return model.eval()(BATCH["input_ids"])
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert not model.adapted_by
    assert not model.newly_initialized
    with torch.no_grad():
        return model(**BATCH).logits


def close(ours: torch.Tensor, theirs: torch.Tensor, terms: int = TERMS) -> None:
    assert_close_to_rounding(ours, theirs, terms)


def assert_same_tensors(theirs: dict, ours: dict) -> None:
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype
        assert torch.equal(theirs[name], tensor), name


def fields_of(info: LoraMetadata) -> set[str]:
    return {name for name, value in vars(info).items() if value is not None}
