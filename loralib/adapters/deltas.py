"""Computes what an adapter adds to each weight of its base, whatever layers it was trained in.

An adapter's tensors belong to modules. A module ``m`` has

    m.lora_A, m.lora_B                 the update; a convolution's as kernels, B's of size 1
    m.lora_magnitude_vector            the magnitudes of DoRA
    m.lora_A_start, m.lora_B_start     where A and B started, if from the weight's own factors

The tensors of a `Linear` are one update of the whole output. Those of a `MergedLinear` are stacked,
with one block for each updated slice of the output (see functional.py). Which slices these are is
not in the tensors but in the metadata, or in the model's `Family`. The tensors of a stack of
matrices have one block for each matrix (see experts.py).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..experts import merge_stack
from ..functional import Delta, joined_with_start, merge
from ..io.tensors import same_tensor
from ..layer_kinds import is_linear, out_in, out_in_sizes
from ..model_checks import check_there
from ..nn.positions import shared_projections, unshare_positions
from ..quantized_layers import is_quantized_linear, not_merged
from ..stacks import matrices, stack_of_layer, stacked_weights, stacks_in
from ..targets import first_names, first_names_of_targets, other_places
from ..text import module_label
from .adapter import Adapter, lora_modules
from .checks import check_positions
from .families import enabled_slices, family_of
from .metadata import AdapterMetadata
from .names import more_layers
from .peft import is_targeted_parameter, peft_difference
from .peft_completeness import check_complete

MAGNITUDE = "lora_magnitude_vector"
START_A, START_B = "lora_A_start", "lora_B_start"
PARTS = ("lora_A", "lora_B", MAGNITUDE, START_A, START_B)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def lora_pairs(tensors: Mapping[str, Tensor], source: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the pairs (lora_A, lora_B) of an adapter, flattened to matrices, by module name.

    Raises:
        CheckpointError: one of a pair is missing, or the two cannot be multiplied.
    """
    halves = [name for name in tensors if name.endswith((".lora_A", ".lora_B"))]
    pairs = {}
    for module in sorted({name.rpartition(".")[0] for name in halves}):
        for name in (f"{module}.lora_A", f"{module}.lora_B"):
            if name not in tensors:
                raise CheckpointError(f"{source}: lacks {name}, the other half of a pair")
        A, B = tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]
        if not _belong_together(A, B):
            shapes = f"lora_A {tuple(A.shape)} and lora_B {tuple(B.shape)}"
            raise CheckpointError(f"{source}: {shapes} of {module} do not belong together")
        pairs[module] = A.flatten(1), B.flatten(1)
    return pairs


def _belong_together(A: Tensor, B: Tensor) -> bool:
    if not 2 <= A.dim() == B.dim() <= 5 or not A.numel() or not B.numel():
        return False
    is_kernel = A.dim() > 2
    return len(A) == B.shape[1] == B[0].numel() if is_kernel else len(A) % B.shape[1] == 0


def ranks_of(tensors: Mapping[str, Tensor], source: str) -> dict[str, int]:
    """Returns the rank of each module's update.

    Raises:
        CheckpointError: there are none.
    """
    ranks = {module: B.shape[1] for module, (_, B) in lora_pairs(tensors, source).items()}
    if not ranks:
        raise CheckpointError(f"{source}: holds no LoRA: no tensor ends in lora_A or lora_B")
    return ranks


def rank_of(tensors: Mapping[str, Tensor], source: str) -> int:
    """Returns the rank that all pairs among an adapter's tensors have.

    Raises:
        CheckpointError: there are no pairs, or their ranks differ.
    """
    ranks = {rank: module for module, rank in ranks_of(tensors, source).items()}
    if len(ranks) != 1:
        listed = ", ".join(f"{rank} ({module})" for rank, module in sorted(ranks.items()))
        raise CheckpointError(f"{source}: has {len(ranks)} ranks: {listed}")
    return next(iter(ranks))


def slices_in(metadata: AdapterMetadata | None, module: str) -> tuple[bool, ...]:
    """Returns which slices of a module's output its stacked updates reach, or () if unknown.

    They are in an adapter's metadata, or else follow from the module's family.
    """
    own = getattr(metadata, "slices", None) or {}
    return own.get(module) or enabled_slices(module)


