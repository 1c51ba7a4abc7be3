"""Prepares an adapter for a bank: checks it against the model, and copies it to the devices."""

import copy
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..adapters.adapted_weights import AdaptedWeight, adapted_modules
from ..adapters.adapter import LORA, Adapter
from ..adapters.checks import check_possible_base
from ..adapters.deltas import PARTS, lora_pairs
from ..adapters.families import in_known_backbone, top_module
from ..adapters.fingerprint import last_projection, possible_fingerprints
from ..adapters.metadata import default_labels
from ..adapters.validation import check_finite
from ..bypassed import read_from_outside
from ..errors import CheckpointError, NeedsMergingError
from ..layer_kinds import computes_like, scales_rows, unknown_layout
from ..model_checks import check_there, tensors_of
from ..quantized_layers import is_quantized_linear
from ..stacks import stack_of_layer
from .device_deltas import DeviceDelta, device_delta


@dataclass(frozen=True)
class PreparedAdapter:
    """What an adapter does to a model.

    Args:
        deltas: the deltas, by the names of their modules.
        heads: modules that take the place of the model's, by name.
        labels: what the head's outputs stand for; () without a head.
        tokens_first: the modules of `deltas` whose input may be (tokens, rows, …).
    """

    deltas: Mapping[str, DeviceDelta]
    heads: Mapping[str, nn.Module]
    labels: tuple[str, ...]
    tokens_first: frozenset[str]


@torch.inference_mode(False)
@torch.no_grad()
def prepare(model: nn.Module, adapter: Adapter) -> PreparedAdapter:
    """Checks an adapter against a model, and copies its tensors to its modules' devices."""
    if adapter.kind != LORA:
        raise CheckpointError(
            f"{adapter.source}: holds {adapter.kind.name} weights, but a bank takes only LoRA: "
            f"build a separate model with them ({adapter.kind.switch})"
        )
    modules = adapted_modules(model, adapter)
    _check_called(modules, model, adapter.source)
    _check_metadata(adapter)
    tensors = _head_tensors(adapter)
    check_there(tensors_of(model, tensors), "it gets an adapter")
    check_possible_base(adapter, possible_fingerprints(model, modules, tensors))
    check_finite(adapter)
    last = last_projection(model)
    heads = _heads(model, tensors, last, adapter.source)
    positions = adapter.lora.positions is not False
    deltas = {name: device_delta(name, adapted, positions) for name, adapted in modules.items()}
    labels = _labels(adapter, tensors.get(f"{last}.weight"))
    return PreparedAdapter(deltas, heads, labels, _with_tokens_first(model, modules))


def _check_called(modules: Mapping[str, AdaptedWeight], model: nn.Module, source: str) -> None:
    """Refuses modules that a hook cannot adapt.

    A hook sees the input and output of calls. It cannot adapt what is never called, what has more
    in its output than the product with its weight, or what computes that in its own way.
    """
    for name, adapted in modules.items():
        module, has_magnitude = adapted.module, adapted.delta.has_magnitude
        if adapted.is_stack:
            what = stack_of_layer(name)
            raise NeedsMergingError(source, f"adapts {what}, a stack of matrices, not a module")
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.MultiheadAttention):
            raise NeedsMergingError(
                source, f"adapts {name}, which nn.MultiheadAttention never calls"
            )
        if isinstance(module, nn.MultiheadAttention):
            raise NeedsMergingError(
                source, f"adapts projections inside {name}, an nn.MultiheadAttention"
            )
        if is_quantized_linear(module) and has_magnitude:
            raise CheckpointError(
                f"{source}: has DoRA on {name}, which needs the weight, but that is quantized: "
                "load the base in float16 or bfloat16"
            )
        reason = unknown_layout(module, adapted.weight)
        if reason and has_magnitude:
            raise CheckpointError(f"{source}: has DoRA on {name}, {reason}")
        kind = type(module)
        for plain in (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d):
            is_other = issubclass(kind, plain) and not computes_like(kind, plain)
            if is_other and not scales_rows(module):
                raise NeedsMergingError(
                    source, f"adapts {name}, a {kind.__name__}, which computes in its own way"
                )


def _check_metadata(adapter: Adapter) -> None:
    source, metadata = adapter.source, adapter.lora
    if metadata.bias != "none":
        raise NeedsMergingError(source, "brings biases of its own")
    if metadata.trained_with:
        switches = ", ".join(metadata.trained_with)
        raise NeedsMergingError(source, f"was trained with {switches} as well")


