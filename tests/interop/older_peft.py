"""Folders of older versions of PEFT that are loaded here, and this project's that these open.

By hand, in this folder's environment; it fetches each version of PEFT, and Transformers 4.57, into
FOLDER:

    .venv-interop/bin/python tests/interop/older_peft.py FOLDER [VERSION …]

It prints the largest difference between logits of each case. The exit status is 1 if one is above
1e-5, or if a version opens what it has no setting for, or does not open the rest.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before all that import torchvision.
import torchvision_operators  # noqa: F401

# isort: split
import peft
import torch
from torch import Tensor, nn

import loralib as lora
import transformers

VERSIONS = ("0.3.0", "0.6.2", "0.8.2", "0.9.0", "0.11.1", "0.13.2", "0.15.2", "0.18.1", "0.20.0")
TRANSFORMERS = ("transformers==4.57.1", "huggingface_hub<1")
TOLERANCE = 1e-5
TOKENS = torch.arange(3, 21).view(2, 9)
LINEAR, EMBEDDING = ["q_proj", "v_proj"], ["embed_tokens", "q_proj"]
PATTERNS = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5}}
# What PEFT is told, what add_lora is told for the same, and the first version that opens it: before
# 0.6, PEFT reads no safetensors.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain": ({}, {}, "0.6"),
    "embedding": ({"target_modules": EMBEDDING}, {"targets": EMBEDDING}, "0.6"),
    "biases": ({"bias": "all"}, {"bias": "all"}, "0.9"),
    "head": ({"modules_to_save": ["lm_head"]}, {"modules_to_train": ["lm_head"]}, "0.6"),
    "one layer": ({"layers_to_transform": [1]}, {"layers": [1]}, "0.6"),
    "several ranks": (PATTERNS, PATTERNS, "0.6"),
    "rslora": ({"use_rslora": True}, {"variant": "rslora"}, "0.8"),
    "dora": ({"use_dora": True}, {"variant": "dora"}, "0.9"),
}


def fetched(folder: Path, *packages: str) -> str:
    """A folder with these packages."""
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, *packages], check=True)
    return str(folder)


def run_beside(version: str, folder: Path) -> bool:
    """Runs this file with a version of PEFT before the environment's; whether all was right."""
    own = fetched(folder / version, "--no-deps", f"peft=={version}")
    path = [own, fetched(folder / "transformers", *TRANSFORMERS), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    run = subprocess.run([sys.executable, __file__, "--beside", version], env=environment)
    return run.returncode == 0


def llama() -> nn.Module:
    """A small Llama, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def filled(model: nn.Module) -> nn.Module:
    """The model, with other values in all that is trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def logits(model: nn.Module) -> Tensor:
    """What it computes of the same tokens."""
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def loaded_here(more: dict[str, Any], folder: str) -> tuple[nn.Module, nn.Module]:
    """PEFT's model, and its folder in ours."""
    settings = {"target_modules": LINEAR, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", **more}
    theirs = filled(peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_alpha=6, **settings)))
    theirs.save_pretrained(folder)
    ours = llama()
    lora.load_adapter(ours, folder)
    return theirs, ours


def opened_there(more: dict[str, Any], folder: str) -> tuple[nn.Module, nn.Module]:
    """Our model, and its folder in PEFT's."""
    ours = llama()
    lora.add_lora(ours, **{"targets": LINEAR, "r": 4, "lora_alpha": 6, **more})
    lora.save_adapter(filled(ours), folder)
    return ours, peft.PeftModel.from_pretrained(llama(), folder)


def is_right(name: str, both: Callable[..., Any], more: dict[str, Any], is_known: bool) -> bool:
    """Compares one case in one direction, and prints it; what is not known has to be refused."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            saved, read = both(more, folder)
        except (TypeError, ValueError) as error:
            print(f"  {name}: {str(error)[:90]}")
            return not is_known
    difference = (logits(saved) - logits(read)).abs().max().item()
    print(f"  {name}: {difference:.1e}")
    return is_known and difference <= TOLERANCE


def as_numbers(version: str) -> tuple[int, ...]:
    """0.13.2 as (0, 13)."""
    return tuple(map(int, version.split(".")[:2]))


def compare(version: str) -> bool:
    """All cases in both directions; whether all is right."""
    if peft.__version__ != version:
        raise SystemExit(f"PEFT {version} is asked for, and {peft.__version__} is imported")
    print(f"PEFT {version}, Transformers {transformers.__version__}")
    right, settings = [], set(peft.LoraConfig.__dataclass_fields__)
    for name, (theirs, ours, first) in CASES.items():
        right.append(is_right(f"{name}, here", loaded_here, theirs, theirs.keys() <= settings))
        is_known = as_numbers(version) >= as_numbers(first)
        right.append(is_right(f"{name}, there", opened_there, ours, is_known))
    return all(right)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--beside"]:
        sys.exit(not compare(sys.argv[2]))
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    results = [run_beside(each, Path(sys.argv[1])) for each in sys.argv[2:] or VERSIONS]
    sys.exit(not all(results))
