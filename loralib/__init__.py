"""loralib: LoRA layers for PyTorch, a drop-in for loralib 0.1.2.

Replace a layer by its namesake here, freeze the rest, train, and save the small part:

    import loralib as lora

    layer = lora.Linear(768, 768, r=8, lora_alpha=16)
    lora.mark_only_lora_as_trainable(model)
    torch.save(lora.lora_state_dict(model), "lora.pt")

The layers need torch alone. What needs more is imported when it is first asked for.

The head of `loralib.layers` explains the layers, with a diagram.
"""

import importlib

from .layers import Conv1d, Conv2d, Conv3d, Embedding, Linear, LoRALayer, MergedLinear
from .nn.dropout import Dropout, dropout
from .utils import (
    lora_state_dict,
    mark_only_lora_as_trainable,
    merge,
    parameter_groups,
    start_from_weights,
)

__version__ = "0.2.0"

# Names of the heavier modules, and where they are.
_LAZY = {
    "AdapterBank": ".serving.bank",
    "UnsupportedLayerError": ".errors",
    "add_lora": ".inject",
    "remove_lora": ".inject",
    "load_adapter": ".adapters.loading",
    "save_adapter": ".adapters.saving",
    "read_adapter": ".adapters.formats",
    "write_adapter": ".adapters.formats",
}

__all__ = [
    "AdapterBank",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Dropout",
    "Embedding",
    "Linear",
    "LoRALayer",
    "MergedLinear",
    "UnsupportedLayerError",
    "add_lora",
    "dropout",
    "load_adapter",
    "lora_state_dict",
    "mark_only_lora_as_trainable",
    "merge",
    "parameter_groups",
    "read_adapter",
    "remove_lora",
    "save_adapter",
    "start_from_weights",
    "write_adapter",
]


def __getattr__(name: str) -> object:
    """Imports the module of a name that was not asked for before."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
