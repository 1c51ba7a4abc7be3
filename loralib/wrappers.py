"""Modules that wrap a model, or a part of it, and give what they hold other names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .text import called

# The classes of PyTorch's wrappers, and what they call the module within.
_WRAPPERS = {
    "AveragedModel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
# Those that note the parameters, or the computation, when they wrap; the others look at each call.
_NOTING = {"DataParallel", "DeepSpeedEngine", "DistributedDataParallel"}
_NOTING |= {"FullyShardedDataParallel", "OptimizedModule"}


def unwrapped(model: nn.Module) -> nn.Module:
    """The module within wrappers: DDP, `torch.compile`'s, an average of weights, and so on."""
    inner = _WRAPPERS.get(type(model).__name__, "")
    return unwrapped(getattr(model, inner)) if hasattr(model, inner) else model


def without_checkpoint(module: nn.Module) -> nn.Module:
    """The module within a wrapper that computes it again for the backward pass.

    For what is called with weights alone: if these are frozen, PyTorch's reentrant checkpoint gives
    no gradients to the module's own parameters.
    """
    kind = type(module).__name__
    return getattr(module, _WRAPPERS[kind]) if kind == "CheckpointWrapper" else module


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model, within this block without wrappers, its own and those of its modules."""
    model = unwrapped(model)
    wrapped = [
        (owner, name, module)
        for owner in model.modules()
        for name, module in owner._modules.items()
        if module is not None and unwrapped(module) is not module
    ]
    try:
        for owner, name, module in wrapped:
            owner._modules[name] = unwrapped(module)
        yield model
    finally:
        for owner, name, module in wrapped:
            owner._modules[name] = module


def is_distributed_or_compiled(module: nn.Module) -> bool:
    """Whether a module is in such a wrapper, or compiled: layers that it gets now come too late."""
    is_compiled = vars(module).get("_compiled_call_impl") is not None
    return is_compiled or type(module).__name__ in _NOTING or is_managed(module)


def is_managed(module: object) -> bool:
    """Whether FSDP, of either version, gives this module its parameters for each call."""
    return "_is_fsdp_managed_module" in vars(module)


def is_sharded(tensor: object) -> bool:
    """Whether a tensor may lie in several processes, as FSDP2's and tensor parallelism's do."""
    return hasattr(tensor, "full_tensor")


# PyTorch's tensors that compute as plain ones do: also what is sharded, has a shape alone, or gets
# one in the first pass.
_ORDINARY = {"Tensor", "TensorBase", "Parameter", "Buffer", "DTensor", "FakeTensor"}
_ORDINARY |= {"UninitializedParameter", "UninitializedBuffer"}


def is_fake(tensor: object) -> bool:
    """Whether a tensor has a shape alone, on a device that has memory (`FakeTensorMode`)."""
    return type(tensor).__name__ == "FakeTensor"


def quantized(tensor: Tensor) -> str | None:
    """That a tensor is quantized, in words, where it is, or else computes in a way of its own."""
    kind = type(tensor)
    if any(_OWN_WAYS & vars(each).keys() for each in kind.__mro__ if not _is_ordinary(each)):
        return f"quantized (a {kind.__module__}.{kind.__qualname__})"
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return f"quantized ({tensor.dtype})"
    return None


def unreadable(tensor: Tensor) -> str | None:
    """As `quantized`, of any tensor of a model: integers, as of a mask, are values as a rule."""
    return quantized(tensor) if tensor.is_floating_point() or is_packed(tensor) else None


def is_packed(tensor: Tensor) -> bool:
    """Whether this is the weight of a layer of bitsandbytes, with numbers packed into others."""
    return package_and_name(type(tensor)) in _PACKED


def package_and_name(kind: type) -> tuple[str, str]:
    """By what a class of another package is known here, which is not imported for that."""
    return kind.__module__.partition(".")[0], kind.__name__


_PACKED = {("bitsandbytes", "Params4bit"), ("bitsandbytes", "Int8Params")}
_OWN_WAYS = {"__torch_dispatch__", "__torch_function__"}


def _is_ordinary(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch" and kind.__name__ in _ORDINARY


def has_own_forward(module: Any) -> bool:
    """Whether a forward other than its class's was set on a module, as hooks that offload do."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def own_forward_message(name: str, module: nn.Module, if_hooked: str, if_set: str) -> str:
    """The text of an error about a module that has a forward of its own.

    Args:
        name: the module's; empty for the model itself.
        module: the module.
        if_hooked: how the text goes on where hooks that offload weights have set the forward:
            what is wrong with that, and what to do.
        if_set: how it goes on where somebody else has: what is wrong with that. How to delete the
            forward is added.
    """
    what = f"{called(name) or 'the layer'} has a forward of its own"
    if "_hf_hook" in vars(module):  # accelerate's
        return f"{what}, {if_hooked}"
    delete = f"del model.get_submodule('{name}').forward" if name else "del model.forward"
    return f"{what}, {if_set}: delete it first ({delete})"


def drop_set_forward(module: nn.Module) -> None:
    """Takes a forward off a module that is its class's own, which such hooks leave behind."""
    if "forward" in vars(module) and not has_own_forward(module):
        del vars(module)["forward"]
