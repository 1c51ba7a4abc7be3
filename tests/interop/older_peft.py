"""Checks that folders of older versions of PEFT are loaded here, and this project's folders there.

Run it by hand, in this folder's environment. It installs each version of PEFT, and Transformers
4.57, into FOLDER:

    .venv-interop/bin/python tests/interop/older_peft.py FOLDER [VERSION …]

It prints the largest difference between the logits of each case. The exit status is 1 if one is
above 1e-5, if a version loads a case that it has no setting for, or if it does not load another.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before all modules that import torchvision.
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
# PEFT's settings, the same for add_lora, and the first version of PEFT that loads our folder:
# before 0.6, PEFT reads no safetensors.
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
    """A folder with these packages, which are installed if it does not exist."""
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, *packages], check=True)
    return str(folder)


def run_with_version(version: str, folder: Path) -> bool:
    """Runs this file with a version of PEFT that hides the environment's; whether all passed."""
    own = fetched(folder / version, "--no-deps", f"peft=={version}")
    path = [own, fetched(folder / "transformers", *TRANSFORMERS), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    run = subprocess.run([sys.executable, __file__, "--compare", version], env=environment)
    return run.returncode == 0


def llama() -> nn.Module:
    """A small Llama, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def noisy(model: nn.Module) -> nn.Module:
    """The model, after noise is added to all trained parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def logits(model: nn.Module) -> Tensor:
    """The model's logits of `TOKENS`."""
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def loaded_here(more: dict[str, Any], folder: str) -> tuple[nn.Module, nn.Module]:
    """PEFT's model, and ours with its folder loaded."""
    settings = {"target_modules": LINEAR, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", **more}
    theirs = noisy(peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_alpha=6, **settings)))
    theirs.save_pretrained(folder)
    ours = llama()
    lora.load_adapter(ours, folder)
    return theirs, ours


def loaded_there(more: dict[str, Any], folder: str) -> tuple[nn.Module, nn.Module]:
    """Our model, and PEFT's with its folder loaded."""
    ours = llama()
    lora.add_lora(ours, **{"targets": LINEAR, "r": 4, "lora_alpha": 6, **more})
    lora.save_adapter(noisy(ours), folder)
    return ours, peft.PeftModel.from_pretrained(llama(), folder)


def passes(
    name: str, save_and_load: Callable[..., Any], settings: dict[str, Any], is_known: bool
) -> bool:
    """Tries one case in one direction and prints it; if PEFT does not know it, it has to fail."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            saved, loaded = save_and_load(settings, folder)
        except (TypeError, ValueError) as error:
            print(f"  {name}: {str(error)[:90]}")
            return not is_known
    difference = (logits(saved) - logits(loaded)).abs().max().item()
    print(f"  {name}: {difference:.1e}")
    return is_known and difference <= TOLERANCE


def as_numbers(version: str) -> tuple[int, ...]:
    """0.13.2 as (0, 13)."""
    return tuple(map(int, version.split(".")[:2]))


def compare(version: str) -> bool:
    """Tries all cases in both directions; whether all passed."""
    if peft.__version__ != version:
        raise SystemExit(f"PEFT {version} is asked for, and {peft.__version__} is imported")
    print(f"PEFT {version}, Transformers {transformers.__version__}")
    passed, settings = [], set(peft.LoraConfig.__dataclass_fields__)
    for name, (theirs, ours, first) in CASES.items():
        passed.append(passes(f"{name}, here", loaded_here, theirs, theirs.keys() <= settings))
        is_known = as_numbers(version) >= as_numbers(first)
        passed.append(passes(f"{name}, there", loaded_there, ours, is_known))
    return all(passed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.exit(not compare(sys.argv[2]))
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    results = [run_with_version(each, Path(sys.argv[1])) for each in sys.argv[2:] or VERSIONS]
    sys.exit(not all(results))
