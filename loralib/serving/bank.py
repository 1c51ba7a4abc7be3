"""Many tasks, one base: several LoRA adapters beside one model, each used at will.

    bank = lora.AdapterBank(model)
    bank.add("rte", read_adapter("rte.safetensors"))
    bank.add("mnli", read_adapter("mnli.safetensors"))

    with bank.use("rte"):
        model(**batch)
    with bank.use(["rte", "mnli", "rte"]):  # a batch of three rows
        model(**batch)

The base is computed once, for the whole batch; an adapter costs two thin products in each module
that it updates, and its head. Nothing of the model is changed: updates and heads are applied by
forward hooks, which act within `use` alone. Which rows are whose is the business of routing.py.
"""

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..adapters.adapter import LORA, Adapter
from ..adapters.checks import check_base, check_finite
from ..adapters.deltas import Delta, adapted_modules
from ..adapters.families import in_known_backbone
from ..adapters.fingerprint import fingerprint
from ..adapters.loading import lora_layers
from ..errors import CheckpointError, NeedsMergingError
from ..nn.routing import Routing, in_effect, routed, slices

logger = logging.getLogger(__name__)


class AdapterBank:
    """LoRA adapters beside one model, for inference.

    Args:
        model: a plain model, on the device and in the dtype that it will have.

    Rows of a batch are the first dimension of what its layers are given, or their tokens are packed
    (packing.py). Outside of `use` the model computes as it did before. Its parameters, buffers and
    the names in its state dict stay as they are at all times, and a copy of the model is a plain
    model. Two banks may stand beside one model; blocks of theirs cannot be nested.

    Raises:
        ValueError: the model has LoRA layers.
    """

    def __init__(self, model: nn.Module):
        for name in lora_layers(model):
            raise ValueError(
                f"{name} has an update of its own: build the model without LoRA, or merge it"
            )
        self._model = model
        self._key = object()
        self._fingerprint = _fingerprint_of(model)
        self._adapters: dict[str, _Loaded] = {}
        self._hooks: dict[_Hook, RemovableHandle] = {}
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters there are, in the order in which they were added."""
        return tuple(self._adapters)

    def labels(self, name: str) -> tuple[str, ...]:
        """What the outputs of an adapter's head stand for.

        Its info says it, or else they are ``LABEL_0``, …; () if the adapter brings no head.

        Raises:
            ValueError: there is no such adapter.
        """
        return self._find([name])[0].labels

    def add(self, name: str, adapter: Adapter) -> None:
        """Takes an adapter in, or raises and leaves everything as it was.

        What it holds beside updates is its head: whole modules at the model's top, such as
        ``classifier``. The model's last projection may have another number of outputs there.

        Args:
            name: what it is called in `use`.
            adapter: what `read_adapter` read. Where it has a fingerprint of the base that it was
                trained on, the model has to be that one. An adapter without, or a model in float16,
                is taken on trust, with a warning.

        Raises:
            ValueError: there is one of this name, or the bank is closed.
            CheckpointError: it is not LoRA alone, or does not fit the model.
        """
        self._check_open()
        if name in self._adapters:
            raise ValueError(f"there is an adapter '{name}' already, among {self._listed()}")
        loaded = _load(self._model, adapter, self._fingerprint)
        hooks = [_Hook(self._key, module, _add_updates) for module in loaded.updates]
        hooks += [_Hook(self._key, module, _apply_heads) for module in loaded.heads]
        for hook in hooks:
            if hook not in self._hooks:
                module = self._model.get_submodule(hook.module)
                self._hooks[hook] = module.register_forward_hook(hook)
        self._adapters[name] = loaded

    def remove(self, name: str) -> None:
        """Drops an adapter; blocks that use it go on with it.

        Raises:
            ValueError: there is no such adapter.
        """
        self._find([name])
        del self._adapters[name]

    def close(self) -> None:
        """Drops all adapters and takes the hooks out of the model."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._adapters.clear()
        self._closed = True

    @contextmanager
    def use(self, names: str | Sequence[str]) -> Iterator[None]:
        """Within this block, and this thread, the model computes with adapters.

        Where heads of different width share a batch, outputs are padded with -inf on the right: a
        softmax or an argmax is what it would be without. An adapter without a head has the
        model's. Of nested blocks the innermost counts.

        Args:
            names: one for whatever is computed; or a sequence with one for each row of a batch.
                Any order will do, but rows of one adapter are fastest beside each other.

        Raises:
            ValueError: there is no such adapter, names are empty, or the bank is closed; or it is
                within a block of another bank. From the model: it is given another number of rows
                than names, or one of its layers an input in which rows cannot be told.
        """
        self._check_open()
        if isinstance(names, str):
            routing = Routing(self._key, self._find([names]))
        elif names:
            runs = [(name, len(list(rows))) for name, rows in groupby(names)]
            adapters = self._find([name for name, _ in runs])
            routing = Routing(self._key, adapters, slices([count for _, count in runs]))
        else:
            raise ValueError(f"no adapter is named; there are {self._listed()}")
        with routed(routing):
            yield

    def _find(self, names: Sequence[str]) -> tuple["_Loaded", ...]:
        for name in names:
            if name not in self._adapters:
                raise ValueError(f"there is no adapter '{name}', only {self._listed()}")
        return tuple(self._adapters[name] for name in names)

    def _listed(self) -> str:
        return ", ".join(self._adapters) or "none"

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the bank is closed: make another for the model")


