"""Checks of a whole model: its parameters have values, are plain, and are not PEFT's LoRA."""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .lora_layer import lora_layers
from .tensor_kinds import is_sharded, unreadable
from .wrappers import is_managed
from .zero3 import check_gathered

# The dtypes that adapters hold. Buffers may also be counters, such as BatchNorm's, or masks.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES_OF_BUFFERS = (torch.int64, torch.int32, torch.bool)


def weights_with_updates(
    model: nn.Module, but_for: type | tuple[type, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yields the frozen weights of a model's LoRA layers, each with its name for errors.

    Args:
        model: the model.
        but_for: classes of layers to leave out.
    """
    for name, layer in lora_layers(model).items():
        if isinstance(layer, but_for):
            continue
        weight = getattr(layer, "frozen_weight", None)  # layers of other packages may have none
        if weight is not None:
            yield f"the weight of {name or 'the layer'}", weight


def tensors_of(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's LoRA parameters, and its other parameters of these names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if "lora_" in name or name in names:
            yield name, parameter


def check_whole(model: nn.Module, what: str) -> None:
    """Checks that no parameter of a model is sharded: by FSDP, ZeRO 3, or as a DTensor.

    Args:
        model: the model.
        what: what the parameters have to be whole for, such as "LoRA is merged".

    Raises:
        ValueError: one is.
    """
    check_gathered(model.named_parameters(), what)
    check_unsharded(model, what)


def check_unsharded(model: nn.Module, what: str) -> None:
    """Does what `check_whole` does, but accepts parameters that ZeRO 3 has partitioned."""
    managed = (name or "the model" for name, module in model.named_modules() if is_managed(module))
    tensors = (*model.named_parameters(), *model.named_buffers())
    sharded = (name for name, tensor in tensors if is_sharded(tensor))
    for name in (*managed, *sharded):
        raise ValueError(
            f"{name} is sharded over several processes: gather the model before {what}, into a "
            "plain one (get_model_state_dict with full_state_dict=True)"
        )


def check_no_peft_layers(model: nn.Module) -> None:
    """Checks that no layer of a model has an adapter of PEFT's, of any kind.

    Raises:
        ValueError: one has.
    """
    for name, module in model.named_modules():
        kinds = [kind.__module__ for kind in type(module).__mro__]
        tuner = next((kind for kind in kinds if kind.startswith("peft.tuners.")), None)
        # Layers of PEFT before 0.6 have no `base_layer`.
        if tuner is not None and (hasattr(module, "base_layer") or hasattr(module, "lora_A")):
            raise ValueError(
                f"{name or 'the model'} already has an adapter of PEFT's "
                f"({tuner.split('.')[2]}): give the model that PEFT's "
                "unload() or merge_and_unload() returns; load_adapter reads PEFT's folders"
            )


def check_there(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Checks that tensors have values and are plain, not quantized.

    Args:
        tensors: names and tensors.
        what: what they have to be there for, such as "LoRA is merged".

    Raises:
        ValueError: one has no values, or is not plain.
    """
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: call the model once before {what}")
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device: load the model's weights first, or remove the "
                f"hooks that offload them, before {what}"
            )
        if reason := unreadable(tensor):
            raise ValueError(f"{name} is {reason}: load plain weights before {what}")
