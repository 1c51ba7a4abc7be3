"""PEFT's side of the comparisons: models with PEFT's LoRA, and their tensors by our names."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

import peft
from models import Case, draw
from torch import Tensor, nn

R, ALPHA = 4, 6

# Variant of this project -> PEFT's settings for it.
SETTINGS: dict[str, dict[str, bool]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "rslora+dora": {"use_rslora": True, "use_dora": True},
}


def with_peft(case: Case, variant: str = "lora", **more: Any) -> peft.PeftModel:
    """The case's model with PEFT's LoRA: random tensors with a visible effect."""
    targets = case.targets if isinstance(case.targets, str) else list(case.targets)
    settings = {"r": R, "lora_alpha": ALPHA, "target_modules": targets, "task_type": case.task}
    config = peft.LoraConfig(**{**settings, **SETTINGS[variant], **more})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that it sets fan_in_fan_out for Conv1D
        model = peft.get_peft_model(case.build(), config)
    draw(((n, p) for n, p in model.named_parameters() if "lora_" in n), f"{case.name} {variant}")
    return model


def as_computed(tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """PEFT's tensors as PEFT computes with them in `nn.MultiheadAttention.out_proj`.

    PEFT 0.21.2 computes with W + 2 s B A there: its B is half of the B that it computes with, and
    its gradient of A is half of what this B gives. (Its pull request 3774 would fix this.)

    Args:
        tensors: PEFT's tensors, by this project's names.
        what: the tensors to be doubled: "lora_B" of an adapter, "lora_A" of gradients.
    """
    twice = f".out_proj.{what}"
    return {name: t * 2 if name.endswith(twice) else t for name, t in tensors.items()}


def own_name(name: str) -> str:
    """This project's name for a parameter of PEFT's model."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    name = re.sub(r"\.modules_to_save\.default\.", ".", name)
    return re.sub(
        r"\.lora_(?:embedding_)?(A|B|magnitude_vector)\.default(\.weight)?$", r".lora_\1", name
    )


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's parameters by this project's names, of PEFT's model or of this project's."""
    return {
        own_name(name): parameter for name, parameter in model.named_parameters() if "lora_" in name
    }
