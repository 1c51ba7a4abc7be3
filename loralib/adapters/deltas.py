"""What an adapter adds to each weight of its base, whatever layers it was trained in.

An adapter's tensors are pairs: for a module ``m``, ``m.lora_A`` and ``m.lora_B``. Those of a
`Linear` are one update of the whole output; those of a `MergedLinear` are stacked, a block for each
updated slice of the output (see functional.py). The tensors do not say which slices these are: the
model's `Family` does.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..functional import Delta, merge
from ..nn.positions import shared_projections, unshare_positions
from .adapter import LORA, Adapter
from .checks import check_positions
from .families import enabled_slices


def lora_pairs(tensors: Mapping[str, Tensor], source: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs (lora_A, lora_B) among an adapter's tensors, by their module's name.

    Raises:
        CheckpointError: one of a pair is missing, or they cannot be multiplied.
    """
    halves = [name for name in tensors if name.endswith((".lora_A", ".lora_B"))]
    pairs = {}
    for module in sorted({name.rpartition(".")[0] for name in halves}):
        for name in (f"{module}.lora_A", f"{module}.lora_B"):
            if name not in tensors:
                raise CheckpointError(f"{source}: lacks {name}, the other half of a pair")
        A, B = tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]
        if A.dim() != 2 or B.dim() != 2 or not A.numel() or not B.numel() or len(A) % B.shape[1]:
            shapes = f"lora_A {tuple(A.shape)} and lora_B {tuple(B.shape)}"
            raise CheckpointError(f"{source}: {shapes} of {module} do not belong together")
        pairs[module] = A, B
    return pairs


def rank_of(tensors: Mapping[str, Tensor], source: str) -> int:
    """The rank that all pairs among an adapter's tensors have.

    Raises:
        CheckpointError: there are none, or they are of several ranks.
    """
    ranks = {B.shape[1]: module for module, (_, B) in lora_pairs(tensors, source).items()}
    if len(ranks) != 1:
        listed = ", ".join(f"{rank} ({module})" for rank, module in sorted(ranks.items()))
        raise CheckpointError(f"{source}: has {len(ranks)} ranks: {listed or 'none'}")
    return next(iter(ranks))


def deltas_of(adapter: Adapter) -> dict[str, Delta]:
    """What an adapter adds, by the name of the module that each delta belongs to.

    Raises:
        CheckpointError: its alpha is unknown; or a delta is stacked in a module whose updated
            slices are unknown.
    """
    rank = rank_of(adapter.tensors, adapter.source)
    pairs = lora_pairs(adapter.tensors, adapter.source)
    scaling = adapter.lora.delta.scale(adapter.lora.alpha, rank)
    return {name: _delta(adapter, name, *pair, scaling) for name, pair in pairs.items()}


def _delta(adapter: Adapter, module: str, A: Tensor, B: Tensor, scaling: float) -> Delta:
    count = len(A) // B.shape[1]
    if count == 1:
        return adapter.lora.delta(A, B, scaling, out_features=len(B))
    enabled = enabled_slices(module)
    if sum(enabled) != count or len(B) % count:
        raise CheckpointError(
            f"{adapter.source}: {module} has {count} stacked blocks, and it is unknown which "
            "slices of its output they belong to: register its family (adapters.families)"
        )
    width = len(B) // count
    starts = tuple(index * width for index, on in enumerate(enabled) if on)
    return adapter.lora.delta(A, B, scaling, starts, width * len(enabled))


def linear_module(model: nn.Module, name: str, source: str) -> nn.Module:
    """The module that a delta belongs to.

    Raises:
        CheckpointError: the model has no such module, or it is not a linear one.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise CheckpointError(f"{source}: the model has no {name} to be adapted") from error
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        raise CheckpointError(f"{source}: {name} is not a linear layer of the model")
    return module


def out_in(module: nn.Module, weight: Tensor) -> Tensor:
    """A linear module's weight as (out, in), a view of it.

    Modules with `fan_in_fan_out` hold it as (in, out), and so does upstream's Conv1D, which is not
    an `nn.Linear`.
    """
    held_in_out = not isinstance(module, nn.Linear) or getattr(module, "fan_in_fan_out", False)
    return weight.t() if held_in_out else weight


def adapted_modules(model: nn.Module, adapter: Adapter) -> dict[str, tuple[nn.Module, Delta]]:
    """The modules of a plain model that an adapter adapts, and what it adds to each, by name.

    Raises:
        CheckpointError: as `deltas_of`; or the model lacks such a module, or has it in another
            shape.
    """
    modules = {}
    for name, delta in deltas_of(adapter).items():
        module = linear_module(model, name, adapter.source)
        theirs = (delta.out_features, delta.in_features)
        ours = tuple(out_in(module, module.get_parameter("weight")).shape)
        if theirs != ours:
            raise CheckpointError(
                f"{adapter.source}: the delta of {name} is {theirs}, the model's weight "
                f"is {ours}: a base of another size"
            )
        modules[name] = module, delta
    if shared_projections(model) & modules.keys():
        check_positions(adapter)
    return modules


@torch.no_grad()
def merge_into(model: nn.Module, adapter: Adapter) -> None:
    """Merges an adapter into a plain model, which stays a plain model.

    Deltas are added to the weights, summed in float32 or wider and rounded once, to the weight's
    dtype; a head and biases that the adapter brings replace the model's. All that changes gets new
    tensors, so that the old ones, which may be a mapped file, keep their bits. Where a delta does
    not reach the positions that share its weight, those first get projections of their own, see
    nn/positions.py.

    Args:
        model: the base, with a head of the adapter's shape, and no LoRA layers.
        adapter: LoRA, with its metadata.

    Raises:
        CheckpointError: as `deltas_of`, or it does not fit the model; that is unchanged then.
    """
    modules = adapted_modules(model, adapter)
    others = {name: t for name, t in adapter.tensors.items() if LORA.part not in name}
    own = dict(model.named_parameters())
    for name, tensor in others.items():
        if name not in own:
            raise CheckpointError(f"{adapter.source}: has {name}, unknown to the model")
        if name.removesuffix(".weight") in modules:
            raise CheckpointError(f"{adapter.source}: has both {name} and a delta of it")
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{adapter.source}: {name} is {tuple(tensor.shape)}, in the model "
                f"{tuple(own[name].shape)}"
            )
    if adapter.lora.positions is False:
        unshare_positions(model, modules)
    for module, delta in modules.values():
        merged = merge(module.get_parameter("weight"), delta, partial(out_in, module))
        _replace(module, "weight", merged)
    for name, tensor in others.items():
        owner, _, last = name.rpartition(".")
        _replace(model.get_submodule(owner), last, tensor.to(own[name].dtype))


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(tensor, requires_grad=old.requires_grad))
