"""Files of a tiny GPT-2's base and LoRA, with all names and in all formats that are read."""

import argparse
import re

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import open_model
from lora_flags import add_lora_params, add_model_params
from loralib.errors import CheckpointError

WIDTH, BLOCKS, VOCABULARY, POSITIONS = 8, 2, 23, 10
LORA_A = "transformer.h.0.attn.c_attn.lora_A"


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_model_params(parser)
    add_lora_params(parser)
    return parser.parse_args([str(flag) for flag in flags])


def draw_base(width=WIDTH, blocks=BLOCKS, vocabulary=VOCABULARY, seed=0):
    """A base's tensors under the names of GPT-2's published files, ``h.0.…``."""
    torch.manual_seed(seed)
    sizes = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }
    shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (POSITIONS, width)}
    shapes |= {f"h.{i}.{name}": size for i in range(blocks) for name, size in sizes.items()}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def draw_lora(rank=2, width=WIDTH, blocks=BLOCKS):
    """LoRA's tensors under the release's names."""
    torch.manual_seed(5)
    layers = [f"module.transformer.h.{i}.attn.c_attn" for i in range(blocks)]
    return {
        **{f"{layer}.lora_A": torch.randn(2 * rank, width) for layer in layers},
        **{f"{layer}.lora_B": torch.randn(2 * width, rank) for layer in layers},
    }


def prefixed(tensors, prefix):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def parameters(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def refuses(parts, flags, lora_path=None):
    """Asserts that `open_model` raises an error of one line that contains all of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        open_model(parse(*flags), None if lora_path is None else str(lora_path))
    text = str(caught.value)
    assert "\n" not in text
    assert len(re.sub(r"[^\s']*/", "", text)) < 400  # wherever the test's folder is
    for part in parts:
        assert part in text


def write_plain(tensors, folder):
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def write_legacy(tensors, folder):
    path = folder / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    return path


def write_wrapped(tensors, folder):
    torch.save({"model_state_dict": tensors}, folder / "model.9.pt")
    return folder / "model.9.pt"


def write_safe(tensors, folder):
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def renamed(tensors, old, new):
    return {new if name == old else name: tensor for name, tensor in tensors.items()}


def not_finite(tensors, name, value):
    changed = tensors[name].clone()
    changed.view(-1)[3] = value
    return {**tensors, name: changed}
