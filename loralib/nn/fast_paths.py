"""Turns the fast paths off, so that only PyTorch's own public operations are used.

On a CPU, the fast paths are products with weights (trained ones where it pays), attention, dropout,
and batches filled up to sizes that recur. On a GPU, they are attention without padding. Without
dropout, results with and without them differ only in rounding. With dropout, the random numbers
differ as well.

Use the switch to compare, or to find out whether a fault lies in a fast path: set the environment
variable ``LORALIB_PLAIN=1``, or call `fast_paths_off`. Fast paths are off automatically within
`torch.func`, because they define no rules for its transforms, within `torch.export`, and within
modes that store or count the results of operations and know only public ones (selective
checkpointing, `FlopCounterMode`).
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
# Modes that support only PyTorch's public operations, except those that work in place.
_KEEPING = {"_CachingTorchDispatchMode", "_CachedTorchDispatchMode"}
_COUNTING = {"FlopCounterMode", "_FlopCounterMode"}

_off = os.environ.get("LORALIB_PLAIN", "0") not in ("", "0")


def are_fast_paths_off() -> bool:
    """Returns whether PyTorch's own operations are to be used, by the switch or by necessity."""
    return _off or needs_public_operations()


def are_eager_paths_on(*tensors: Tensor) -> bool:
    """Returns whether to use fast paths that neither a compiled nor a traced graph can hold.

    Args:
        tensors: the inputs of the computation.
    """
    is_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not (_off or is_graph or needs_public_operations(*tensors))


def is_recorded() -> bool:
    """Returns whether a graph for batches of other shapes is being made.

    `torch.jit.trace` and `torch.export` do so; `torch.compile` makes another graph if it needs one.
    """
    return torch.jit.is_tracing() or torch.compiler._is_exporting_flag


def has_mode() -> bool:
    """Returns whether a `TorchDispatchMode`, which may change any result, is active here.

    Modes are per thread.
    """
    return _MODES() > 0


def needs_public_operations(*tensors: Tensor) -> bool:
    """Returns whether only public operations that do not work in place give right results.

    That is the case within PyTorch's transforms, within modes that store or count results, and for
    complex numbers, whose conjugates handwritten gradients leave out. It is also the case in
    `torch.export`, whose strict mode keeps only the forward of an `autograd.Function`, without
    gradients.

    Args:
        tensors: the inputs of the computation; all of them are complex, or none is.
    """
    # PyTorch 2.9's torch.compile takes `torch.compiler.is_exporting()` to be always true.
    if torch.compiler._is_exporting_flag or is_transformed(*tensors):
        return True
    if tensors and tensors[0].is_complex():
        return True
    if torch.compiler.is_compiling() or not has_mode():
        return False
    modes = {type(_MODE(index)).__name__ for index in range(_MODES())}
    return not modes.isdisjoint(_KEEPING | _COUNTING)


def is_transformed(*tensors: Tensor) -> bool:
    """Returns whether a transform is active in this thread, or a tensor has a forward derivative.

    Transforms are vmap, grad and jvp of `torch.func`, and `torch.autograd.grad` of batches of
    gradients (`is_grads_batched`). They are found by private names of PyTorch, because there are no
    public ones.

    Args:
        tensors: the inputs of the computation.
    """
    if _IN_TRANSFORM():
        return True
    if torch.compiler.is_compiling():
        return False
    if any(map(_IS_BATCHED, tensors)):
        return True
    # The level is shared by the whole process. Where only another thread uses forward mode, this
    # thread's tensors have no tangents.
    has_level = getattr(forward_ad, "_current_level", -1) >= 0
    return has_level and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


@contextmanager
def fast_paths_off(off: bool = True) -> Iterator[None]:
    """Turns the fast paths off (or on, with ``off=False``) within the block, in all threads."""
    global _off
    before, _off = _off, off
    try:
        yield
    finally:
        _off = before
