"""Fingerprints of a base's weights, by which an adapter knows its base."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .families import backbone_prefixes

# Parts of names of what is trained in a base, and of what not every model has. Files record
# fingerprints, so this can never change.
_LEFT_OUT = ("lora_", "adapter", "pooler.")


def fingerprint(tensors: Mapping[str, Tensor], backbones: Iterable[str] | None = None) -> str:
    """A short name for a base's weight matrices.

    SHA-256 over up to 1,024 evenly spaced values of every weight matrix of the backbone, rounded to
    bfloat16, so that a copy of the base in bfloat16 has the fingerprint of the base (one in float16
    does not: it is rounded twice). What may have been trained is left out: LoRA, adapters, biases
    and norms; so is the pooler, which not every model has.

    Args:
        tensors: a state dict. Where no name starts as `backbones` do, all of its matrices count:
            leave a head out that is to be trained.
        backbones: names that start so belong to the base; None for those of registered families.
    """
    starts = backbone_prefixes() if backbones is None else tuple(backbones)
    if not any(name.startswith(starts) for name in tensors):
        starts = ("",)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        is_weight = tensor.dim() >= 2 and tensor.is_floating_point()
        if not is_weight or not name.startswith(starts):
            continue
        if any(part in name for part in _LEFT_OUT):
            continue
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)][:1024].cpu().bfloat16()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
