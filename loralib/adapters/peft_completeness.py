"""Checks that a PEFT folder holds all that its settings say is adapted, trained or saved."""

import re
from collections.abc import Collection

from torch import nn

from ..errors import CheckpointError
from ..module_names import first_names
from ..stacks import layer_of_stack, stacked_weights
from .adapter import LORA, Adapter
from .peft import CONFIG_NAME, is_targeted, is_targeted_parameter


def check_complete(model: nn.Module, adapter: Adapter, adapted: Collection[str]) -> None:
    """Checks that an adapter has tensors for every part of the model that its settings name.

    Args:
        model: the model that the adapter is for.
        adapter: the adapter. If it does not have the settings that PEFT wrote, nothing is checked.
        adapted: the names of the modules that it has updates for.

    Raises:
        CheckpointError: some tensors are missing.
    """
    if not adapter.peft_config:
        return
    held = adapter.tensors.keys() | adapter.tied.keys() | adapter.base_weights.keys()
    first = first_names(model)
    for name, module in model.named_modules():
        for missing in sorted(_trained_of(name, module, adapter, adapted) - held):
            raise CheckpointError(
                f"{adapter.source}: lacks {missing}, which {CONFIG_NAME} says is trained"
            )
        is_adapted = name in adapted or first.get(name) in adapted
        if not is_adapted and _is_meant(name, adapter):
            raise CheckpointError(
                f"{adapter.source}: lacks the update of {name}, which {CONFIG_NAME} says is adapted"
            )
    for name in stacked_weights(model):
        is_meant = is_targeted_parameter(adapter.peft_config, name)
        if is_meant and not adapter.lora.is_of_stack(layer_of_stack(name)):
            raise CheckpointError(
                f"{adapter.source}: lacks the update of {name}, which {CONFIG_NAME} says is adapted"
            )


def _trained_of(
    name: str, module: nn.Module, adapter: Adapter, adapted: Collection[str]
) -> set[str]:
    """Returns the names of a module's parameters that the settings say are saved beside LoRA."""
    bias, saved = adapter.peft_config.get("bias"), adapter.peft_config.get("modules_to_save") or ()
    names = {n for n, _ in module.named_parameters(name)} if name.endswith(tuple(saved)) else set()
    has_bias = module._parameters.get("bias") is not None
    if has_bias and (bias == "all" or (bias == "lora_only" and name in adapted)):
        names.add(f"{name}.bias")
    return {n for n in names if LORA.part not in n}


def _is_meant(name: str, adapter: Adapter) -> bool:
    """Returns whether every version of PEFT would adapt a module, given the adapter's settings.

    If a name has several numbers, PEFT's versions disagree on which of them is the layer's. If
    layers are selected by number, such a name therefore does not count.
    """
    by_layer = adapter.peft_config.get("layers_to_transform") not in (None, [])
    is_ambiguous = by_layer and len(re.findall(r"(?:^|\.)\d+(?=\.)", name)) > 1
    return not is_ambiguous and is_targeted(adapter.peft_config, name)
