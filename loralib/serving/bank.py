"""Many tasks, one base: several LoRA adapters of one model, each used at will.

    bank = lora.AdapterBank(model)
    bank.add("rte", read_adapter("rte.safetensors"))
    bank.add("mnli", read_adapter("mnli.safetensors"))

    with bank.use("rte"):
        model(**batch)
    with bank.use(["rte", "mnli", "rte"]):  # a batch of three rows
        model(**batch)

The base is computed once, for all of the batch; an adapter costs two thin products in each module
that it adapts, and its head. Nothing of the model is changed: deltas and heads are applied by
forward hooks, which act within `use` alone. routing.py tells which rows are whose.
"""

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..adapters.adapter import Adapter
from ..arguments import as_names, check_model
from ..lora_layer import LoRALayer, lora_layers
from ..model_checks import check_whole
from ..nn.routing import Routing, in_effect, routed, slices
from ..quantized_layers import check_unpacked, is_quantized_linear, keep_unpacked
from ..text import in_short, shown
from ..wrappers import unwrapped, without_wrappers
from .prepared import PreparedAdapter, fingerprint_of, prepare
from .seen import SeenModules

logger = logging.getLogger(__name__)


class AdapterBank:
    """LoRA adapters of one model, for inference.

    Args:
        model: a plain model, on the device, in the dtype and with the weights that it will have
            when it gets adapters. From then on the weights that these change have to stay the same.

    Rows of a batch are the first dimension of what its layers are given, or their tokens are packed
    (packing.py). Outside of `use` the model computes as it did before. Its parameters, buffers and
    the names in its state dict stay as they are at all times, and a copy of the model is a plain
    model. A model may have two banks; their blocks cannot be nested.

    Raises:
        ValueError: the model has LoRA layers, is sharded, or has been packed by bitsandbytes for
            evaluation on a CPU; or it is an `nn.DataParallel`, which computes in threads of its
            own.
    """

    def __init__(self, model: nn.Module):
        check_model(model)
        if any(isinstance(module, nn.DataParallel) for module in model.modules()):
            raise ValueError(_IN_THREADS)
        check_whole(model, "it gets a bank")
        for name in lora_layers(unwrapped(model)):
            raise ValueError(f"{name} has LoRA already: build the model without LoRA, or merge it")
        check_unpacked(model)
        self._model = model
        self._key = _Key()
        keep_unpacked(model, for_good=True)  # else no other bank could have it after this one
        self._fingerprint: str | None = None  # of the model, when the first adapter is added
        self._adapters: dict[str, PreparedAdapter] = {}
        self._seen = SeenModules()
        self._hooks: dict[_Hook, RemovableHandle] = {}
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters there are, in the order in which they were added."""
        return tuple(self._adapters)

    def labels(self, name: str) -> tuple[str, ...]:
        """What the outputs of an adapter's head stand for.

        Its metadata says it, or else they are ``LABEL_0``, …; () if the adapter brings no head.

        Raises:
            ValueError: there is no such adapter.
        """
        return self._find([name])[0].labels

    def add(self, name: str, adapter: Adapter) -> None:
        """Takes an adapter in, or raises and leaves everything as it was.

        What it holds besides LoRA is its head: whole modules at the model's top, such as
        ``classifier``. The model's last projection may have another number of outputs there.

        Args:
            name: what it is called in `use`.
            adapter: what `read_adapter` read. Where it has a fingerprint of the base that it was
                trained on, the model has to be that one. An adapter without, or a model in float16,
                is unverified, with a warning.

        Raises:
            TypeError: it is something else, such as a path, or the two are exchanged.
            ValueError: the name is not a string, or is empty, or there is one of this name; the
                bank is closed; modules or weights that adapters change are not what they were; or
                what the adapter changes is offloaded, or quantized in a way that is unknown.
            CheckpointError: it is not LoRA alone, or does not fit the model.
        """
        self._check_open()
        if isinstance(name, Adapter):
            raise TypeError("the name comes first, then the adapter: bank.add('rte', adapter)")
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name has to be a string, not empty, got {shown(name)}")
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"adapter '{name}' has to be what lora.read_adapter(path) returns, got "
                f"{shown(adapter)}"
            )
        if name in self._adapters:
            raise ValueError(f"there is an adapter '{name}' already, among {self._listed()}")
        self._seen.check(tuple(self._adapters.values()))
        with without_wrappers(self._model) as plain:
            if not self._adapters:
                self._fingerprint = fingerprint_of(plain)
            prepared = prepare(plain, adapter, self._fingerprint)
            self._add_hooks(plain, prepared)
            with self._key.lock:
                self._seen.note(plain, prepared)
                self._adapters[name] = prepared

    def _add_hooks(self, model: nn.Module, prepared: PreparedAdapter) -> None:
        """Sees to it that all modules that an adapter changes have their hook, and their like."""
        hooks = [_Hook(self._key, module, _add_deltas) for module in _like(model, prepared.deltas)]
        hooks += [_Hook(self._key, module, _apply_heads) for module in prepared.heads]
        modules = {hook: model.get_submodule(hook.module) for hook in hooks}
        new = [hook for hook in hooks if not self._has_hook(modules[hook], hook)]
        for hook in new:
            module = modules[hook]
            self._hooks[hook] = module.register_forward_hook(hook, with_kwargs=True)
        if new and "torch._dynamo" in sys.modules:
            # What was compiled before does not see hooks that came later.
            torch.compiler.reset()

    def _has_hook(self, module: nn.Module, hook: "_Hook") -> bool:
        """Whether a module has a hook: one that took the place of another has not."""
        return hook in self._hooks and self._hooks[hook].id in module._forward_hooks

    def remove(self, name: str) -> None:
        """Drops an adapter; blocks in progress keep it.

        Raises:
            ValueError: there is no such adapter.
        """
        self._find([name])
        with self._key.lock:
            del self._adapters[name]
            self._seen.forget_unused(self._adapters.values())

    def close(self) -> None:
        """Drops all adapters and takes the hooks out of the model."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._adapters.clear()
        self._seen.forget_unused(())
        self._closed = True

    def use(self, names: str | Sequence[str]) -> "Block":
        """Within this block, and this thread, the model computes with adapters.

        It is for `with`, each time anew, or to decorate a function, but not a generator or a
        coroutine; a call alone changes nothing, and a warning says so.

        Where heads of different width share a batch, outputs are padded with -inf on the right: a
        softmax or an argmax is what it would be without. An adapter without a head has the
        model's. Of nested blocks the innermost counts.

        Args:
            names: one for whatever is computed; or a list with one for each row of a batch.
                Any order will do, but rows of one adapter are fastest next to each other.

        Raises:
            ValueError: there is no such adapter, names are empty, are not strings or have no order
                (a set), or the bank is closed; modules or weights are others than when the adapter
                was added; or it is within a block of another bank. From the model: it is given
                another number of rows than names, or one of its layers an input in which rows
                cannot be told; or hooks have offloaded a bias that a gain (DoRA's) leaves out.
        """
        return Block(partial(self._using, names))

    @contextmanager
    def _using(self, names: str | Sequence[str]) -> Iterator[None]:
        self._check_open()
        if isinstance(names, str):
            routing = Routing(self._key, self._find([names]))
        else:
            of_rows = as_names("names", names, "an adapter's name, or a list of one for each row")
            if not of_rows:
                raise ValueError(f"no adapter is named; there are {self._listed()}")
            segments = [(name, len(list(rows))) for name, rows in groupby(of_rows)]
            adapters = self._find([name for name, _ in segments])
            routing = Routing(self._key, adapters, slices([count for _, count in segments]))
        self._seen.check(routing.adapters)
        with routed(routing), self._key.in_use():
            yield

    def _find(self, names: Sequence[str]) -> tuple[PreparedAdapter, ...]:
        for name in names:
            if not isinstance(name, str) or name not in self._adapters:
                asked = f"'{name}'" if isinstance(name, str) else shown(name)
                found = f", only {self._listed()}" if self._adapters else ": the bank is empty"
                raise ValueError(f"there is no adapter {asked}{found}")
        return tuple(self._adapters[name] for name in names)

    def _listed(self) -> str:
        return in_short(self._adapters) or "none"

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the bank is closed: make another for the model")


