"""Checks and sets up the environment of these tests; README.md says how it is made."""

import importlib.util
import os

import pytest

PEERS = (
    *("transformers", "peft", "timm", "torchvision", "diffusers", "accelerate"),
    *("bitsandbytes", "torchao", "lightning"),
)

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

_missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
if _missing:
    raise pytest.UsageError(
        f"tests/interop needs {', '.join(_missing)}: run it by bash tests/interop/run.sh"
    )

import torchvision_operators  # noqa: E402, F401

import transformers  # noqa: E402

if "+lora" in transformers.__version__:
    raise pytest.UsageError(
        "tests/interop needs upstream's transformers, not this project's: run it by "
        "bash tests/interop/run.sh"
    )
