"""Recognizes modules that wrap others, and modules that were given another forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .text import module_label

# The names of wrapper classes, and the attribute in which each holds the wrapped module.
_WRAPPERS = {
    "AveragedAfterwards": "module",  # training/ddp.py's
    "AveragedModel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "GradSampleModule": "_module",  # Opacus's
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_original_module",  # Lightning Fabric's
}
# Wrappers that record the parameters or the computation when they are made, not at each call.
_NOTING = {"DataParallel", "DeepSpeedEngine", "DistributedDataParallel"}
_NOTING |= {"FullyShardedDataParallel", "GradSampleModule", "OptimizedModule"}


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside wrappers: DDP, `torch.compile`'s, an average of weights, …"""
    inner = _WRAPPERS.get(type(model).__name__, "")
    return unwrapped(getattr(model, inner)) if hasattr(model, inner) else model


def contains(module: nn.Module, kind: type[Any]) -> bool:
    """Returns whether a module is an instance of `kind`, or contains one."""
    return any(isinstance(each, kind) for each in module.modules())


def without_checkpoint(module: nn.Module) -> nn.Module:
    """Returns the module inside a wrapper that recomputes it for the backward pass.

    For modules that are called with weights alone: if these are frozen, PyTorch's reentrant
    checkpoint gives no gradients to the module's own parameters.
    """
    kind = type(module).__name__
    return getattr(module, _WRAPPERS[kind]) if kind == "CheckpointWrapper" else module


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Takes the wrappers off a model and its modules within this block, and yields the model."""
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
    """Returns whether new layers come too late: a module is compiled, FSDP's or in `_NOTING`."""
    is_compiled = vars(module).get("_compiled_call_impl") is not None
    return is_compiled or type(module).__name__ in _NOTING or is_managed(module)


def is_managed(module: object) -> bool:
    """Returns whether FSDP, of either version, gives this module its parameters for each call."""
    return "_is_fsdp_managed_module" in vars(module)


def package_and_name(kind: type) -> tuple[str, str]:
    """Returns a class's package and name, which identify it without importing the package."""
    return kind.__module__.partition(".")[0], kind.__name__


def has_own_forward(module: Any) -> bool:
    """Returns whether a module was given a forward other than its class's, as by offloading."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def own_forward_message(name: str, module: nn.Module, if_hooked: str, if_set: str) -> str:
    """Returns the message of an error about a module that has its own forward.

    Args:
        name: the module's name; empty for the model itself.
        module: the module.
        if_hooked: the end of the message if hooks that offload weights have set the forward: what
            is wrong with that, and what to do.
        if_set: the end if other code has set it: what is wrong with that. The message then says
            how to delete the forward.
    """
    what = f"{module_label(name) or 'the layer'} has a forward of its own"
    if "_hf_hook" in vars(module):  # accelerate's
        return f"{what}, {if_hooked}"
    delete = f"del model.get_submodule('{name}').forward" if name else "del model.forward"
    return f"{what}, {if_set}: delete it first ({delete})"


def drop_leftover_forward(module: nn.Module) -> None:
    """Deletes a module's `forward` if it is only its class's, as removed hooks leave it behind."""
    if "forward" in vars(module) and not has_own_forward(module):
        del vars(module)["forward"]
