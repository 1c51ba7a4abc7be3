"""Wraps a model in PyTorch's DDP, so that it sums in the same order from the first step on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .determinism import rng_state, set_rng_state


def wrap_ddp(model: nn.Module, device: torch.device, world_size: int, **settings: Any) -> nn.Module:
    """Returns the model as a training loop calls it: in DDP if there are several processes.

    DDP broadcasts the first process's buffers in every forward pass, unless they are all LoRA's.

    Args:
        model: on `device`.
        device: where this process computes.
        world_size: how many processes there are.
        settings: arguments of `DistributedDataParallel`.
    """
    if world_size == 1:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids, **settings)
    # LoRA's buffers never change, so they need not be sent in every pass. This is set afterwards,
    # because DDP's argument would leave them out of its first broadcast as well.
    if all("lora_" in name for name, _ in model.named_buffers()):
        wrapped.broadcast_buffers = False
    return wrapped


def sync_gradients(wrapped: nn.Module, due: bool) -> AbstractContextManager[None]:
    """Returns the context for a forward and a backward pass.

    Args:
        wrapped: what `wrap_ddp` returned.
        due: whether an update follows; only then are gradients summed over the processes.
    """
    if due or not isinstance(wrapped, DistributedDataParallel):
        return nullcontext()
    return wrapped.no_sync()


def warm_up_ddp(wrapped: nn.Module, backward: Callable[[], None]) -> None:
    """Runs a backward pass without effect, after which DDP no longer rearranges gradients.

    DDP changes the layout of its buckets after the first pass, and the layout decides in which
    order the processes' parts are summed. With three or more processes, this shows in the last
    bits. A resumed run has to add in the same order as one that was not interrupted.

    Args:
        wrapped: what `wrap_ddp` returned; without DDP, nothing is done.
        backward: computes some loss through `wrapped`, and its gradients.
    """
    if isinstance(wrapped, DistributedDataParallel):
        with _state_restored(wrapped.module):
            backward()


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Restores random generators, buffers and gradients at the end of the block."""
    device = next(model.parameters()).device
    state = rng_state(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        set_rng_state(state, device)
        for buffer, before in buffers:
            buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
