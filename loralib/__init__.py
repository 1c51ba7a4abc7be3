"""loralib: LoRA layers for PyTorch, a drop-in replacement for loralib 0.1.2.

Replace a layer with the one of the same name here, freeze the rest, train, and save the LoRA part:

    import loralib as lora

    layer = lora.Linear(768, 768, r=8, lora_alpha=16)
    lora.mark_only_lora_as_trainable(model)
    torch.save(lora.lora_state_dict(model), "lora.pt")

The layers need only torch. Each public name is imported from its module on first access, so code
that needs no layer, such as an error class or an atomic write, does not wait for torch to load.
The names are listed twice: as imports for type checkers, and with their modules for `__getattr__`.

The docstring of `loralib.layers` explains the layers, with a diagram.
"""

# ruff: noqa: F401 - the imports are only for type checkers

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .adapters.formats import read_adapter, write_adapter
    from .adapters.loading import load_adapter
    from .adapters.saving import save_adapter
    from .errors import UnsupportedLayerError
    from .inject import add_lora, remove_lora
    from .layers import Conv1d, Conv2d, Conv3d, ConvLoRA, Embedding, Linear, MergedLinear
    from .lora_layer import LoRALayer
    from .nn.dropout import Dropout, dropout
    from .serving.bank import AdapterBank
    from .utils import (
        lora_state_dict,
        mark_only_lora_as_trainable,
        merge,
        parameter_groups,
        start_from_weights,
    )

__version__ = "0.2.0"

# Public name -> its module.
_MODULE_OF = {
    "read_adapter": ".adapters.formats",
    "write_adapter": ".adapters.formats",
    "load_adapter": ".adapters.loading",
    "save_adapter": ".adapters.saving",
    "UnsupportedLayerError": ".errors",
    "add_lora": ".inject",
    "remove_lora": ".inject",
    "Conv1d": ".layers",
    "Conv2d": ".layers",
    "Conv3d": ".layers",
    "ConvLoRA": ".layers",
    "Embedding": ".layers",
    "Linear": ".layers",
    "LoRALayer": ".lora_layer",
    "MergedLinear": ".layers",
    "Dropout": ".nn.dropout",
    "dropout": ".nn.dropout",
    "AdapterBank": ".serving.bank",
    "lora_state_dict": ".utils",
    "mark_only_lora_as_trainable": ".utils",
    "merge": ".utils",
    "parameter_groups": ".utils",
    "start_from_weights": ".utils",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Imports a public name on its first access, or a submodule of that name."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