def deltas_of(adapter: Adapter) -> dict[str, Delta]:
    """Returns an adapter's deltas by the name of the module that each belongs to.

    Raises:
        CheckpointError: its alpha is unknown, or a delta is stacked in a module whose updated
            slices are unknown.
    """
    ranks_of(adapter.tensors, adapter.source)
    pairs = lora_pairs(adapter.tensors, adapter.source)
    return {name: _delta(adapter, name, *pair) for name, pair in pairs.items()}


def _delta(adapter: Adapter, module: str, A: Tensor, B: Tensor) -> Delta:
    metadata, rank = adapter.lora, B.shape[1]
    if rank != metadata.rank_of(module):
        raise CheckpointError(
            f"{adapter.source}: {module} has rank {rank}, but its metadata says "
            f"{metadata.rank_of(module)}"
        )
    count, kind = len(A) // rank, metadata.delta
    starts, out_features = _slices(adapter, module, count, len(B))
    if metadata.has_start:
        A0, B0 = (adapter.tensors[f"{module}.{part}"].flatten(1) for part in (START_A, START_B))
        A, B = joined_with_start(A, B, A0, B0, count)
    more: dict[str, Any] = {}
    if kind.has_magnitude:
        more["magnitude"] = adapter.tensors[f"{module}.{MAGNITUDE}"]
    scaling = kind.scale(metadata.alpha_of(module), rank)
    return kind(A, B, scaling, starts, out_features, **more)


def _slices(adapter: Adapter, module: str, count: int, rows: int) -> tuple[tuple[int, ...], int]:
    """Returns the first row of each slice that a module's updates reach, and its output's size."""
    if count == 1 and module not in (adapter.lora.slices or {}):
        return (0,), rows
    is_of_stack = adapter.lora.is_of_stack(module)
    enabled = (True,) * count if is_of_stack else slices_in(adapter.metadata, module)
    if sum(enabled) != count or rows % count:
        raise CheckpointError(
            f"{adapter.source}: {module} has {count} stacked blocks, and it is unknown which "
            "slices of its output they belong to: register its family (adapters.families)"
        )
    width = rows // count
    starts = tuple(index * width for index, on in enumerate(enabled) if on)
    return starts, width * len(enabled)


def has_slices(adapter: Adapter, module: str, delta: Delta) -> bool:
    """Returns whether a delta is stacked or of one slice of the output, and not a stack's."""
    is_of_slices = len(delta.starts) > 1 or len(delta.B) != delta.out_features
    return is_of_slices and not adapter.lora.is_of_stack(module)


# ---- plain models ----


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of a plain model, and the delta that an adapter adds to it.

    Args:
        module: the module that has the weight.
        name: the parameter's name in the module.
        delta: the delta that is added.
    """

    module: nn.Module
    name: str
    delta: Delta

    @property
    def weight(self) -> Tensor:
        """The weight, as the module holds it."""
        return self.module.get_parameter(self.name)

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices."""
        return self.name in stacks_in(self.module)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape in the delta's layout: (out, in), a kernel's or a stack's shape."""
        if self.is_stack:
            return tuple(matrices(self.module, self.weight).shape)
        is_kernel = self.weight.dim() > 2
        return tuple(self.weight.shape) if is_kernel else out_in_sizes(self.module, self.weight)

    def shape_of_delta(self, A: Tensor) -> tuple[int, ...]:
        """Returns the delta's shape in the same layout. A is the adapter's, not flattened."""
        if self.is_stack:
            count = len(self.delta.starts)
            return count, self.delta.out_features // count, self.delta.in_features
        return self.delta.out_features, *A.shape[1:]

    def merged(self) -> Tensor:
        """Returns the weight with the delta merged into it, as a new tensor.

        The delta's tensors are copied first, because matrix products are rounded differently
        depending on how their factors, which may be mapped from a file, lie in memory.
        """
        copied = self.delta.to(self.weight.device, copy=True)
        if self.is_stack:
            return merge_stack(self.module, self.weight, copied)
        return merge(self.weight, copied, partial(out_in, self.module))


