"""Computes fingerprints of a base's weights, by which an adapter recognizes its base."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..tensor_kinds import is_dense, is_packed, unreadable
from ..zero3 import is_partitioned
from .families import backbone_prefixes, in_known_backbone
from .model_settings import setting_of

# Tensors with these parts in their names may have been trained, or are missing in some models.
# Files record fingerprints, so this can never change.
_LEFT_OUT = ("lora_", "adapter", "pooler.")


# How many characters each of a fingerprint's two parts has.
_PART = 16


def fingerprint(tensors: Mapping[str, Tensor], backbones: Iterable[str] | None = None) -> str:
    """Returns a short hash that identifies a base by its weight matrices.

    It has two parts of 16 characters. The first is the SHA-256 of up to 1,024 evenly spaced values
    of every weight matrix of the backbone. The second is that of each matrix's last 1,024 values:
    it differs if a vocabulary was extended by other rows, which the first part may miss. Values are
    rounded to bfloat16, so that a copy of the base in bfloat16 has the same fingerprint. (A copy in
    float16 does not, because its values are rounded twice.) Tensors that may have been trained are
    left out: LoRA, adapters, biases and norms. So is the pooler, which not every model has.

    Args:
        tensors: a state dict. If no name has a prefix in `backbones`, all of its matrices count, so
            leave out a head that is to be trained.
        backbones: prefixes of the names that belong to the base. None means the backbones of the
            registered families.
    """
    starts = backbone_prefixes() if backbones is None else tuple(backbones)
    if not any(name.startswith(starts) for name in tensors):
        starts = ("",)
    digests = {sampled: hashlib.sha256(), _last_values: hashlib.sha256()}
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, Tensor):  # a module's get_extra_state
            continue
        is_weight = tensor.is_floating_point() and is_dense(tensor) and tensor.dim() >= 2
        if not is_weight or not name.startswith(starts):
            continue
        if any(part in name for part in _LEFT_OUT):
            continue
        for chosen, digest in digests.items():
            values = chosen(tensor).bfloat16()
            digest.update(f"{name} {tuple(tensor.shape)} ".encode())
            digest.update(values.contiguous().view(torch.int16).numpy().tobytes())
    return "".join(digest.hexdigest()[:_PART] for digest in digests.values())


def sampled(tensor: Tensor) -> Tensor:
    """Returns up to 1,024 evenly spaced values of a tensor, on the CPU."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 1024)][:1024].cpu()


