"""Computes one model with several LoRA adapters, chosen for each batch or for each of its rows.

    bank = lora.AdapterBank(model)
    bank.add("rte", read_adapter("rte.safetensors"))
    bank.add("mnli", read_adapter("mnli.safetensors"))

    with bank.use("rte"):
        model(**batch)
    with bank.use(["rte", "mnli", "rte"]):  # a batch of three rows
        model(**batch)

The base is computed once for the whole batch. An adapter costs two thin products in each module
that it adapts, and its head. The model itself is not changed: forward hooks apply the deltas and
heads, and only within `use`. routing.py tells which rows are computed with which adapter.
"""

import copy
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ..adapters.adapter import Adapter
from ..arguments import as_names, check_model, check_not_scripted
from ..lora_layer import LoRALayer, lora_layers
from ..model_checks import check_whole
from ..nn.routing import Routing, forget_inputs, in_effect, note_inputs, routed, slices
from ..quantized_layers import check_unpacked, is_quantized_linear, keep_unpacked
from ..text import in_short, shown
from ..wrappers import has_own_forward, unwrapped, without_wrappers
from .prepared import PreparedAdapter, fingerprint_of, prepare
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
            raise ValueError(_IN_THREADS)
        check_whole(model, "it gets a bank")
        for name in lora_layers(unwrapped(model)):
            raise ValueError(f"{name} has LoRA already: build the model without LoRA, or merge it")
        check_unpacked(model)
        self._model = model
        self._key = _Key()
        keep_unpacked(model, for_good=True)  # once packed, the model could not have another bank
        self._fingerprint: str | None = None  # the model's, from when the first adapter is added
        self._adapters: dict[str, PreparedAdapter] = {}
        self._seen = ModelSnapshot()
        self._hooks: dict[_Hook | _KeepInputs, RemovableHandle] = {}
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
            raise ValueError(f"the bank already has an adapter '{name}' (it has {self._listed()})")
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
        """Gives hooks to all modules that an adapter changes, and to those of `_like`."""
        hooks = [_Hook(self._key, module, _add_deltas) for module in _like(model, prepared.deltas)]
        for act in (_apply_heads, _forget_inputs):
            hooks += [_Hook(self._key, module, act) for module in prepared.heads]
        parts = (part for module in prepared.heads for part in _parts_of(model, module))
        hooks += [_Hook(self._key, part, _check_within_head) for part in parts]
        modules = {hook: model.get_submodule(hook.module) for hook in hooks}
        new = [hook for hook in hooks if not self._has_hook(modules[hook], hook)]
        for hook in new:
            module = modules[hook]
            handle = module.register_forward_hook(
                hook, with_kwargs=True, always_call=hook.act is _forget_inputs
            )
            self._keep(hook, handle)
            if hook.act is _apply_heads:
                before = _KeepInputs(self._key, hook.module)
                handle = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                self._keep(before, handle)
        if new and "torch._dynamo" in sys.modules:
            # Code that was compiled before does not see hooks that were added later.
            torch.compiler.reset()

    def _keep(self, hook: "_Hook | _KeepInputs", handle: RemovableHandle) -> None:
        """Keeps a hook's handle, and takes the hook out of a module that has been replaced."""
        if hook in self._hooks:
            self._hooks[hook].remove()
        self._hooks[hook] = handle

    def _has_hook(self, module: nn.Module, hook: "_Hook") -> bool:
        """Returns whether a module has a hook.

        A module that has replaced another has none, or a copy of one, which never acts.
        """
        return hook in self._hooks and module._forward_hooks.get(self._hooks[hook].id) == hook

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
                in a layer's input; or hooks have offloaded a bias that DoRA's gain leaves as it is.
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
                raise ValueError(f"no adapter is named; the bank has {self._listed()}")
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
        if any(is_kind(func) for is_kind in _RUN_LATER):
            raise ValueError(
                f"{getattr(func, '__name__', 'the function')} is a generator or a coroutine, "
                "which computes after its call: write `with bank.use(…):` inside it"
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


# ---- hooks ----

_IN_THREADS = (
    "nn.DataParallel computes in its own threads, which a bank's blocks do not reach: give the "
    "bank the model inside it (its module), and call that on one device"
)


class _Key:
    """Identifies a bank's hooks and blocks, and counts the blocks in progress."""

    def __init__(self) -> None:
        # One thread may take the lock twice: a block ends wherever its generator is collected.
        self.lock, self.blocks = threading.RLock(), 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Key":
        return _Key()  # a copied model's hooks belong to no bank

    def __reduce__(self) -> tuple[Any, ...]:
        return _Key, ()

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


def _like(model: nn.Module, modules: Collection[str]) -> list[str]:
    """Returns these modules, and those of the same name in owners of the same class.

    The latter are, for example, the same modules of other layers. Dynamo does not check hooks
    before it runs compiled code (its ``skip_nnmodule_hook_guards``), so it could use the code of a
    layer without hooks for one with hooks.
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

    A copy of the model has another key, which no routing has, so its hooks never act. Quantized
    modules that torch.ao puts in place of others call their hooks without keyword arguments: then
    `kwargs` is the output.

    Args:
        key: the bank's key.
        module: the module's name.
        act: what the hook does within that bank's blocks.
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

    For positions, which all rows share, every segment of rows gets its own output:
    (n, …) -> (segments, n, …).
    """
    deltas = [adapter.deltas.get(module) for adapter in routing.adapters]
    if routing.positions:
        deltas = [delta if delta and delta.positions else None for delta in deltas]
    if not any(deltas):
        return out
    (x,) = (*args, *kwargs.values())
    if x.is_nested:
        raise ValueError(
            f"{module} is given a nested tensor, which a bank cannot add to: turn off "
            "use_nested_tensor in the model's nn.TransformerEncoder"
        )
    if any(module in adapter.tokens_first for adapter in routing.adapters):
        _check_told(module, routing, x)
    if routing.positions:
        x, out = (tensor.expand(len(deltas), *tensor.shape) for tensor in (x, out))
    out = out.contiguous()
    if out.requires_grad and any(d and is_quantized_linear(d.module) for d in deltas):
        out = out.clone()  # a package's own autograd function may forbid changes in place
    # An embedding's input has no features, and may be a single row number.
    x, added_to = (x[None], out[None]) if x.dim() == 0 else (x, out)
    tokens = x if x.is_floating_point() else x.unsqueeze(-1)
    for delta, part in zip(deltas, routing.parts(tokens), strict=True):
        if delta is not None:
            delta.add_to(added_to[part], x[part])
    return out


def _check_told(module: str, routing: Routing, x: Tensor) -> None:
    """Checks that rows and tokens differ in number if tokens may be the first dimension."""
    if routing.rows is not None and x.dim() > 2 and len(x) == x.shape[1] == routing.rows[-1].stop:
        raise ValueError(
            f"{module} is given as many tokens as rows, near an nn.MultiheadAttention without "
            "batch_first, so their order is ambiguous: name one adapter for all"
        )


# The fast path of the first three computes with the weights of the modules inside them, if these
# have no hooks. The last one is called wherever a parametrized weight is read, be it for its dtype.
_WITHOUT_HOOKS = (
    *(nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention),
    ParametrizationList,
)


def _parts_of(model: nn.Module, head: str) -> list[str]:
    """Returns the names of the modules in a head that have tensors, and that nothing else has."""
    places = model.named_modules(remove_duplicate=False)
    elsewhere = {module for name, module in places if not f"{name}.".startswith(f"{head}.")}
    found, inner = list[str](), [head]
    for name in inner:
        for last, part in model.get_submodule(name).named_children():
            if part in elsewhere or isinstance(part, _WITHOUT_HOOKS):
                continue
            inner.append(f"{name}.{last}")
            if part._parameters or part._buffers:
                found.append(inner[-1])
    return found


def _check_within_head(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    """Checks that a part of the model's head is not called by itself, without the head.

    Adapters have heads instead of the whole, which only a call of the whole computes.
    """
    for adapter in routing.adapters:
        for head in adapter.heads:
            if module.startswith(f"{head}.") and head not in routing.inputs:
                raise ValueError(
                    f"the model calls {module} by itself, and not {head} as a whole, which an "
                    "adapter replaces: load that adapter into a model of its own (load_adapter)"
                )
    return out


# Heads that never change their inputs, which may be large, and have no parts.
_PURE = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d}


@dataclass(frozen=True)
class _KeepInputs:
    """A hook before a head of the model's, which gives that a copy of its inputs.

    The adapters' heads are computed after it, with the inputs themselves. A head may change these:
    by an activation in place, or as those of sentence-transformers do, which write their result
    into the dict that they are given. Arguments as for `_Hook`.
    """

    key: _Key
    module: str

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None
    ) -> tuple[Any, Any] | None:
        routing = in_effect()
        if routing is None or routing.key is not self.key:
            return None
        if all(adapter.heads.get(self.module) is None for adapter in routing.adapters):
            return None
        is_alone = len(module._forward_pre_hooks) == 1
        if is_alone and type(module) in _PURE and not has_own_forward(module):
            return None
        note_inputs(routing, self.module, args, kwargs)
        return _copied(args), _copied(kwargs)


