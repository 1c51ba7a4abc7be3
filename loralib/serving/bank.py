"""Computes one model with several LoRA adapters, chosen for each batch or for each of its rows.

    bank = lora.AdapterBank(model)
    bank.add("rte", read_adapter("rte.safetensors"))
    bank.add("mnli", read_adapter("mnli.safetensors"))

    with bank.use("rte"):
        model(**batch)
    with bank.use(["rte", "mnli", "rte"]):  # a batch of three rows
        model(**batch)

The base is computed once for the whole batch. An adapter costs two thin products in each module
that it adapts, and its head. The model itself is not changed: forward hooks apply the deltas
(delta_hooks.py) and heads (head_hooks.py), and only within `use`. routing.py tells which rows are
computed with which adapter.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..adapters.adapter import Adapter
from ..arguments import as_names, check_model, check_not_scripted
from ..lora_layer import lora_layers
from ..model_checks import check_whole
from ..nn.routing import Routing, routed, slices
from ..quantized_layers import check_unpacked, keep_unpacked
from ..text import in_short, shown
from ..wrappers import unwrapped, without_wrappers
from .delta_hooks import delta_hooks
from .head_hooks import KeepInputs, head_hooks
from .hooks import IN_THREADS, Hook, Key
from .prepared import PreparedAdapter, prepare
from .snapshot import ModelSnapshot

logger = logging.getLogger(__name__)


class AdapterBank:
    """LoRA adapters of one model, for inference.

    Args:
        model: a plain model, on its final device, in its final dtype and with its final weights.
            Once it has adapters, the weights that these change have to stay the same.

    The rows of a batch are the first dimension of its layers' inputs, or their tokens are packed
    (packing.py). Outside of `use`, the model computes as it did before. Its parameters, buffers and
    the names in its state dict never change, and a copy of the model is a plain model. A model may
    have several banks, but their blocks cannot be nested.

    Raises:
        ValueError: the model has LoRA layers, is sharded, or has been packed by bitsandbytes for
            evaluation on a CPU; or it contains an `nn.DataParallel`, which computes in its own
            threads.
    """

    def __init__(self, model: nn.Module):
        check_model(model)
        check_not_scripted(model)
        if any(isinstance(module, nn.DataParallel) for module in model.modules()):
            raise ValueError(IN_THREADS)
        check_whole(model, "it gets a bank")
        for name in lora_layers(unwrapped(model)):
            raise ValueError(f"{name} has LoRA already: build the model without LoRA, or merge it")
        check_unpacked(model)
        self._model = model
        self._key = Key()
        keep_unpacked(model, for_good=True)  # once packed, the model could not have another bank
        self._adapters: dict[str, PreparedAdapter] = {}
        self._seen = ModelSnapshot()
        self._hooks: dict[Hook | KeepInputs, RemovableHandle] = {}
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters' names, in the order in which they were added."""
        return tuple(self._adapters)

    def labels(self, name: str) -> tuple[str, ...]:
        """Returns what the outputs of an adapter's head stand for.

        By its metadata, or else ``LABEL_0``, …; () if the adapter has no head.

        Raises:
            ValueError: there is no such adapter.
        """
        return self._find([name])[0].labels

    def add(self, name: str, adapter: Adapter) -> None:
        """Adds an adapter, or raises and leaves everything as it was.

        What an adapter holds besides LoRA is its head: whole modules at the model's top, such as
        ``classifier``. In the adapter's head, the model's last projection may have another number
        of outputs.

        Args:
            name: the adapter's name, for `use`.
            adapter: what `read_adapter` returned. If it has a fingerprint of the base that it was
                trained on, the model has to be that base. If it has none, or the model is in
                float16, the base is unverified, and a warning is logged.

        Raises:
            TypeError: `adapter` is something else, such as a path, or the arguments are swapped.
            ValueError: the name is not a string, is empty, or is taken; the bank is closed; modules
                or weights that adapters change are not what they were; or what the adapter changes
                is offloaded, or quantized in an unknown way.
            CheckpointError: the adapter is not LoRA alone, or does not fit the model.
        """
        if isinstance(name, Adapter):
            raise TypeError("the name comes first, then the adapter: bank.add('rte', adapter)")
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name has to be a string, not empty, got {shown(name)}")
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"adapter '{name}' has to be what lora.read_adapter(path) returns, got "
                f"{shown(adapter)}"
            )
        with self._key.changes:
            self._add(name, adapter)

    def _add(self, name: str, adapter: Adapter) -> None:
        self._check_open()
        if name in self._adapters:
            raise ValueError(f"the bank already has an adapter '{name}' (it has {self._listed()})")
        self._seen.check(tuple(self._adapters.values()))
        with without_wrappers(self._model) as plain:
            prepared = prepare(plain, adapter)
            self._add_hooks(plain, prepared)
            with self._key.lock:
                self._seen.note(plain, prepared)
                self._adapters[name] = prepared

    def _add_hooks(self, model: nn.Module, prepared: PreparedAdapter) -> None:
        """Gives hooks to all modules that an adapter changes."""
        hooks: list[Hook | KeepInputs] = [
            *delta_hooks(self._key, model, prepared.deltas),
            *head_hooks(self._key, model, prepared.heads),
        ]
        new = [hook for hook in hooks if not self._has_hook(model, hook)]
        for hook in new:
            if hook in self._hooks:  # in a module that has been replaced
                self._hooks[hook].remove()
            self._hooks[hook] = hook.register(model.get_submodule(hook.module))
        if new and "torch._dynamo" in sys.modules:
            # Code that was compiled before does not see hooks that were added later.
            torch.compiler.reset()

    def _has_hook(self, model: nn.Module, hook: Hook | KeepInputs) -> bool:
        module = model.get_submodule(hook.module)
        return hook in self._hooks and hook.is_on(module, self._hooks[hook])

    def remove(self, name: str) -> None:
        """Drops an adapter; blocks in progress keep it.

        Raises:
            ValueError: there is no such adapter.
        """
        with self._key.lock:
            self._find([name])
            del self._adapters[name]
            self._seen.forget_unused(self._adapters.values())

    def close(self) -> None:
        """Drops all adapters and takes the hooks out of the model.

        Blocks in progress keep their adapters; then the hooks stay until these blocks have ended.
        """
        with self._key.changes, self._key.lock:
            self._adapters.clear()
            self._seen.forget_unused(())
            self._closed = True
            self._remove_unused_hooks()

    def _remove_unused_hooks(self) -> None:
        """Takes the hooks out of the model if the bank is closed and no block is in progress."""
        with self._key.lock:
            if self._closed and not self._key.blocks:
                for handle in self._hooks.values():
                    handle.remove()
                self._hooks.clear()

    def use(self, names: str | Sequence[str]) -> "Block":
        """Returns a block in which the model computes with adapters, in this thread only.

        Call `use` again for each `with`. It can also decorate a function, but not a generator or a
        coroutine. A call without `with` has no effect, and a warning says so.

        If heads of different widths share a batch, outputs are padded with -inf on the right, which
        does not change a softmax or an argmax. An adapter without a head uses the model's. Of
        nested blocks, the innermost counts.

        Args:
            names: one name for everything that is computed, or a list with one for each row of a
                batch. The order is free, but rows with the same adapter are fastest next to each
                other.

        Raises:
            ValueError: On entering the block: there is no such adapter; names are empty, are not
                strings or have no order (a set); the bank is closed; modules or weights have
                changed since the adapter was added; or the block is inside one of another bank.
                From the model: the number of rows is not that of names; rows cannot be recognized
                in a layer's input or in a head's output; or hooks have offloaded a bias that DoRA's
                gain leaves as it is.
        """
        return Block(partial(self._using, names))

    @contextmanager
    def _using(self, names: str | Sequence[str]) -> Iterator[None]:
        try:
            with self._key.in_use():  # before the check: from then on, `close` leaves the hooks
                self._check_open()
                routing = self._routing(names)
                self._seen.check(routing.adapters)
                with routed(routing):
                    yield
        finally:
            self._remove_unused_hooks()

    def _routing(self, names: str | Sequence[str]) -> Routing:
        if isinstance(names, str):
            return Routing(self._key, self._find([names]))
        of_rows = as_names("names", names, "an adapter's name, or a list of one for each row")
        if not of_rows:
            raise ValueError(f"no adapter is named; the bank has {self._listed()}")
        segments = [(name, len(list(rows))) for name, rows in groupby(of_rows)]
        adapters = self._find([name for name, _ in segments])
        return Routing(self._key, adapters, slices([count for _, count in segments]))

    def _find(self, names: Sequence[str]) -> tuple[PreparedAdapter, ...]:
        adapters = list[PreparedAdapter]()
        for name in names:
            # Looked up once, because another thread may remove it at any time.
            adapter = self._adapters.get(name) if isinstance(name, str) else None
            if adapter is None:
                found = f", only {self._listed()}" if self._adapters else ": the bank is empty"
                raise ValueError(f"there is no adapter {shown(name)}{found}")
            adapters.append(adapter)
        return tuple(adapters)

    def _listed(self) -> str:
        return in_short(self._adapters) or "none"

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the bank is closed: make another for the model")