# ---- an adapter, ready for use ----


class _DeviceDelta:
    """A delta on its module's device.

    Args:
        delta: as the adapter holds it.
        device: the module's.
        positions: whether it reaches positions that the module projects as well.
    """

    def __init__(self, delta: Delta, device: torch.device, positions: bool):
        self.positions = positions
        wide = torch.promote_types(delta.A.dtype, torch.float32)
        # A copy, because a file's tensors are mapped from it, and others' may be written to.
        self._delta = delta.to(device, wide, copy=True)
        self._cast: dict[torch.dtype, Delta] = {}

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += s · B A x, in place; x (…, in), out (…, out_features), contiguous."""
        x = x.reshape(-1, x.shape[-1]).to(out.dtype)
        self._in(out.dtype).add_to(out.view(-1, out.shape[-1]), x)

    def _in(self, dtype: torch.dtype) -> Delta:
        """The delta, cast once for each dtype that is asked for."""
        if dtype not in self._cast:
            with torch.inference_mode(False):
                self._cast[dtype] = self._delta.to(dtype)
        return self._cast[dtype]


@dataclass(frozen=True)
class _Loaded:
    """What an adapter does to a model.

    Args:
        updates: by the name of the module that each belongs to.
        heads: modules that take the place of the model's, by name.
        labels: what the head's outputs stand for; () without a head.
    """

    updates: Mapping[str, _DeviceDelta]
    heads: Mapping[str, nn.Module]
    labels: tuple[str, ...]


def _fingerprint_of(model: nn.Module) -> str | None:
    """The fingerprint of a model's backbone; None of one that is not known, or is in float16.

    (In float16 a weight is rounded, and has another fingerprint than where it came from.) For one
    that is not known see `_possible_fingerprints`.
    """
    state = model.state_dict()
    of_backbone = [state[name].dtype for name in state if in_known_backbone(name)]
    if not of_backbone or torch.float16 in of_backbone:
        return None
    return fingerprint(state)


@torch.inference_mode(False)
@torch.no_grad()
def _load(model: nn.Module, adapter: Adapter, base_fingerprint: str | None) -> _Loaded:
    """Checks an adapter against a model and copies its tensors to where they are needed."""
    if adapter.kind is not LORA:
        raise CheckpointError(
            f"{adapter.source}: holds {adapter.kind.name} weights, a bank takes LoRA's; give them "
            f"to a model of their own ({adapter.kind.switch})"
        )
    modules = adapted_modules(model, adapter)
    _check_called(model, modules, adapter.source)
    _check_info(adapter)
    tensors = _head_tensors(adapter, modules)
    _check_base(model, adapter, base_fingerprint, modules, tensors)
    check_finite(adapter)
    last = _last_projection(model)
    heads = {
        top: _head(model, top, tensors, last, adapter.source)
        for top in sorted({name.partition(".")[0] for name in tensors})
    }
    positions = adapter.metadata.positions is not False
    low_rank = {
        name: _DeviceDelta(update, module.weight.device, positions)
        for name, (module, update) in modules.items()
    }
    return _Loaded(low_rank, heads, _labels(adapter, tensors.get(f"{last}.weight")))


def _check_called(model: nn.Module, modules: Collection[str], source: str) -> None:
    """Refuses modules of which only the weight is used: no hook would see their input."""
    for name in modules:
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise NeedsMergingError(
                source, f"updates {name}, which nn.MultiheadAttention never calls"
            )


def _check_info(adapter: Adapter) -> None:
    source, info = adapter.source, adapter.metadata
    if info.bias != "none":
        raise NeedsMergingError(source, "brings biases of its own")
    if info.trained_with:
        switches = ", ".join(info.trained_with)
        raise NeedsMergingError(source, f"was trained with {switches} as well")


def _check_base(
    model: nn.Module,
    adapter: Adapter,
    base_fingerprint: str | None,
    updated: Collection[str],
    head: Collection[str],
) -> None:
    """Refuses an adapter of another base, and says where that cannot be known."""
    theirs = adapter.metadata.base_fingerprint
    ours = [base_fingerprint] if base_fingerprint else _possible_fingerprints(model, updated, head)
    if not theirs:
        logger.warning("%s does not say its base's weights: taken on trust", adapter.source)
    elif not ours:
        logger.warning("%s: a model in float16 cannot be compared: taken on trust", adapter.source)
    elif theirs not in ours:
        check_base(adapter, ours[0])


def _possible_fingerprints(
    model: nn.Module, updated: Collection[str], head: Collection[str]
) -> list[str]:
    """What fingerprints a model of a family that is not known may have; none in float16.

    Its names do not tell backbone from head. The backbone is all but the head: what an adapter
    brings (by its tensors' names), and the last projection. Or it is the top modules that hold what
    the adapter updates; or the whole model.
    """
    state = model.state_dict()
    if any(tensor.dtype == torch.float16 for tensor in state.values()):
        return []
    tops = {name.partition(".")[0] for name in updated}
    heads = {name.partition(".")[0] for name in (*head, _last_projection(model))} - tops
    parts = [
        {name for name in state if name.partition(".")[0] not in heads},
        {name for name in state if name.partition(".")[0] in tops},
        set(state),
    ]
    found = [fingerprint({name: state[name] for name in names}) for names in parts]
    return [each for each in found if each != fingerprint({})]


def _head_tensors(adapter: Adapter, updated: Collection[str]) -> dict[str, Tensor]:
    """An adapter's tensors that are no updates.

    Raises:
        CheckpointError: one of them is the backbone's, or an update is to the head itself.
    """
    pairs = {f"{module}.{half}" for module in updated for half in ("lora_A", "lora_B")}
    rest = {name: tensor for name, tensor in adapter.tensors.items() if name not in pairs}
    for name in rest:
        if LORA.part in name or in_known_backbone(name):
            raise NeedsMergingError(adapter.source, f"{name} is neither an update nor a head's")
    tops = {name.partition(".")[0] for name in rest}
    for module in updated:
        if module.partition(".")[0] in tops:
            raise NeedsMergingError(adapter.source, f"updates {module}, and brings that as a head")
    return rest


def _last_projection(model: nn.Module) -> str:
    """The name of a model's last linear layer: in a classifier, the one that makes the logits."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return names[-1] if names else ""


def _head(
    model: nn.Module, top: str, tensors: Mapping[str, Tensor], last: str, source: str
) -> nn.Module:
    """A copy of one of the model's top modules with an adapter's tensors, in evaluation mode.

    Args:
        model: the model.
        top: the module's name.
        tensors: the adapter's, all that belong to a head.
        last: name of the linear layer that may have another number of outputs than the model's.
        source: what messages call the adapter.

    Raises:
        CheckpointError: they are not the module's tensors, or of other shapes.
    """
    module = dict(model.named_children()).get(top)
    if module is None:
        raise CheckpointError(f"{source}: the model has no '{top}' to take a head's tensors")
    start = f"{top}."
    theirs = {name: t for name, t in tensors.items() if f"{name}.".startswith(start)}
    ours = module.state_dict(prefix=start).keys()
    for what, names in (
        ("lacks", ours - theirs.keys()),
        ("has, unknown to the model,", theirs.keys() - ours),
    ):
        if names:
            raise CheckpointError(f"{source}: {what} {min(names)} in the head that it brings")
    head = copy.deepcopy(module).eval()
    weight = theirs.get(f"{last}.weight")
    if weight is not None and weight.dim() == 2 and weight.numel():
        _set_outputs(head.get_submodule(last.removeprefix(top).removeprefix(".")), len(weight))
    for name, needed in head.state_dict(prefix=start).items():
        if theirs[name].shape != needed.shape:
            raise CheckpointError(
                f"{source}: {name} is {tuple(theirs[name].shape)} in the file, "
                f"{tuple(needed.shape)} is needed"
            )
    head.load_state_dict({name.removeprefix(start): tensor for name, tensor in theirs.items()})
    return head.requires_grad_(False)


def _set_outputs(layer: nn.Linear, outputs: int) -> None:
    """Gives a linear layer another number of outputs; weight and bias are left to be filled."""
    layer.out_features = outputs
    layer.weight = nn.Parameter(layer.weight.new_empty(outputs, layer.in_features))
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.new_empty(outputs))


