"""Counts what a training step takes before it is run: memory by kind, and arithmetic.

The loop's own step runs on PyTorch's fake tensors, which have a shape, a dtype and a device, but no
memory. What it would hold and multiply is counted on the way, so the figures follow the code:

    weights, without memory --.
                              +--> forward, backward, update --> most bytes held at once: memory
    a batch of token ids -----'                              --> matrix products: arithmetic

Batches are real, and so are tensors made from them alone, because models decide by lengths and
masks what to compute. Only tensors are counted: what libraries need besides, for packed matrices or
caches, is not known until they use it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:  # otherwise imported where it is used: it takes a second, and few runs use it
    from torch._subclasses.fake_tensor import FakeTensorMode

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Training(Generic[Batch]):
    """A training loop's parts.

    Args:
        model: what is trained, with frozen weights in the precision in which they are held.
        optimizer: of its trained parameters.
        add_gradients: runs a batch's forward and backward pass; what it returns is ignored.
        update: applies the gradients and drops them.
    """

    model: nn.Module
    optimizer: Optimizer
    add_gradients: Callable[[Batch], object]
    update: Callable[[], None]


@dataclass(frozen=True)
class Memory:
    """Bytes on a device.

    Args:
        weights: parameters and buffers, in the precision in which they are held.
        gradients: those of the trained parameters.
        optimizer: its state.
        activations: what the forward and backward pass hold besides, at the peak.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Cost:
    """What computing a batch takes.

    Args:
        parameters, trained: how many parameters the model has, and how many of them are trained.
        memory: what is held while the batch is computed.
        operations: multiplications and additions of its matrix products, forward and backward.
    """

    parameters: int
    trained: int
    memory: Memory
    operations: int


def cost_of_batch(
    build: Callable[[], Training[Batch]], batch: Batch, device: torch.device, passes: int = 1
) -> Cost:
    """Counts what a batch takes in a run that has already made an update.

    Args:
        build: makes the loop's parts.
        batch: a real one.
        device: where it would be computed.
        passes: how many batches make one update. If there is more than one, gradients are held
            while the next batch is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, torch.device(device):
        training = build()
        _make_state(training.optimizer)
    parameters, trained = list(training.model.parameters()), _trained(training.optimizer)
    own = [*parameters, *training.model.buffers()]
    state = tree_leaves(list(training.optimizer.state.values()))
    count = min(passes, 2)
    counter, live = _Operations(), LiveBytes([own, state], fake)
    with counter, live:
        for _ in range(count):
            training.add_gradients(batch)
        training.update()
    weights, averages = (sum(_storages(tensors).values()) for tensors in (own, state))
    gradients = sum(p.numel() * p.element_size() for p in trained)
    memory = Memory(weights, gradients, averages, max(live.peak - gradients, 0))
    numbers = sum(p.numel() for p in parameters), sum(p.numel() for p in trained)
    return Cost(*numbers, memory=memory, operations=counter.total // count)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _make_state(optimizer: Optimizer) -> None:
    """Has the optimizer make its state, which it does at its first update."""
    for parameter in _trained(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _storages(values: Any) -> dict[int, int]:
    """Returns the storages of all tensors in some values: the bytes of each, by its address."""
    tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made within its block and still held.

    Args:
        before: tensors, in any nesting, that are already held. What shares memory with them is not
            counted.
        fake: the mode in which large tensors that depend on no other, such as random numbers, are
            made without memory. Small ones stay real, because a model may decide by their values.

    Attributes:
        held: the bytes held now.
        peak: the most bytes held so far.
    """

    _SMALL = 2**16

    def __init__(self, before: Any = (), fake: "FakeTensorMode | None" = None):
        super().__init__()
        self.fake = fake
        self.held = self.peak = 0
        self._known = {*_storages(before)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [index for given in args[1] for index in _numbers(given)])
        out = self._large(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _large(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the result without memory if it is a large tensor made from no other, or None."""
        if self.fake is None or any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
            return None
        with self.fake:
            out = func(*args, **kwargs)
        return out if isinstance(out, Tensor) and out.numel() > self._SMALL else None

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        finalize(storage, self._drop, key, storage.nbytes()).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def _numbers(index: Tensor | None) -> Sequence[Tensor | None]:
    """Converts a mask to the indices that it selects, which tell the size of the result.

    Other indices are returned as they are.
    """
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return index.nonzero().unbind(1)


class _Operations(TorchDispatchMode):
    """Counts multiplications and additions within its block, by PyTorch's formulas.

    PyTorch's own `FlopCounterMode` counts by module, and for that holds the results of checkpointed
    layers, which are not held without it.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.formulas = {**flop_registry, **_cpu_formulas()}
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self.formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def _cpu_formulas() -> dict[Any, Callable[..., int]]:
    """Returns formulas for operations for which PyTorch has none."""
    from torch.utils.flop_counter import sdpa_flop_count

    def product(_: Tensor, a: Tensor, b: Tensor, **__: Any) -> int:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q.shape, k.shape, v.shape)

    def backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> int:
        # Five products, where forward has two: the scores once more, and the gradients of queries,
        # keys, probabilities and values.
        return 5 * sdpa_flop_count(q.shape, k.shape, v.shape) // 2

    return {
        torch.ops.aten.addmm_: product,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
