"""Folders of small models: how they are written, and how they fail."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from transformers import (
    RobertaConfig,
)

SHAPE = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 12,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
LORA = {"apply_lora": True, "lora_r": 2, "lora_alpha": 4}
QUERY = "roberta.encoder.layer.0.attention.self.query"


def make(model_class, **settings):
    """A model whose tensors are all random, including B."""
    torch.manual_seed(0)
    model = model_class(RobertaConfig(**SHAPE, **settings))
    for parameter in model.parameters():
        parameter.data.normal_()
    return model.eval()


def write(folder, tensors, format="bin", config=None, **settings):
    """Writes a model folder as other libraries do."""
    folder.mkdir(exist_ok=True)
    values = {**SHAPE, "model_type": "roberta", **settings} if config is None else config
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if format == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif format == "legacy":
        path = folder / "pytorch_model.bin"
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    elif format == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        _write_shards(folder, tensors, format)
    return folder


def _write_shards(folder, tensors, format):
    stem, suffix = {
        "sharded bin": ("pytorch_model", "bin"),
        "sharded safetensors": ("model", "safetensors"),
    }[format]
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        shard = f"{stem}-{number + 1:05}-of-00003.{suffix}"
        some = {name: tensors[name] for name in names[number::3]}
        save = save_file if suffix == "safetensors" else torch.save
        save(some, folder / shard)
        weight_map.update(dict.fromkeys(some, shard))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def same(model, tensors):
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], tensor), name


def fails(error, *parts):
    """Expects an error that contains all of `parts`."""
    pattern = "(?s)^" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
    return pytest.raises(error, match=pattern)


def is_one_line(caught):
    text = str(caught.value)
    assert "\n" not in text
    assert len(re.sub(r"[^\s']*/", "", text)) < 400  # wherever the test's folder is


def bare(tensors):
    return {
        name.removeprefix("roberta."): tensor
        for name, tensor in tensors.items()
        if name.startswith("roberta.")
    }
