"""The hooks that compute adapters' heads in place of the model's own.

The model's head is computed first, with a copy of its inputs, because it may change them. Then each
row of a batch is computed with the head of its adapter.
"""

import copy
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ..nn.routing import Routing, forget_inputs, in_effect, note_inputs
from ..wrappers import has_own_forward
from .hooks import Hook, Key


def head_hooks(key: Key, model: nn.Module, heads: Iterable[str]) -> "list[Hook | KeepInputs]":
    """Returns the hooks for an adapter's heads.

    Args:
        key: the bank's key.
        model: the model.
        heads: the names of the modules that the adapter has heads for.
    """
    hooks = list[Hook | KeepInputs]()
    for head in heads:
        hooks += [KeepInputs(key, head), Hook(key, head, _apply_heads)]
        hooks.append(Hook(key, head, _forget_inputs, is_always=True))
        hooks += [Hook(key, part, _check_within_head) for part in _parts_of(model, head)]
    return hooks


# The fast path of the first three computes with the weights of the modules inside them, if these
# have no hooks. The last one is called wherever a parametrized weight is read, be it for its dtype.
_WITHOUT_HOOKS = (
    *(nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention),
    ParametrizationList,
)


def _parts_of(model: nn.Module, head: str) -> list[str]:
    """Returns the names of the modules in a head that have tensors, and that nothing else has."""
    places = model.named_modules(remove_duplicate=False)
    elsewhere = {module for name, module in places if not f"{name}.".startswith(f"{head}.")}
    found, inner = list[str](), [head]
    for name in inner:
        for last, part in model.get_submodule(name).named_children():
            if part in elsewhere or isinstance(part, _WITHOUT_HOOKS):
                continue
            inner.append(f"{name}.{last}")
            if part._parameters or part._buffers:
                found.append(inner[-1])
    return found


def _check_within_head(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    """Checks that a part of the model's head is not called by itself, without the head.

    Adapters have heads instead of the whole, which only a call of the whole computes.
    """
    for adapter in routing.adapters:
        for head in adapter.heads:
            if module.startswith(f"{head}.") and head not in routing.inputs:
                raise ValueError(
                    f"the model calls {module} by itself, and not {head} as a whole, which an "
                    "adapter replaces: load that adapter into a model of its own (load_adapter)"
                )
    return out


# Heads that never change their inputs, which may be large, and have no parts.
_PURE = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d}


@dataclass(frozen=True)
class KeepInputs:
    """A hook before a head of the model's, which gives that a copy of its inputs.

    The adapters' heads are computed after it, with the inputs themselves. A head may change these:
    by an activation in place, or as those of sentence-transformers do, which write their result
    into the dict that they are given. Arguments as for `Hook`.
    """

    key: Key
    module: str

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None
    ) -> tuple[Any, Any] | None:
        """Notes the inputs and returns copies of them, if an adapter in effect has such a head."""
        routing = in_effect()
        if routing is None or routing.key is not self.key:
            return None
        if all(adapter.heads.get(self.module) is None for adapter in routing.adapters):
            return None
        is_alone = len(module._forward_pre_hooks) == 1
        if is_alone and type(module) in _PURE and not has_own_forward(module):
            return None
        note_inputs(routing, self.module, args, kwargs)
        return _copied(args), _copied(kwargs)

    def register(self, module: nn.Module) -> RemovableHandle:
        """Gives the hook to a module, before its other hooks."""
        return module.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def is_on(self, module: nn.Module, handle: RemovableHandle) -> bool:
        """Returns whether a module has the hook; see `Hook.is_on`."""
        return module._forward_pre_hooks.get(handle.id) == self


def _copied(inputs: Any) -> Any:
    """Returns a copy of tensors, and of mappings, lists and tuples with all that they hold."""
    if isinstance(inputs, Tensor):
        return inputs.clone()
    if type(inputs) in (list, tuple):
        return type(inputs)(map(_copied, inputs))
    if type(inputs) is dict:  # Dynamo warns that it cannot trace copy.copy
        return {name: _copied(each) for name, each in inputs.items()}
    if isinstance(inputs, MutableMapping):
        copied = copy.copy(inputs)  # of its class, which may not be a dict's
        for name, each in inputs.items():
            copied[name] = _copied(each)
        return copied
    return inputs


def _apply_heads(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Tensor:
    """Computes each adapter's rows with its own head; rows of adapters without one keep `out`.

    A head's other arguments are the same for all rows.
    """
    heads = [adapter.heads.get(module) for adapter in routing.adapters]
    if module in routing.inputs:
        args, kwargs, _ = routing.inputs[module]
    given = (*args, *kwargs.values())
    x = next(iter(given), None)
    if isinstance(x, Tensor):
        routing.parts(x)  # checks the number of rows
    if all(head is None for head in heads):
        return out
    if len(heads) == 1:
        return heads[0](*args, **kwargs)
    if not isinstance(x, Tensor) or not isinstance(out, Tensor):
        kinds = {type(each).__name__: None for each in (x, out) if not isinstance(each, Tensor)}
        raise ValueError(
            f"{module} is given or returns a {next(iter(kinds))}, whose rows a bank cannot tell "
            "apart: use one adapter at a time"
        )
    if any(isinstance(other, Tensor) for other in given[1:]):
        raise ValueError(f"{module} is given several tensors: use one adapter at a time")
    _check_rows(module, out, x)
    parts = routing.parts(x)
    of_each = list(zip(heads, parts, strict=True))  # iterating a strict zip breaks Dynamo's graphs
    outputs = list[Tensor]()
    for head, part in of_each:
        if head is None:
            outputs.append(out[part])
            continue
        outputs.append(_called_with(head, x[part], args, kwargs))
        _check_rows(module, outputs[-1], x[part])
    return _joined(module, outputs)


def _check_rows(module: str, out: Tensor, x: Tensor) -> None:
    """Checks that a head's output has a row for each row of its input."""
    if out.dim() == 0 or len(out) != len(x):
        raise ValueError(
            f"{module} turns {tuple(x.shape)} into {tuple(out.shape)}, whose rows a bank cannot "
            "tell apart: use one adapter at a time"
        )


def _joined(module: str, outputs: list[Tensor]) -> Tensor:
    """Returns the outputs of successive rows as one tensor; see `AdapterBank.use` for widths.

    Raises:
        ValueError: they differ in more than their widths, or cannot be padded with -inf.
    """
    first = outputs[0]
    for other in outputs:
        is_alike = other.dim() == first.dim() and other.shape[1:-1] == first.shape[1:-1]
        if not is_alike or (other.shape[1:] != first.shape[1:] and not other.is_floating_point()):
            raise ValueError(
                f"{module} turns a row into {tuple(first.shape[1:])} for one adapter and "
                f"{tuple(other.shape[1:])} for another, which no tensor holds together: use one "
                "adapter at a time"
            )
    if first.dim() == 1:
        return torch.cat(outputs)  # one value for each row
    widest = max(output.shape[-1] for output in outputs)
    padding = [(0, widest - output.shape[-1]) for output in outputs]
    return torch.cat(
        [F.pad(*part, value=float("-inf")) for part in zip(outputs, padding, strict=True)]
    )


def _forget_inputs(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    """Drops what `KeepInputs` has kept, also if the head or another hook has raised an error."""
    forget_inputs(routing, module)
    return out


def _called_with(
    head: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Returns a head's output for another first argument."""
    if args:
        return head(x, *args[1:], **kwargs)
    first, *_ = kwargs
    return head(**{**kwargs, first: x})