# ---- blocks ----


class Block(ContextDecorator):
    """What `AdapterBank.use` returns: a block that acts under `with` alone.

    Args:
        make: the block, for each time that it is entered.
    """

    _is_used = True  # until it is made: Dynamo has objects that never are
    _block: AbstractContextManager[None] | None = None

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make, self._is_used = make, False

    def __enter__(self) -> None:
        if self._is_used:
            raise ValueError("such a block is entered once: call use again")
        self._is_used = True
        self._block = self._make()
        self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        if self._block is None:
            raise RuntimeError("the block was not entered")
        return self._block.__exit__(*error)

    def _recreate_cm(self) -> "Block":
        return Block(self._make)  # a decorated function's, for each call

    def __call__(self, func: Any) -> Any:
        """The function, which computes with the adapters.

        Raises:
            ValueError: it is a generator or a coroutine, whose body runs after its call.
        """
        self._is_used = True
        if any(is_kind(func) for is_kind in _RUN_LATER):
            raise ValueError(
                f"{getattr(func, '__name__', 'the function')} is a generator or a coroutine, "
                "which computes after its call: write `with bank.use(…):` inside it"
            )
        return super().__call__(func)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An argument, because this module's names may be gone when the interpreter ends.
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


# ---- hooks ----

_IN_THREADS = (
    "nn.DataParallel computes in its own threads, which a bank's blocks do not reach: give the "
    "bank the wrapped model, and call that on one device"
)


