"""An adapter prepared for a bank: checked against the model, its tensors on the devices."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adaptation import computes_as, scales_rows
from ..adapted_layers import convolved_update, times_scale
from ..adapters.adapter import LORA, Adapter
from ..adapters.checks import check_finite, check_possible_base
from ..adapters.completeness import check_all_there
from ..adapters.deltas import PARTS, AdaptedWeight, adapted_modules, lora_pairs, out_in
from ..adapters.families import in_known_backbone, top_module
from ..adapters.fingerprint import (
    fingerprint,
    has_no_fingerprint,
    last_projection,
    possible_fingerprints,
    state_of,
)
from ..errors import CheckpointError, NeedsMergingError
from ..functional import Delta
from ..model_checks import check_there, tensors_of
from ..quantized_layers import is_quantized_linear
from ..stacks import stack_of_layer


class DeviceDelta:
    """A delta on its module's device, as a forward hook adds it to the module's output.

    Args:
        name: the module's.
        adapted: the delta, as the adapter holds it, and its module.
        positions: whether it reaches positions that the module projects as well.
    """

    def __init__(self, name: str, adapted: AdaptedWeight, positions: bool):
        self.name, self.positions = name, positions
        self.module: Any = adapted.module
        weight, wide = adapted.weight, torch.promote_types(adapted.delta.A.dtype, torch.float32)
        # A copy, because a file's tensors are mapped from it, and others' may be written to.
        moved = adapted.delta.to(weight.device, wide, copy=True)
        self._delta = moved.with_gain(out_in(adapted.module, weight))
        self._cast: dict[torch.dtype, Delta] = {}

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Changes `out`, contiguous, what the module gives for x, to what was trained."""
        raise NotImplementedError

    def _in(self, dtype: torch.dtype) -> Delta:
        """The delta, cast once for each dtype that is asked for."""
        if dtype not in self._cast:
            with torch.inference_mode(False):
                self._cast[dtype] = self._delta.to(dtype)
        return self._cast[dtype]

    def _bias_beside_gain(self) -> Tensor | None:
        """The module's bias, which a gain leaves as it is; None without a gain or a bias.

        Raises:
            ValueError: hooks have offloaded it by the time that a bank's hook is called.
        """
        bias = getattr(self.module, "bias", None) if self._delta.has_magnitude else None
        if bias is not None and bias.is_meta:
            check_there([(f"the bias of {self.name}", bias)], "a bank uses an adapter with DoRA")
        return bias


class LinearDelta(DeviceDelta):
    """Of a linear layer: x (…, in), out (…, out_features)."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """As `Delta.add_to`."""
        x = x.reshape(-1, x.shape[-1]).to(out.dtype)
        weight, bias = out_in(self.module, self.module.weight), self._bias_beside_gain()
        self._in(out.dtype).add_to(out.view(-1, out.shape[-1]), x, weight, bias)


class EmbeddingDelta(DeviceDelta):
    """Of an embedding: x (…) of row numbers, out (…, embedding_dim)."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += s · B A[:, x], scaled as the rows are; times the gain where there is one."""
        delta = self._in(out.dtype)
        z = F.embedding(x.flatten(), delta.A.t())
        if scales_rows(self.module):
            z = times_scale(self.module, z)
        delta.expand_into(out.view(-1, out.shape[-1]), z)
        gain = delta.gain(self.module.weight.t())
        if gain is not None:
            out.mul_(gain.to(out.dtype))


class ConvolutionDelta(DeviceDelta):
    """Of a convolution: x (batch, in_channels, …), out (batch, out_channels, …)."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += conv(x, s · B A), the product read as a kernel; times the gain, but for b."""
        delta, module = self._in(out.dtype), self.module
        per_channel = (-1, *[1] * (module.weight.dim() - 2))
        gain = delta.gain(module.weight.flatten(1))
        bias = self._bias_beside_gain()
        if bias is not None:
            out.sub_(bias.view(per_channel))
        out.add_(convolved_update(module, x.to(out.dtype), delta))
        if gain is not None:
            out.mul_(gain.to(out.dtype).view(per_channel))
        if bias is not None:
            out.add_(bias.view(per_channel))


def device_delta(name: str, adapted: AdaptedWeight, positions: bool) -> DeviceDelta:
    """The `DeviceDelta` for a module's kind; arguments as for that."""
    if isinstance(adapted.module, nn.Embedding):
        return EmbeddingDelta(name, adapted, positions)
    if adapted.weight.dim() > 2:
        return ConvolutionDelta(name, adapted, positions)
    return LinearDelta(name, adapted, positions)


@dataclass(frozen=True)
class PreparedAdapter:
    """What an adapter does to a model.

    Args:
        deltas: by the name of the module that each belongs to.
        heads: modules that take the place of the model's, by name.
        labels: what the head's outputs stand for; () without a head.
        tokens_first: the modules of `deltas` to which a batch's rows may come second, after tokens.
    """

    deltas: Mapping[str, DeviceDelta]
    heads: Mapping[str, nn.Module]
    labels: tuple[str, ...]
    tokens_first: frozenset[str]


def fingerprint_of(model: nn.Module) -> str | None:
    """The fingerprint of a model's backbone; None if it is of no registered family, or has none.

    For other families see `possible_fingerprints`.
    """
    state = state_of(model)
    of_backbone = {name: state[name] for name in state if in_known_backbone(name)}
    if not of_backbone or has_no_fingerprint(model, of_backbone):
        return None
    return fingerprint(state)