def _head_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Returns an adapter's tensors that belong to its head.

    Raises:
        CheckpointError: a tensor besides LoRA belongs to the backbone, or the head itself has LoRA.
    """
    adapted = lora_pairs(adapter.tensors, adapter.source)
    parts = {f"{module}.{part}" for module in adapted for part in PARTS}
    rest = {name: tensor for name, tensor in adapter.tensors.items() if name not in parts}
    for name in rest:
        if LORA.part in name or in_known_backbone(name):
            raise NeedsMergingError(adapter.source, f"{name} belongs neither to LoRA nor to a head")
    tops = {top_module(module) for module in adapted}
    for name in rest:
        if top_module(name) in tops:
            raise NeedsMergingError(
                adapter.source,
                f"has LoRA in {top_module(name)} and also the full tensor {name}: a bank takes "
                "full tensors only for whole top-level modules without LoRA, such as a head",
            )
    return rest


def _heads(
    model: nn.Module, tensors: Mapping[str, Tensor], last: str, source: str
) -> dict[str, nn.Module]:
    """Returns the modules that take the place of the model's; arguments as for `_head`.

    Raises:
        CheckpointError: the model would not compute with them alone, or does not have such modules.
    """
    heads = dict[str, nn.Module]()
    for top in sorted({top_module(name) for name in tensors}):
        heads |= _called(top, _head(model, top, tensors, last, source), source)
    for head in heads:
        for name, reader in read_from_outside(model, head).items():
            what = f"trains {name}, whose parameters the source of {reader} reads directly"
            raise NeedsMergingError(source, what)
        for name in _shared(model, head, tensors):
            what = f"trains {name}, which the model also has outside of {head}"
            raise NeedsMergingError(source, what)
    return heads


def _head(
    model: nn.Module, top: str, tensors: Mapping[str, Tensor], last: str, source: str
) -> nn.Module:
    """Returns a copy of one of the model's top modules with an adapter's tensors, in eval mode.

    Args:
        model: the model.
        top: the module's name.
        tensors: all tensors of the adapter that belong to a head.
        last: the name of the linear layer that may have another number of outputs than the model's.
        source: what messages call the adapter.

    Raises:
        CheckpointError: the tensors are not the module's, or have other shapes.
    """
    module = dict(model.named_modules()).get(top)
    if top in model._parameters:
        raise NeedsMergingError(source, f"trains {top}, a parameter of the model itself")
    if module is None:
        raise CheckpointError(
            f"{source}: the model has no '{top}', to which the adapter's head belongs"
        )
    start = f"{top}."
    theirs = {name: t for name, t in tensors.items() if f"{name}.".startswith(start)}
    kept = _kept(model, top, theirs.keys(), source)
    head = copy.deepcopy(module, {**kept}).eval()  # which takes those for copied already
    weight = theirs.get(f"{last}.weight")
    if weight is not None and weight.dim() == 2 and weight.numel():
        projection = head.get_submodule(last.removeprefix(top).removeprefix("."))
        assert isinstance(projection, nn.Linear)  # see `last_projection`
        if len(weight) != projection.out_features:  # otherwise its bias may be tied to another
            _set_outputs(projection, len(weight))
    copied = head.state_dict(prefix=start)
    for name, tensor in theirs.items():
        if tensor.shape != copied[name].shape:
            raise CheckpointError(
                f"{source}: {name} is {tuple(tensor.shape)} in the file, but "
                f"{tuple(copied[name].shape)} is needed"
            )
    head.load_state_dict({n.removeprefix(start): t for n, t in theirs.items()}, strict=False)
    for parameter in head.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)
    return head


def _kept(model: nn.Module, top: str, theirs: Set[str], source: str) -> dict[int, Tensor]:
    """Checks that a head brings its tensors; returns those of the base that it keeps, by id.

    A file may lack a tensor that is tied to another, as a projection to the vocabulary may be. If
    the other is outside of the head, the head keeps the base's.
    """
    start = f"{top}."
    ours = model.get_submodule(top).state_dict(prefix=start).keys()
    state = model.state_dict(keep_vars=True)
    brought = {id(state[name]) for name in theirs & ours}
    of_others = {id(t): t for name, t in state.items() if not name.startswith(start)}
    tied = {name for name in ours if id(state[name]) in of_others.keys() | brought}
    for what, names, which in (
        ("lacks", ours - theirs - tied, "which the model's head has"),
        ("has", theirs - ours, "which the model's head lacks"),
    ):
        if names:
            raise CheckpointError(f"{source}: its head {what} {min(names)}, {which}")
    return {key: tensor for key, tensor in of_others.items() if key not in brought}


def _called(name: str, head: nn.Module, source: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a head that can be called, by name.

    These are the head itself, or the modules of an `nn.ModuleList` and others without a forward.

    Raises:
        NeedsMergingError: a module without a forward has parameters, as an `nn.ParameterList` has.
    """
    if type(head).forward is not nn.Module.forward:
        yield name, head
        return
    if head._parameters:
        raise NeedsMergingError(source, f"trains {name}, which is never called")
    for last, part in head.named_children():
        if part.state_dict():
            yield from _called(f"{name}.{last}", part, source)


def _shared(model: nn.Module, head: str, tensors: Collection[str]) -> list[str]:
    """Returns the modules in a head, with some of these tensors, that are also in other modules.

    A call of these there would be that of the model's own, because the head alone is replaced.
    """
    whole = model.get_submodule(head)
    outside = [model]
    seen = {model, whole}
    for module in outside:
        new = [child for child in module.children() if child not in seen]
        outside += new
        seen.update(new)
    brought = {name.rpartition(".")[0] for name in tensors}
    inner = whole.named_modules(prefix=head)
    return [name for name, part in inner if part is not whole and part in seen and name in brought]


def _set_outputs(layer: nn.Linear, outputs: int) -> None:
    """Gives a linear layer another number of outputs; weight and bias are left uninitialized."""
    layer.out_features = outputs
    layer.weight = nn.Parameter(layer.weight.new_empty(outputs, layer.in_features))
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.new_empty(outputs))


def _labels(adapter: Adapter, projection: Tensor | None) -> tuple[str, ...]:
    """Returns the names of a head's outputs; `projection`, its last weight, is None without one."""
    if projection is None:
        return ()
    outputs = len(projection)
    labels = adapter.lora.labels or default_labels(outputs)
    if len(labels) != outputs:
        raise CheckpointError(
            f"{adapter.source}: names {len(labels)} labels, but its head has {outputs} outputs"
        )
    return labels


def _with_tokens_first(model: nn.Module, adapted: Collection[str]) -> frozenset[str]:
    """Returns those modules that are in the same block as a PyTorch attention without batch_first.

    Their input may have tokens in its first dimension, as such an attention's has.
    """
    blocks = {
        name.rpartition(".")[0]
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first
    }
    return frozenset(
        name
        for name in adapted
        if any(not block or name.startswith(f"{block}.") for block in blocks)
    )