class _Key:
    """What tells a bank's hooks and blocks from another's; it counts the blocks in progress."""

    def __init__(self) -> None:
        # One thread may take it twice: a block ends wherever its generator is collected.
        self.lock, self.blocks = threading.RLock(), 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Key":
        return _Key()  # a copied model's hooks are of no bank

    def __reduce__(self) -> tuple[Any, ...]:
        return _Key, ()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Counts a block."""
        with self.lock:
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1


def _like(model: nn.Module, modules: Collection[str]) -> list[str]:
    """These modules, and those of the same name in owners of the same class, such as other layers.

    Dynamo does not look at hooks before it runs what it has compiled (its
    ``skip_nnmodule_hook_guards``): a layer without them would be computed for one with them.
    """
    meant = {_kind_of_place(model, name) for name in modules}
    like = (name for name, _ in model.named_modules() if _kind_of_place(model, name) in meant)
    return list(dict.fromkeys([*modules, *like]))


def _kind_of_place(model: nn.Module, name: str) -> tuple[type[nn.Module], str]:
    owner, _, last = name.rpartition(".")
    return type(model.get_submodule(owner)), last


@dataclass(frozen=True)
class _Hook:
    """A forward hook on one of a model's modules.

    A copy of the model has a copy of the key, which no routing has: its hooks never act. Where
    torch.ao puts quantized modules in the place of others, these call them without keywords.

    Args:
        key: its bank's.
        module: the module's name.
        act: what it does within that bank's blocks.
    """

    key: _Key
    module: str
    act: Callable[..., Tensor]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, out: Tensor | None = None
    ) -> Tensor | None:
        routing = in_effect()
        if routing is None or routing.key is not self.key:
            if self.key.blocks and "_is_replica" in vars(module):
                raise ValueError(_IN_THREADS)
            return out
        if isinstance(module, LoRALayer) and module.r > 0:
            raise ValueError(f"{self.module} has been given LoRA since: remove_lora first")
        return self.act(self.module, routing, args, kwargs, out)


def _add_deltas(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Tensor:
    """Adds each adapter's delta to its rows, in place: nothing else uses such a layer's output.

    Of positions, every segment of rows has an output of its own: (n, …) -> (segments, n, …).
    """
    deltas = [adapter.deltas.get(module) for adapter in routing.adapters]
    if routing.positions:
        deltas = [delta if delta and delta.positions else None for delta in deltas]
    if not any(deltas):
        return out
    (x,) = (*args, *kwargs.values())
    if x.is_nested:
        raise ValueError(
            f"{module} is given a nested tensor, which a bank cannot add to: turn "
            "use_nested_tensor of the model's nn.TransformerEncoder off"
        )
    if any(module in adapter.tokens_first for adapter in routing.adapters):
        _check_told(module, routing, x)
    if routing.positions:
        x, out = (tensor.expand(len(deltas), *tensor.shape) for tensor in (x, out))
    out = out.contiguous()
    if out.requires_grad and any(d and is_quantized_linear(d.module) for d in deltas):
        out = out.clone()  # a package's own function may forbid what is in place
    # An embedding's input has no columns, and may be one row number.
    x, added_to = (x[None], out[None]) if x.dim() == 0 else (x, out)
    tokens = x if x.is_floating_point() else x.unsqueeze(-1)
    for delta, part in zip(deltas, routing.parts(tokens), strict=True):
        if delta is not None:
            delta.add_to(added_to[part], x[part])
    return out


def _check_told(module: str, routing: Routing, x: Tensor) -> None:
    """Checks that rows are not as many as tokens, where these may be the first dimension."""
    if routing.rows is not None and x.dim() > 2 and len(x) == x.shape[1] == routing.rows[-1].stop:
        raise ValueError(
            f"{module} is given as many tokens as rows, near an nn.MultiheadAttention without "
            "batch_first, so their order is ambiguous: name one adapter for all"
        )


def _apply_heads(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Tensor:
    """Gives each adapter's rows to its own head; those of adapters without one have `out`.

    What else a head is given is the same for all rows.
    """
    heads = [adapter.heads.get(module) for adapter in routing.adapters]
    x, *others = (*args, *kwargs.values())
    parts = routing.parts(x)
    if len(parts) == 1:
        return out if heads[0] is None else heads[0](*args, **kwargs)
    if any(isinstance(other, Tensor) for other in others):
        raise ValueError(f"{module} is given several tensors: use one adapter at a time")
    of_each = list(zip(heads, parts, strict=True))  # an open zip with strict breaks Dynamo's graphs
    outputs = [
        out[part] if head is None else _called_with(head, x[part], args, kwargs)
        for head, part in of_each
    ]
    widest = max(output.shape[-1] for output in outputs)
    padding = [(0, widest - output.shape[-1]) for output in outputs]
    return torch.cat(
        [F.pad(*part, value=float("-inf")) for part in zip(outputs, padding, strict=True)]
    )


def _called_with(
    head: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """A head's output with another first argument."""
    if args:
        return head(x, *args[1:], **kwargs)
    first, *_ = kwargs
    return head(**{**kwargs, first: x})
