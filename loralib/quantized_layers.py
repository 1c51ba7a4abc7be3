"""LoRA on quantized linear layers (QLoRA): their own package computes with the quantized weight.

    h  =  the layer's own forward (x)  +  s · B A dropout(x)

A and B are float32. The input is cast to float32, or to autocast's dtype, and the sum is returned
in the dtype of the layer's own output. The quantized weight is never read here. So nothing is
merged into it, not even in evaluation mode, and what is computed from a weight (DoRA, PiSSA, OLoRA)
is refused.

    known                                        from           what it is
    Linear4bit, LinearNF4, LinearFP4,            bitsandbytes   classes with a forward of their own
    Linear8bitLt
    Int8Tensor, IntxUnpackedToInt8Tensor,        torchao        weights of a plain `nn.Linear`, with
    Float8Tensor, NF4Tensor                                     which `F.linear` computes

These are recognized by package and name, and are tested (tests/interop/test_quantized.py). Others
are refused, because it is unknown what they compute and whether gradients reach their input.

Source: "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al., 2023), arXiv:2305.14314.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functional import variant_of
from .initialization import starts_from_weight
from .layers import Linear
from .lora_layer import LoRALayer
from .nn.products import check_dense, product_dtype
from .text import module_label
from .wrappers import package_and_name

_LAYERS = {
    ("bitsandbytes", "Linear4bit"),
    ("bitsandbytes", "LinearNF4"),
    ("bitsandbytes", "LinearFP4"),
    ("bitsandbytes", "Linear8bitLt"),
}
_WEIGHTS = {
    ("torchao", "Int8Tensor"),
    ("torchao", "IntxUnpackedToInt8Tensor"),
    ("torchao", "Float8Tensor"),
    ("torchao", "NF4Tensor"),
}


def is_quantized_class(kind: type[nn.Module]) -> bool:
    """Returns whether modules of a class are quantized linear layers, by the class's name."""
    return package_and_name(kind) in _LAYERS


def is_quantized_linear(module: nn.Module) -> bool:
    """Returns whether this is a linear layer with a quantized weight that can have or has LoRA."""
    if isinstance(module, QuantizedLayer) or is_quantized_class(type(module)):
        return True
    if not isinstance(module, nn.Linear):
        return False
    return package_and_name(type(module._parameters.get("weight"))) in _WEIGHTS


def passes_gradients(layer: nn.Module) -> bool:
    """Returns whether gradients reach a layer's input; PyTorch does not report it if they do not.

    They do not if its weight's class quantizes the input as well.
    """
    if is_quantized_class(type(layer)):
        return True
    weight: Any = layer.weight
    x = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.enable_grad():
        return F.linear(x.requires_grad_(), weight).requires_grad


# On some CPUs, bitsandbytes repacks a 4-bit weight in evaluation mode if this attribute of the
# layer is true (in users' subclasses as well). From then on the layer passes no gradients, and
# `state_dict()` unpacks the weight to other numbers.
_PACKS = "support_avx512bf16_for_cpu"
# An attribute of a layer that is kept from being packed: how many layers were kept together.
_KEPT = "_kept_unpacked"


def keep_unpacked(model: nn.Module, for_good: bool = False) -> None:
    """Prevents packing of a model's layers, adapted or not: gradients pass through all of them.

    Args:
        model: the model.
        for_good: whether to keep `let_pack` from undoing this.
    """
    kept = [m for m in model.modules() if vars(m).get(_PACKS) or _KEPT in vars(m)]
    for module in kept:
        setattr(module, _PACKS, False)
        together = max(len(kept), vars(module).pop(_KEPT, 0))
        if not for_good:
            vars(module)[_KEPT] = together