def _copied(inputs: Any) -> Any:
    """Returns a copy of tensors, and of mappings, lists and tuples with all that they hold."""
    if isinstance(inputs, Tensor):
        return inputs.clone()
    if type(inputs) in (list, tuple):
        return type(inputs)(map(_copied, inputs))
    if type(inputs) is dict:
        return {name: _copied(each) for name, each in inputs.items()}
    if isinstance(inputs, MutableMapping):
        copied = copy.copy(inputs)  # of its class, which may not be a dict's
        for name, each in inputs.items():
            copied[name] = _copied(each)
        return copied
    return inputs


def _apply_heads(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Tensor:
    """Computes each adapter's rows with its own head; rows of adapters without one keep `out`.

    A head's other arguments are the same for all rows.
    """
    heads = [adapter.heads.get(module) for adapter in routing.adapters]
    if module in routing.inputs:
        args, kwargs, _ = routing.inputs[module]
    given = (*args, *kwargs.values())
    x = next(iter(given), None)
    if len(routing.adapters) == 1:
        if isinstance(x, Tensor):
            routing.parts(x)  # checks the number of rows
        return out if heads[0] is None else heads[0](*args, **kwargs)
    if not isinstance(x, Tensor) or not isinstance(out, Tensor):
        kinds = {type(each).__name__: None for each in (x, out) if not isinstance(each, Tensor)}
        raise ValueError(
            f"{module} is given or returns a {next(iter(kinds))}, whose rows a bank cannot tell "
            "apart: use one adapter at a time"
        )
    if any(isinstance(other, Tensor) for other in given[1:]):
        raise ValueError(f"{module} is given several tensors: use one adapter at a time")
    parts = routing.parts(x)
    of_each = list(zip(heads, parts, strict=True))  # iterating a strict zip breaks Dynamo's graphs
    outputs = [
        out[part] if head is None else _called_with(head, x[part], args, kwargs)
        for head, part in of_each
    ]
    widest = max(output.shape[-1] for output in outputs)
    padding = [(0, widest - output.shape[-1]) for output in outputs]
    return torch.cat(
        [F.pad(*part, value=float("-inf")) for part in zip(outputs, padding, strict=True)]
    )


def _forget_inputs(
    module: str, routing: Routing, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    """Drops what `_KeepInputs` has kept, also if the head or another hook has raised an error."""
    forget_inputs(routing, module)
    return out


def _called_with(
    head: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Returns a head's output for another first argument."""
    if args:
        return head(x, *args[1:], **kwargs)
    first, *_ = kwargs
    return head(**{**kwargs, first: x})
