"""The merged copy of a layer's weight, which evaluation computes with, and how long it is valid.

layers.py explains to its users which changes are noticed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .nn.bits import bits_of
from .nn.fast_paths import has_mode, is_transformed
from .steps import latest_step
from .wrappers import has_own_forward, is_managed
from .zero3 import is_of_zero3

_PLAIN = {Tensor, nn.Parameter}


@dataclass(frozen=True, eq=False)
class MergedCopy:
    """The merged copy of a layer's weight, and what it was computed from.

    Args:
        weight: the merged copy.
        stamp: what `_stamp` returned when it was made.
        alias: an alias of the layer's weight, so that no other tensor can get its address.
        update: the update's tensors at that time: copies of those on a CPU, aliases of the others.
    """

    weight: Tensor
    stamp: tuple
    alias: Tensor
    update: list[Tensor]


def up_to_date(
    kept: MergedCopy | None, layer: Any, weight: Tensor, merged: Callable[[], Tensor]
) -> MergedCopy | None:
    """Returns a merged copy that is valid now: the one that was kept, or a new one.

    Args:
        kept: the last copy, if there is one.
        layer: the LoRA layer.
        weight: its frozen weight.
        merged: computes the merged weight.

    Returns:
        The copy. None if the layer has to compute without one, because changes could be missed or
        autograd would need more than a copy.
    """
    update = _update_tensors(layer)
    tensors = weight, *update
    if (
        not _is_change_noticed(layer, weight, update)
        or is_transformed(*tensors)  # they have derivatives, which a copy would not have
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or any(t.is_inference() for t in tensors)
    ):
        return None
    stamp = _stamp(layer.scaling, weight, update)
    if kept is not None and kept.stamp == stamp and _are_same(kept.update, update):
        return kept
    with torch.inference_mode(False), torch.no_grad():
        was = [t.clone() if t.is_cpu else t.detach() for t in update]
        return MergedCopy(merged(), stamp, weight.detach(), was)


def _update_tensors(layer: Any) -> list[Tensor]:
    """Returns the tensors of a layer's update, except those that a parametrization computes."""
    held = (*layer._parameters.items(), *layer._buffers.items())
    own = [layer.scaling] if isinstance(layer.scaling, Tensor) else []
    return own + [tensor for name, tensor in held if name.startswith("lora_")]


def _is_change_noticed(layer: Any, weight: Tensor, update: list[Tensor]) -> bool:
    """Returns whether every change of the weight and the update can be noticed between calls.

    Changes are missed in tensors that are computed or replaced for each call: by FSDP, by ZeRO 3,
    by hooks that offload them, or by a parametrization. The answer is also no for tensor
    subclasses, and while a `TorchDispatchMode` is active, which may make such tensors.
    """
    own = layer._parameters
    return (
        {type(weight), *map(type, update)} <= _PLAIN
        and isinstance(weight, nn.Parameter)
        and not is_of_zero3(weight)
        and "parametrizations" not in layer._modules
        and isinstance(own.get("lora_A"), nn.Parameter)
        and isinstance(own.get("lora_B"), nn.Parameter)
        and not has_mode()
        and not has_own_forward(layer)
        and not is_managed(layer)
    )


def _stamp(scaling: object, weight: Tensor, update: list[Tensor]) -> tuple:
    """Returns what tells whether a merged copy is still valid, besides the update's values.

    Writes through `.data`, as weight averaging makes them, change no version. On a CPU, the
    update's values are compared, because they are few. On other devices that would synchronize:
    there, everything that an optimizer's step may have changed counts as changed. So does the
    weight, which is too large to compare, except in a layer on a CPU that is entirely frozen.
    """
    tensors = [weight, *(t for t in update if not t.is_cpu)]
    is_trained = any(t.requires_grad for t in (weight, *update))
    step = latest_step() if is_trained or not weight.is_cpu else None
    number = None if isinstance(scaling, Tensor) else scaling  # a tensor is part of the update
    return number, step, len(update), [(t.data_ptr(), t.dtype, t._version) for t in tensors]


def _are_same(kept: list[Tensor], update: list[Tensor]) -> bool:
    """Returns whether an update's tensors on a CPU have the same values; `_stamp` covers others.

    Bits are compared only if values differ, as NaN does from itself.
    """
    pairs = ((was, t.detach()) for was, t in zip(kept, update, strict=True) if t.is_cpu)
    return all(torch.equal(was, t) or torch.equal(bits_of(was), bits_of(t)) for was, t in pairs)