def _last_values(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[-1024:].cpu()


def are_of_one_base(first: str, second: str) -> bool:
    """Returns whether two fingerprints are of the same base.

    Those in files written before 27 November 2026 have the first part only.
    """
    has_first_part_only = _PART in (len(first), len(second))
    return first[:_PART] == second[:_PART] and (has_first_part_only or first == second)


def fingerprint_without(model: nn.Module, trained: Collection[str]) -> str | None:
    """Returns the fingerprint of a model's matrices, without the trained ones that are named.

    None if the model has no fingerprint, see `has_no_fingerprint`.
    """
    names = _with_tied(model, trained)
    state = {name: t for name, t in state_of(model).items() if name not in names}
    return None if has_no_fingerprint(model, state) else fingerprint(state)


def has_float16(state: Mapping[str, Any]) -> bool:
    """Returns whether any weight is in float16, which leaves no fingerprint to compare."""
    return any(isinstance(t, Tensor) and t.dtype == torch.float16 for t in state.values())


def has_no_fingerprint(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Returns whether weights are in float16, contain updates, or cannot be read.

    They contain updates if a layer's class merges by itself, as 0.1.2 does. Offloaded and quantized
    weights cannot be read, for example.

    Args:
        model: the model.
        state: those of its weights that the fingerprint would be computed from.
    """
    if has_float16(state) or _has_packed_weights(model):
        return True
    if any(getattr(module, "is_update_in_weight", False) for module in model.modules()):
        return True
    if not all(is_lazy(each) or is_dense(each) for each in model.parameters()):
        return True
    return not all(is_readable(tensor) for tensor in state.values() if isinstance(tensor, Tensor))


# int64 is left out: it is the dtype of indices.
_PACKED_INTO = {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32}


def _has_packed_weights(model: nn.Module) -> bool:
    """Returns whether a quantization package has packed weights of a model into integers.

    Packed weights also have other names than the original ones. The config of upstream's models
    records quantization. In other models, a packed layer is recognized by its parameters: it has
    integer matrices and no others. Masks and tables do not count: they are buffers, or belong to a
    module that also has weights, its own or those of its submodules.
    """
    configs = (vars(module).get("config") for module in model.modules())
    if any(setting_of(config, "quantization_config") for config in configs):
        return True
    return any(map(_is_packed, model.modules()))


def _is_packed(module: nn.Module) -> bool:
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return False
    own = _dtypes_of_matrices(module.parameters(recurse=False))
    return bool(own) and own | _dtypes_of_matrices(module.parameters()) <= _PACKED_INTO


def _dtypes_of_matrices(parameters: Iterable[Tensor]) -> set[torch.dtype]:
    return {each.dtype for each in parameters if not is_lazy(each) and each.dim() >= 2}


def is_readable(tensor: Tensor) -> bool:
    """Returns whether a tensor has plain values, not offloaded, partitioned or quantized ones."""
    has_values = not (is_lazy(tensor) or tensor.is_meta or is_partitioned(tensor))
    return has_values and unreadable(tensor) is None


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns a model's state dict, with packed and partitioned weights left recognizable."""
    state = model.state_dict(keep_vars=True)
    return {name: _as_saved(each) for name, each in state.items()}


def _as_saved(each: Any) -> Any:
    if not isinstance(each, Tensor) or is_lazy(each) or is_packed(each) or is_partitioned(each):
        return each
    return each.detach()


def possible_fingerprints(
    model: nn.Module, adapted: Collection[str], brought: Collection[str]
) -> list[str]:
    """Returns the fingerprints that an adapter may have recorded for a model as its base, if any.

    For a registered family it is the backbone's fingerprint. In other models, names do not tell the
    backbone from the head, so there are several candidates for the backbone:

    - all tensors except those of top-level modules that have the last projection, or tensors that
      the adapter brings besides LoRA, and that have no adapted modules,
    - all tensors except those that the adapter brings and those that are tied to them,
    - all tensors except those that the adapter brings, as in a base that does not tie them,
    - only the top-level modules with adapted modules,
    - all tensors.

    Args:
        model: the model, with or without LoRA.
        adapted: the names of the modules that the adapter adapts.
        brought: the names of the tensors that it brings besides LoRA.
    """
    state = state_of(model)
    if any(in_known_backbone(name) for name in state):
        state = {name: tensor for name, tensor in state.items() if in_known_backbone(name)}
    if has_no_fingerprint(model, state):
        return []
    tops = {name.partition(".")[0] for name in adapted}
    heads = {name.partition(".")[0] for name in (*brought, last_projection(model))} - tops
    replaced = _with_tied(model, brought)
    parts = [
        [name for name in state if name.partition(".")[0] not in heads],
        [name for name in state if name not in replaced],
        [name for name in state if name not in brought],
        [name for name in state if name.partition(".")[0] in tops],
        [*state],
    ]
    different = dict.fromkeys(map(tuple, parts))
    found = [fingerprint({name: state[name] for name in names}) for names in different]
    return [each for each in dict.fromkeys(found) if each != fingerprint({})]


def _with_tied(model: nn.Module, names: Collection[str]) -> set[str]:
    """Returns these names, and all other names that the model has for the same tensors."""
    state = model.state_dict(keep_vars=True)
    meant = {id(state[name]) for name in names if name in state}
    return {name for name, tensor in state.items() if id(tensor) in meant}


def last_projection(model: nn.Module) -> str:
    """Returns the name of a model's last linear layer. A classifier's computes the logits."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return names[-1] if names else ""
