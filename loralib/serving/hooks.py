"""The forward hooks by which a bank works: they act only within the bank's own blocks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..lora_layer import LoRALayer
from ..nn.routing import in_effect

IN_THREADS = (
    "nn.DataParallel computes in its own threads, which a bank's blocks do not reach: give the "
    "bank the model inside it (its module), and call that on one device"
)


class Key:
    """Identifies a bank's hooks and blocks, counts the blocks in progress, and has its locks.

    Attributes:
        blocks: how many blocks are in progress.
        lock: taken for a moment, by blocks and removals as well.
        changes: taken while an adapter is added, which may take seconds or wait for a compilation,
            or while the bank is closed.
    """

    def __init__(self) -> None:
        # One thread may take the lock twice: a block ends wherever its generator is collected.
        self.lock, self.blocks = threading.RLock(), 0
        self.changes = threading.RLock()

    def __reduce__(self) -> tuple[type["Key"], tuple[()]]:
        return Key, ()  # the hooks of a copied or pickled model belong to no bank

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Counts a block while it is in progress."""
        with self.lock:
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1


@dataclass(frozen=True)
class Hook:
    """A forward hook on one of a model's modules.

    A copy of the model has another key, which no routing has, so its hooks never act. Quantized
    modules that torch.ao puts in place of others call their hooks without keyword arguments: then
    `kwargs` is the output.

    Args:
        key: the bank's key.
        module: the module's name.
        act: what the hook does within that bank's blocks.
        is_always: whether it also acts where the module, or another hook, has raised an error.
        is_first: whether it acts before the module's other hooks, and so on its own output.
    """

    key: Key
    module: str
    act: Callable[..., Tensor]
    is_always: bool = False
    is_first: bool = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, out: Tensor | None = None
    ) -> Tensor | None:
        """Acts if one of the bank's blocks is in effect, and returns the output to go on with."""
        routing = in_effect()
        if routing is None or routing.key is not self.key:
            if self.key.blocks and "_is_replica" in vars(module):
                raise ValueError(IN_THREADS)
            return out
        if isinstance(module, LoRALayer) and module.r > 0:
            raise ValueError(f"{self.module} has been given LoRA since: remove_lora first")
        return self.act(self.module, routing, args, kwargs, out)

    def register(self, module: nn.Module) -> RemovableHandle:
        """Gives the hook to a module."""
        return module.register_forward_hook(
            self, prepend=self.is_first, with_kwargs=True, always_call=self.is_always
        )

    def is_on(self, module: nn.Module, handle: RemovableHandle) -> bool:
        """Returns whether a module has the hook, which returned this handle when it was registered.

        A module that has replaced another has none, or a copy of one, which never acts.
        """
        return module._forward_hooks.get(handle.id) == self
