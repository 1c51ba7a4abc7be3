"""The hooks that add adapters' deltas to the outputs of the modules that they adapt."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ..nn.products import without_autocast
from ..nn.routing import Routing
from ..quantized_layers import is_quantized_linear
from .device_deltas import ConvolutionDelta
from .hooks import Hook, Key


def delta_hooks(key: Key, model: nn.Module, modules: Collection[str]) -> list[Hook]:
    """Returns the hooks for an adapter's deltas.

    Args:
        key: the bank's key.
        model: the model.
        modules: the names of the modules that the adapter adapts.
    """
    return [Hook(key, module, _add_deltas, is_first=True) for module in _like(model, modules)]


def _like(model: nn.Module, modules: Collection[str]) -> list[str]:
    """Returns these modules, and those of the same name in owners of the same class.

    The latter are, for example, the same modules of other layers. Dynamo does not check hooks
    before it runs compiled code (its ``skip_nnmodule_hook_guards``), so it could use the code of a
    layer without hooks for one with hooks.
    """
    meant = {_kind_of_place(model, name) for name in modules}
    like = (name for name, _ in model.named_modules() if _kind_of_place(model, name) in meant)
    return list(dict.fromkeys([*modules, *like]))


def _kind_of_place(model: nn.Module, name: str) -> tuple[type[nn.Module], str]:
    owner, _, last = name.rpartition(".")
    return type(model.get_submodule(owner)), last


def _add_deltas(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Tensor:
    """Adds each adapter's delta to its rows, in place: nothing else uses such a layer's output.

    For positions, which all rows share, every segment of rows gets its own output:
    (n, …) -> (segments, n, …).
    """
    deltas = [adapter.deltas.get(module) for adapter in routing.adapters]
    if routing.positions:
        deltas = [delta if delta and delta.positions else None for delta in deltas]
    if not any(deltas):
        return out
    (x,) = (*args, *kwargs.values())
    if x.is_nested:
        raise ValueError(
            f"{module} is given a nested tensor, which a bank cannot add to: turn off "
            "use_nested_tensor in the model's nn.TransformerEncoder"
        )
    if any(module in adapter.tokens_first for adapter in routing.adapters):
        _check_told(module, routing, x)
    if routing.positions:
        x, out = (tensor.expand(len(deltas), *tensor.shape) for tensor in (x, out))
    if not any(isinstance(delta, ConvolutionDelta) for delta in deltas):
        out = out.contiguous()  # a convolution's keeps its memory format, such as channels_last
    if out.requires_grad and any(d and is_quantized_linear(d.module) for d in deltas):
        out = out.clone()  # a package's own autograd function may forbid changes in place
    # An embedding's input has no features, and may be a single row number.
    x, added_to = (x[None], out[None]) if x.dim() == 0 else (x, out)
    tokens = x if x.is_floating_point() else x.unsqueeze(-1)
    # All is cast to the output's dtype, which may not be autocast's: some packages keep float32.
    with without_autocast(out.device.type):
        for delta, part in zip(deltas, routing.parts(tokens), strict=True):
            if delta is not None:
                delta.add_to(added_to[part], x[part])
    return out


def _check_told(module: str, routing: Routing, x: Tensor) -> None:
    """Checks that rows and tokens differ in number if tokens may be the first dimension."""
    if routing.rows is not None and x.dim() > 2 and len(x) == x.shape[1] == routing.rows[-1].stop:
        raise ValueError(
            f"{module} is given as many tokens as rows, near an nn.MultiheadAttention without "
            "batch_first, so their order is ambiguous: name one adapter for all"
        )