def adapted_module(model: nn.Module, name: str, adapter: Adapter) -> tuple[nn.Module, str]:
    """Returns the module whose weight an adapter adapts under a name, and the weight's name in it.

    It is usually the module of this name. For the q_proj, k_proj and v_proj of an
    `nn.MultiheadAttention` whose inputs have different sizes, it is the attention.

    Raises:
        CheckpointError: the model has no such module, or the module is of another kind than the one
            that the adapter was trained in.
    """
    source, embeddings = adapter.source, adapter.lora.embeddings or ()
    if adapter.lora.is_of_stack(name):
        return _owner_of_stack(model, stack_of_layer(name), adapter)
    module, weight_name = _module_and_weight(model, name)
    if module is None:
        instead = _fitting(model, name, adapter)
        raise CheckpointError(
            f"{source}: the model has no {module_label(name)} to adapt: {instead}"
        )
    weight = getattr(module, weight_name, None)
    if weight is not None and module._parameters.get(weight_name) is None:
        raise CheckpointError(
            f"{source}: the {weight_name} of {name} is computed from other tensors, as by "
            "weight_norm or pruning: make it a plain parameter first"
        )
    own = (f"{name}.{each}" for each in module._parameters)
    targeted = [each for each in own if is_targeted_parameter(adapter.peft_config, each)]
    if targeted and not is_linear(module):
        raise CheckpointError(f"{source}: {_no_such_lora(targeted[0], module)}")
    dimensions = adapter.tensors[f"{name}.lora_A"].dim()
    what = "a linear layer" if dimensions == 2 else f"a convolution in {dimensions - 2}-D"
    what = "an embedding" if name in embeddings else what
    is_of_kind = isinstance(module, nn.Embedding) == (name in embeddings)
    if dimensions > 2:
        is_of_kind = isinstance(module, _CONVOLUTIONS)
    if not is_of_kind or not isinstance(weight, Tensor) or weight.dim() != dimensions:
        raise CheckpointError(f"{source}: in the model, {name} is not {what}")
    return module, weight_name


def _owner_of_stack(model: nn.Module, name: str, adapter: Adapter) -> tuple[nn.Module, str]:
    """Returns the module that has the stack of this name, and the stack's name in it."""
    at, _, last = name.rpartition(".")
    owner = dict(model.named_modules(remove_duplicate=False)).get(at)
    if owner is None or last not in stacks_in(owner):
        is_targeted = is_targeted_parameter(adapter.peft_config, name)
        if is_targeted and owner is not None and last in owner._parameters:
            raise CheckpointError(f"{adapter.source}: {_no_such_lora(name, owner)}")
        raise CheckpointError(
            f"{adapter.source}: the model has no {name}, a stack of matrices, to adapt: "
            f"{_fitting(model, name, adapter)}"
        )
    return owner, last


def _no_such_lora(parameter: str, module: nn.Module) -> str:
    """Returns the error text for a parameter that PEFT has adapted and this library cannot."""
    return (
        f"adapts {parameter}, but LoRA for the parameters of a {type(module).__name__} is not "
        "supported here: merge it with PEFT's merge_and_unload()"
    )


def _fitting(model: nn.Module, name: str, adapter: Adapter) -> str:
    """Returns advice for a model that lacks a module: to give a part of it, or another model."""
    stacks = stacked_weights(model)
    if stacks and re.search(r"\.experts\.\d+(?:\.|$)", name):  # a name from Transformers before 5
        return (
            f"this model holds all experts of a layer in one parameter, such as {min(stacks)}: "
            "load the adapter with PEFT, which converts it for some models, and save it there; or "
            "merge it with the version of Transformers that it was trained with"
        )
    within = [each for each in first_names_of_targets(model) if each.endswith(f".{name}")]
    if len(within) != 1:
        adapted = {
            stack_of_layer(each) if adapter.lora.is_of_stack(each) else each
            for each in lora_modules(adapter.tensors)
        }
        return base_to_give(adapter, more_layers(adapted, first_names_of_targets(model)))
    part = within[0].removesuffix(f".{name}")
    return f"it has {within[0]}; give that part, model.get_submodule('{part}')"