def _labels(adapter: Adapter, projection: Tensor | None) -> tuple[str, ...]:
    """The names of a head's outputs; `projection` is its last weight, None without a head."""
    if projection is None:
        return ()
    outputs = len(projection)
    labels = adapter.metadata.labels or tuple(f"LABEL_{index}" for index in range(outputs))
    if len(labels) != outputs:
        raise CheckpointError(
            f"{adapter.source}: names {len(labels)} labels, its head has {outputs} outputs"
        )
    return labels


# ---- hooks ----


@dataclass(frozen=True)
class _Hook:
    """A forward hook on one of a model's modules.

    A copy has a copy of the key, which no routing has: it never acts.

    Args:
        key: its bank's.
        module: the module's name.
        act: what it does within that bank's blocks.
    """

    key: object
    module: str
    act: Callable[[str, Routing, Tensor, Tensor], Tensor]

    def __call__(self, module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        routing = in_effect()
        if routing is None or routing.key is not self.key:
            return out
        return self.act(self.module, routing, *args, out)


def _add_updates(module: str, routing: Routing, x: Tensor, out: Tensor) -> Tensor:
    """Adds each adapter's update to its rows, in place: a linear layer's output is nobody else's.

    Of positions, every run of rows has an output of its own: (n, …) -> (runs, n, …).
    """
    updates = [adapter.updates.get(module) for adapter in routing.adapters]
    if routing.positions:
        updates = [update if update and update.positions else None for update in updates]
    if not any(updates):
        return out
    if routing.positions and routing.rows is not None:
        x, out = (tensor.expand(len(updates), *tensor.shape) for tensor in (x, out))
    out = out.contiguous()
    for update, part in zip(updates, routing.parts(x), strict=True):
        if update is not None:
            update.add_to(out[part], x[part])
    return out


def _apply_heads(module: str, routing: Routing, x: Tensor, out: Tensor) -> Tensor:
    """Gives each adapter's rows to its own head; those of adapters without one have `out`."""
    heads = [adapter.heads.get(module) for adapter in routing.adapters]
    parts = zip(heads, routing.parts(x), strict=True)
    outputs = [out[part] if head is None else head(x[part]) for head, part in parts]
    if len(outputs) == 1:
        return outputs[0]
    widest = max(output.shape[-1] for output in outputs)
    padding = [(0, widest - output.shape[-1]) for output in outputs]
    return torch.cat(
        [F.pad(*part, value=float("-inf")) for part in zip(outputs, padding, strict=True)]
    )