@torch.inference_mode(False)
@torch.no_grad()
def prepare(model: nn.Module, adapter: Adapter, base_fingerprint: str | None) -> PreparedAdapter:
    """Checks an adapter against a model and copies its tensors to where they are needed."""
    if adapter.kind != LORA:
        raise CheckpointError(
            f"{adapter.source}: holds {adapter.kind.name} weights, a bank takes LoRA's; give them "
            f"to a model of their own ({adapter.kind.switch})"
        )
    modules = adapted_modules(model, adapter)
    check_all_there(model, adapter, modules)
    _check_called(modules, model, adapter.source)
    _check_metadata(adapter)
    tensors = _head_tensors(adapter)
    check_there(tensors_of(model, tensors), "it gets an adapter")
    known = [base_fingerprint] if base_fingerprint else None
    check_possible_base(adapter, known or possible_fingerprints(model, modules, tensors))
    check_finite(adapter)
    last = last_projection(model)
    heads = {
        top: _head(model, top, tensors, last, adapter.source)
        for top in sorted({top_module(name) for name in tensors})
    }
    positions = adapter.lora.positions is not False
    deltas = {name: device_delta(name, adapted, positions) for name, adapted in modules.items()}
    labels = _labels(adapter, tensors.get(f"{last}.weight"))
    return PreparedAdapter(deltas, heads, labels, _with_tokens_first(model, modules))


def _with_tokens_first(model: nn.Module, adapted: Collection[str]) -> frozenset[str]:
    """Those of these modules in a block of one of PyTorch's attentions without batch_first."""
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


def _check_called(modules: Mapping[str, AdaptedWeight], model: nn.Module, source: str) -> None:
    """Refuses modules that no hook can adapt: their input is not seen, or their output is more."""
    for name, adapted in modules.items():
        if adapted.is_stack:
            what = stack_of_layer(name)
            raise NeedsMergingError(source, f"adapts {what}, a stack of matrices, not a module")
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.MultiheadAttention):
            raise NeedsMergingError(
                source, f"adapts {name}, which nn.MultiheadAttention never calls"
            )
        if isinstance(adapted.module, nn.MultiheadAttention):
            raise NeedsMergingError(source, f"adapts {name}, an nn.MultiheadAttention, within it")
        if is_quantized_linear(adapted.module) and adapted.delta.has_magnitude:
            raise CheckpointError(
                f"{source}: has DoRA on {name}, which needs the weight, and that is quantized: "
                "load the base in float16 or bfloat16"
            )
        kind = type(adapted.module)
        for plain in (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d):
            if not issubclass(kind, plain):
                continue
            if not (computes_as(kind, plain) or scales_rows(adapted.module)):
                raise NeedsMergingError(
                    source, f"adapts {name}, a {kind.__name__}, which computes in a way of its own"
                )


def _check_metadata(adapter: Adapter) -> None:
    source, metadata = adapter.source, adapter.lora
    if metadata.bias != "none":
        raise NeedsMergingError(source, "brings biases of its own")
    if metadata.trained_with:
        switches = ", ".join(metadata.trained_with)
        raise NeedsMergingError(source, f"was trained with {switches} as well")


def _head_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """An adapter's tensors that belong to its head.

    Raises:
        CheckpointError: one of them is the backbone's, or the head itself is adapted.
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
                f"brings {name} and adapts modules of {top_module(name)}, where a bank takes no "
                "others: only whole modules beside it, such as a head",
            )
    return rest


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
    module = dict(model.named_modules()).get(top)
    if module is None:
        raise CheckpointError(f"{source}: the model has no '{top}' to take a head's tensors")
    start = f"{top}."
    theirs = {name: t for name, t in tensors.items() if f"{name}.".startswith(start)}
    ours = module.state_dict(prefix=start).keys()
    state = model.state_dict(keep_vars=True)
    of_others = {id(t): t for name, t in state.items() if not name.startswith(start)}
    brought = {id(state[name]) for name in theirs.keys() & ours}
    # No file needs to hold what is another tensor as well, as a vocabulary's projection is.
    tied = {name for name in ours if id(state[name]) in of_others.keys() | brought}
    for what, names in (
        ("lacks", ours - theirs.keys() - tied),
        ("has, unknown to the model,", theirs.keys() - ours),
    ):
        if names:
            raise CheckpointError(f"{source}: {what} {min(names)} in the head that it brings")
    head = copy.deepcopy(module, {**of_others}).eval()
    weight = theirs.get(f"{last}.weight")
    if weight is not None and weight.dim() == 2 and weight.numel():
        projection = head.get_submodule(last.removeprefix(top).removeprefix("."))
        assert isinstance(projection, nn.Linear)  # see `last_projection`
        _set_outputs(projection, len(weight))
    held = head.state_dict(prefix=start)
    for name, needed in ((name, held[name]) for name in theirs):
        if theirs[name].shape != needed.shape:
            raise CheckpointError(
                f"{source}: {name} is {tuple(theirs[name].shape)} in the file, "
                f"{tuple(needed.shape)} is needed"
            )
    head.load_state_dict({n.removeprefix(start): t for n, t in theirs.items()}, strict=False)
    for parameter in head.parameters():
        if id(parameter) not in of_others:
            parameter.requires_grad_(False)
    return head


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
    labels = adapter.lora.labels or tuple(f"LABEL_{index}" for index in range(outputs))
    if len(labels) != outputs:
        raise CheckpointError(
            f"{adapter.source}: names {len(labels)} labels, its head has {outputs} outputs"
        )
    return labels