def base_to_give(adapter: Adapter, layers: tuple[int, int] | None = None) -> str:
    """Returns advice for an adapter that was trained in another model, with its base's name if any.

    Args:
        adapter: the adapter.
        layers: the number of layers of its base, as far as its updates show it, and that of the
            model, see `more_layers`.
    """
    base = adapter.metadata.base if adapter.metadata else None
    advice = f"give the model that it was trained in{f', of {base!r}' if base else ''}"
    if layers is None:
        return advice
    return f"its base has at least {layers[0]} layers, this model has {layers[1]}; {advice}"


def _module_and_weight(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    owner, _, last = name.rpartition(".")
    for path, weight in ((owner, f"{last}_weight"), (name, "")):
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        is_attention = isinstance(module, nn.MultiheadAttention)
        if weight and (not is_attention or getattr(module, weight, None) is None):
            continue
        return module, weight or ("in_proj_weight" if is_attention else "weight")
    return None, ""


def adapted_modules(model: nn.Module, adapter: Adapter) -> dict[str, AdaptedWeight]:
    """Returns the weights of a plain model that an adapter adapts, with deltas, by module name.

    Raises:
        CheckpointError: for the reasons of `deltas_of`. Or the model lacks an adapted module, has
            it in another shape, or uses it in several places although PEFT has adapted only one of
            them. Or it is a convolution whose update PEFT computes in another way. Or the adapter
            holds different updates for one module, or lacks what its PEFT folder should hold.
        ValueError: the weight of an adapted module has no values, or is quantized in an unknown
            way.
    """
    modules: dict[str, AdaptedWeight] = {}
    first = first_names(model)
    others = other_places(model) if adapter.format == "peft" else {}
    for name, delta in deltas_of(adapter).items():
        module, weight = adapted_module(model, name, adapter)
        if _is_repeated(adapter, name, first):
            continue
        place = name.rpartition(".")[0] if adapter.lora.is_of_stack(name) else name
        if place in others or place in others.values():
            raise CheckpointError(
                f"{adapter.source}: adapts {name}, which the model uses in several places, but "
                "PEFT has adapted only one of them: load it with PEFT"
            )
        reason = peft_difference(module) if adapter.format == "peft" else None
        if reason:
            raise CheckpointError(f"{adapter.source}: {name} is {reason}: load it with PEFT")
        adapted = AdaptedWeight(module, weight, delta)
        if not is_quantized_linear(module):
            check_there([(f"the weight of {name}", adapted.weight)], "it gets an adapter")
        theirs, ours = adapted.shape_of_delta(adapter.tensors[f"{name}.lora_A"]), adapted.shape
        if theirs != ours:
            raise CheckpointError(
                f"{adapter.source}: the delta of {module_label(name)} is {theirs}, but the "
                f"model's weight is {ours}: a base of another size; {base_to_give(adapter)}"
            )
        modules[name] = adapted
    if shared_projections(model) & modules.keys():
        check_positions(adapter)
    check_complete(model, adapter, modules)
    return modules


def _is_repeated(adapter: Adapter, name: str, first: Mapping[str, str]) -> bool:
    """Returns whether an adapter has this module's update under the module's first name as well."""
    original = first.get(name, name)
    if original == name or f"{original}.lora_A" not in adapter.tensors:
        return False
    for full, tensor in adapter.tensors.items():
        module, _, part = full.rpartition(".")
        if module == name and not same_tensor(tensor, adapter.tensors[f"{original}.{part}"]):
            raise CheckpointError(
                f"{adapter.source}: {name} and {original} are the same module in the model, but "
                "their updates differ"
            )
    return True


@torch.no_grad()
def merge_into(model: nn.Module, adapter: Adapter) -> None:
    """Merges an adapter into a plain model, which stays a plain model.

    Deltas are added to the weights in float32 or wider, and the sum is rounded once, to the
    weight's dtype. The adapter's head and biases replace the model's. All that changes gets new
    tensors, so that the old ones, which may be mapped from a file, keep their bits. If a delta does
    not reach the positions that share its weight, the positions first get projections of their own,
    see nn/positions.py.

    Args:
        model: the base, with a head of the adapter's shape and without LoRA layers.
        adapter: LoRA, with its metadata.

    Raises:
        CheckpointError: for the reasons of `deltas_of`, or because the adapter does not fit the
            model. The model is then unchanged.
    """
    modules = adapted_modules(model, adapter)
    for name, adapted in modules.items():
        if is_quantized_linear(adapted.module):
            raise CheckpointError(f"{adapter.source}: {not_merged(name)}")
    others, base = adapter.besides, _named_tensors(model)
    adapted_weights = {id(adapted.weight) for adapted in modules.values()}
    for name, tensor in others.items():
        if name not in base:
            raise CheckpointError(f"{adapter.source}: has {name}, which the model does not have")
        if id(base[name]) in adapted_weights:
            raise CheckpointError(f"{adapter.source}: has both {name} and a delta of it")
        if tensor.shape != base[name].shape:
            raise CheckpointError(
                f"{adapter.source}: {name} is {tuple(tensor.shape)} in the file, "
                f"{tuple(base[name].shape)} in the model"
            )
    if adapter.lora.positions is False:
        unshare_positions(model, modules)
    for adapted in modules.values():
        setattr(adapted.module, adapted.name, _like(adapted.weight, adapted.merged()))
    apart = untied_by(model, adapter)
    for name, tensor in others.items():
        new = _like(base[name], tensor.to(base[name].dtype))
        for place in (other for other in base if base[other] is base[name]):
            if place not in apart.get(name, ()):
                owner, _, last = place.rpartition(".")
                setattr(model.get_submodule(owner), last, new)


def untied_by(model: nn.Module, adapter: Adapter) -> dict[str, tuple[str, ...]]:
    """Returns the adapter's weights that are for one module alone, although the model shares them.

    Our own adapters hold a shared weight once for all its modules, or once under each name. There
    are two exceptions: the metadata says otherwise (`separate`), or the adapter holds a weight that
    its family ties to another one, which is only held if it is no longer tied. PEFT's adapters hold
    a separate weight for each module that they name.

    Returns:
        For the name of each such weight, the names of the others that share it in the model. The
        others do not get its values.
    """
    base, first, untied = _named_tensors(model), first_names(model), {}
    family = family_of(adapter.tensors)
    of_their_own = family.untied_in(adapter.tensors) if family else set()
    besides = adapter.besides
    for name, tensor in besides.items():
        if name not in base:
            continue
        # By the first name of each module: a module that is used twice shares nothing with itself.
        sharing = {_in_module(other, first): other for other in base if base[other] is base[name]}
        others = [
            other
            for module, other in sharing.items()
            if module != _in_module(name, first) and not _is_left_out(other, name, besides)
        ]
        brought = [besides[other] for other in others if other in besides]
        is_ours = not (adapter.format == "peft" or adapter.lora.separate or name in of_their_own)
        if (is_ours and not brought) or (
            len(brought) == len(others) and all(torch.equal(tensor, each) for each in brought)
        ):
            continue
        untied[name] = tuple(others)
    return untied


def _is_left_out(other: str, name: str, brought: Collection[str]) -> bool:
    """Returns whether a tensor is in the same module as `name`, but not in the adapter.

    The adapter brings that module as a whole, so the tensor was left out because it is tied, such
    as a bias with a second name.
    """
    module = name.rpartition(".")[0]
    return bool(module) and other.startswith(f"{module}.") and other not in brought


def _in_module(name: str, first: Mapping[str, str]) -> str:
    """Returns a tensor's name with its module's first name."""
    owner, _, last = name.rpartition(".")
    return f"{first.get(owner, owner)}.{last}"


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by all of their names. Tied ones have several."""
    named = (model.named_parameters, model.named_buffers)
    return {name: tensor for each in named for name, tensor in each(remove_duplicate=False)}


def _like(old: Tensor, tensor: Tensor) -> Tensor:
    """Returns `tensor` as a parameter if `old` is one, with the same requires_grad."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=old.requires_grad)
    return tensor
