"""The switch that turns the fast paths off: PyTorch's own public operations then compute.

The fast paths are, on a CPU, products with weights (trained ones where it pays), attention,
dropout, and batches filled up to sizes that recur; on a GPU, attention without padding. Without
dropout, results differ in rounding; with it, PyTorch draws other numbers. The switch is for
comparing, and for finding out whether a fault lies here: the environment variable
``LORALIB_PLAIN=1``, or `fast_paths_off`. They are off by themselves within `torch.func`, for whose
transforms they have no rules; and within modes that keep what operations return, or count them, and
know public ones alone (selective checkpointing, `FlopCounterMode`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

_IN_TRANSFORM = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_IS_BATCHED = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)

_MODES = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_MODE = getattr(torch._C, "_get_dispatch_stack_at", lambda index: None)
# Modes that know PyTorch's public operations alone, and none that writes over another's result.
_KEEPING = {"_CachingTorchDispatchMode", "_CachedTorchDispatchMode"}
_COUNTING = {"FlopCounterMode", "_FlopCounterMode"}

_off = os.environ.get("LORALIB_PLAIN", "0") not in ("", "0")


def are_fast_paths_off() -> bool:
    """Whether PyTorch's own operations are to compute, by the switch or because they have to."""
    return _off or needs_public_operations()


def has_mode() -> bool:
    """Whether a `TorchDispatchMode` is active in this thread: it may compute what it likes."""
    return _MODES() > 0


def needs_public_operations(*tensors: Tensor) -> bool:
    """Whether only public operations are right, of which none is in place.

    So it is where PyTorch transforms what is computed, and within modes that keep or count results.

    Args:
        tensors: what is computed with.
    """
    if is_transformed(*tensors):
        return True
    if torch.compiler.is_compiling() or not has_mode():
        return False
    modes = {type(_MODE(index)).__name__ for index in range(_MODES())}
    return not modes.isdisjoint(_KEEPING | _COUNTING)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether PyTorch transforms what this thread computes, or tensors have forward derivatives.

    vmap, grad and jvp of `torch.func` transform, and so does `torch.autograd.grad` of batches of
    gradients. By private names, because there are no public ones.

    Args:
        tensors: what is computed with.
    """
    if _IN_TRANSFORM():
        return True
    if torch.compiler.is_compiling():
        return False
    if any(map(_IS_BATCHED, tensors)):
        return True
    # The level is the whole process's: in another thread, tensors have no tangents.
    has_level = getattr(forward_ad, "_current_level", -1) >= 0
    return has_level and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


@contextmanager
def fast_paths_off(off: bool = True) -> Iterator[None]:
    """Turns fast paths off, or with ``off=False`` on, within the block; for the whole process."""
    global _off
    before, _off = _off, off
    try:
        yield
    finally:
        _off = before
