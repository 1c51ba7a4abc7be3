"""loralib: LoRA layers for PyTorch, a drop-in for loralib 0.1.2.

Replace a layer by its namesake here, freeze the rest, train, and save the small part:

    import loralib as lora

    layer = lora.Linear(768, 768, r=8, lora_alpha=16)
    lora.mark_only_lora_as_trainable(model)
    torch.save(lora.lora_state_dict(model), "lora.pt")

The layers are explained, and drawn, at the head of `loralib.layers`.
"""

from .bank import AdapterBank
from .dropout import Dropout, dropout
from .formats import read_adapter, write_adapter
from .layers import Conv1d, Conv2d, Conv3d, Embedding, Linear, LoRALayer, MergedLinear
from .utils import lora_state_dict, mark_only_lora_as_trainable, merge

__version__ = "0.2.0"

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
    "dropout",
    "lora_state_dict",
    "mark_only_lora_as_trainable",
    "merge",
    "read_adapter",
    "write_adapter",
]