# ---- blocks ----


class Block(ContextDecorator):
    """What `AdapterBank.use` returns: a block that has an effect only under `with`.

    Args:
        make: returns the context manager that does the work.
    """

    _is_used = True  # until __init__ runs, which Dynamo's objects may never do
    _block: AbstractContextManager[None] | None = None

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make, self._is_used = make, False

    def __enter__(self) -> None:
        if self._is_used:
            raise ValueError("a bank.use(…) block can be entered only once: call use again")
        self._is_used = True
        self._block = self._make()
        self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        if self._block is None:
            raise RuntimeError("the block was not entered")
        return self._block.__exit__(*error)

    def _recreate_cm(self) -> "Block":
        return Block(self._make)  # for each call of a decorated function

    def __call__(self, func: Any) -> Any:
        """Returns the function, decorated to compute with the adapters.

        Raises:
            ValueError: it is a generator or a coroutine, whose body runs after its call.
        """
        self._is_used = True
        if any(is_kind(each) for each in (func, func.__call__) for is_kind in _RUN_LATER):
            raise ValueError(
                f"{getattr(func, '__name__', 'the function')} is a generator or a coroutine, "
                "which computes after its call: write `with bank.use(…):` inside it, around no "
                "yield"
            )
        return super().__call__(func)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # is_finalizing is an argument, because this module's names may be gone when Python exits.
        if not self._is_used and not is_finalizing():
            logger.warning(
                "bank.use(…) by itself has no effect: write `with bank.use(…):`, and call the "
                "model in that block"
            )


_RUN_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