def let_pack(model: nn.Module) -> None:
    """Undoes `keep_unpacked`, unless this is only a part of a model: the rest may have LoRA."""
    kept = [m for m in model.modules() if _KEPT in vars(m)]
    if any(vars(module)[_KEPT] > len(kept) for module in kept):
        return
    for module in kept:
        del vars(module)[_KEPT]
        setattr(module, _PACKS, True)


def check_unpacked(
    model: nn.Module,
    way_out: str = "load the model again, and add LoRA or a bank before evaluating it",
) -> None:
    """Checks that no layer of a model is or was packed. Call this before any `state_dict()`.

    Args:
        model: the model.
        way_out: the end of the message, which says what to do.

    Raises:
        ValueError: one is, or was.
    """
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        # Unpacking leaves `original_nested` behind.
        if getattr(state, "packing_format_for_cpu", False) or hasattr(state, "original_nested"):
            owner = module_label(name.rpartition(".")[0]) or "the layer"
            raise ValueError(
                f"the weight of {owner} has been packed for evaluation on this CPU: {way_out}"
            )


def needs_weight(variant: str, initialization: str) -> str | None:
    """Returns which of these settings reads the weight, in words; None if neither does."""
    if variant_of(variant).has_magnitude:
        return f"the variant '{variant}'"
    if starts_from_weight(initialization):
        return f"the initialization '{initialization}'"
    return None


def not_merged(name: str) -> str:
    """Returns the message of the error about merging an update into a quantized weight."""
    return (
        f"the weight of {module_label(name) or 'the layer'} is quantized, so nothing can be "
        "merged into it: save the adapter, load the base in float16 or bfloat16, load_adapter, "
        "then merge"
    )


class QuantizedLayer(LoRALayer):
    """Base of the classes of quantized layers with LoRA, next to `Linear` or `MergedLinear`.

    See the module's docstring. `around` makes the classes.
    """

    _kind: ClassVar[type[nn.Module]]
    _lora: ClassVar[type[Linear]]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(…, in_features) -> (…, out_features)."""
        (x,) = (*args, *kwargs.values())
        check_dense(x)
        out = self._kind.forward(self, *args, **kwargs)
        if x.requires_grad and not out.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"gradients do not pass through this {self._kind.__name__}, so LoRA in earlier "
                "layers would not be trained: quantize its weight in another way"
            )
        dtype = product_dtype(self.lora_A)
        delta = self._delta(dtype)
        z = F.linear(self.lora_dropout(x.reshape(-1, x.shape[-1]).to(dtype)), delta.A)
        total = delta.expanded(out.reshape(-1, out.shape[-1]), z)
        return total.to(out.dtype).view(out.shape)

    def train(self, mode: bool = True) -> "QuantizedLayer":
        """Sets the mode, without a merged weight: there is none here."""
        super().train(mode)
        self._in_effect = False
        return self

    def merged_layer(self) -> nn.Module:
        """Refuses to merge: nothing can be merged into a quantized weight.

        Raises:
            ValueError: always.
        """
        raise ValueError(not_merged(""))

    def _merge(self) -> Tensor:
        raise ValueError(not_merged(""))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.frozen_weight.device)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickles or copies the module so that its class, made at run time, is made again."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (self._kind, self._lora), reduced[2]


_classes: dict[tuple[type[nn.Module], type[Linear]], type[nn.Module]] = {}


def around(kind: type[nn.Module], lora: type[Any]) -> type[nn.Module]:
    """Returns the class that quantized layers get, with LoRA and with their own forward.

    Args:
        kind: the class that the layers have.
        lora: `Linear` or `MergedLinear`.
    """
    if (kind, lora) not in _classes:
        own = {"_kind": kind, "_lora": lora, "__module__": __name__}
        _classes[kind, lora] = type(f"Adapted{kind.__name__}", (QuantizedLayer, lora, kind), own)
    return _classes[kind, lora]


def _new(kind: type[nn.Module], lora: type[Any]) -> nn.Module:
    adapted = around(kind, lora)
    return adapted.__new__(adapted)
