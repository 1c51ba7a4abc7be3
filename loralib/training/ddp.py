"""Averages gradients over processes, in the same order from the first step on.

PyTorch's DDP does so by hooks, while the backward pass computes the gradients. A CUDA graph replays
a backward pass without hooks; with graphs, gradients are averaged once it has ended.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import TrainingError
from .determinism import rng_state, set_rng_state
from .distributed import share_tensors

# Bytes of gradients that are averaged at once without DDP; DDP takes as many.
_BUCKET = 25 * 2**20


class AveragedAfterwards(nn.Module):
    """A model whose gradients `sync_gradients` averages after the backward pass.

    Attributes:
        module: the model.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.module(*args, **kwargs)


def wrap_ddp(
    model: nn.Module,
    device: torch.device,
    world_size: int,
    cuda_graphs: bool = False,
    init_sync: bool = True,
    **settings: Any,
) -> nn.Module:
    """Returns the model as a training loop calls it: in DDP if there are several processes.

    DDP broadcasts the first process's buffers in every forward pass, unless they are all LoRA's.

    Args:
        model: on `device`.
        device: where this process computes.
        world_size: how many processes there are.
        cuda_graphs: whether backward passes are replayed as CUDA graphs; there is no DDP then, and
            buffers are broadcast only now.
        init_sync: whether all processes get the first one's parameters and buffers now.
        settings: further arguments of `DistributedDataParallel`.
    """
    if world_size == 1:
        return model
    if cuda_graphs:
        if init_sync:
            share_tensors([*model.parameters(), *model.buffers()], world_size)
        return AveragedAfterwards(model)
    device_ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids, init_sync=init_sync, **settings)
    # LoRA's buffers never change, so they need not be sent in every pass. This is set afterwards,
    # because DDP's argument would leave them out of its first broadcast as well.
    if all("lora_" in name for name, _ in model.named_buffers()):
        wrapped.broadcast_buffers = False
    return wrapped


def share_buffers(wrapped: nn.Module) -> None:
    """Copies the first process's buffers to all, as DDP does before each forward pass.

    Those that the last pass has changed, such as a batch norm's, differ between the processes. All
    of them have to call this before they evaluate.

    Args:
        wrapped: what `wrap_ddp` returned.
    """
    if isinstance(wrapped, DistributedDataParallel) and wrapped.broadcast_buffers:
        share_tensors(wrapped.module.buffers(), dist.get_world_size())


def sync_gradients(wrapped: nn.Module, due: bool) -> AbstractContextManager[None]:
    """Returns the context for a forward and a backward pass.

    Args:
        wrapped: what `wrap_ddp` returned.
        due: whether an update follows; only then are gradients averaged over the processes.
    """
    if due and isinstance(wrapped, AveragedAfterwards):
        return _average_at_the_end(wrapped.module)
    if isinstance(wrapped, DistributedDataParallel):
        return _check_called(wrapped) if due else wrapped.no_sync()
    return nullcontext()


@contextmanager
def _check_called(wrapped: DistributedDataParallel) -> Iterator[None]:
    """Checks that DDP is called within the block; else it would not average gradients.

    Raises:
        TrainingError: it is not, as if a loss is computed with the model that it wraps.
    """
    calls: list[None] = []
    hook = wrapped.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield
    finally:
        hook.remove()
    if not calls:
        raise TrainingError(
            "the loss was computed without DDP, so that each process would train a model of its "
            "own: call the model that compute_loss is given, not its module or self.model"
        )


@contextmanager
def _average_at_the_end(model: nn.Module) -> Iterator[None]:
    """Averages the gradients of a model over the processes at the end of the block.

    Those left over from before a parameter was frozen are among them: the optimizer applies them.

    Raises:
        TrainingError: a trained parameter has no gradient. The processes would otherwise average
            gradients of different parameters if only some of them had it.
    """
    yield
    gradients = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad)
        elif parameter.requires_grad:
            raise TrainingError(
                f"{name} is trained, but the loss does not depend on it: freeze it, or train "
                "with --no_cuda_graphs"
            )
    for bucket in _buckets(gradients):
        _average(bucket)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Divides gradients, in their order, into parts of one dtype that are not too large."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > _BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


def _average(gradients: list[Tensor]) -> None:
    """Replaces gradients of one dtype by their means over the processes, by one sum."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat /= dist.get_world_size()  # first, as in DDP: float16 holds no sum of large gradients
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    means = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    torch._foreach_copy_(gradients, means)


def warm_up_ddp(wrapped: nn.Module, backward: Callable[[], None]) -> None:
    """Runs a backward pass without effect, after which DDP no longer rearranges gradients.

    DDP changes the layout of its buckets after the first pass, and the layout decides in which
    order the processes' parts are summed. With three or more processes, this shows in the last
    bits. A resumed run has to add in the same order as one that was not interrupted.

    Args:
        wrapped: what `wrap_ddp` returned; without DDP, nothing is done, as nothing is rearranged.
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
