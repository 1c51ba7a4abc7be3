"""Merges an adapter into a plain model."""

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..experts import merge_stack
from ..functional import merge
from ..layer_kinds import out_in, unknown_layout
from ..model_checks import check_there, tensors_of
from ..module_names import first_names
from ..positions import unshare_positions
from ..quantized_layers import is_quantized_linear, not_merged
from .adapted_weights import AdaptedWeight, adapted_modules
from .adapter import Adapter


@torch.no_grad()
def merge_into(model: nn.Module, adapter: Adapter) -> None:
    """Merges an adapter into a plain model, which stays a plain model.

    Deltas are added to the weights in float32 or wider, and the sum is rounded once, to the
    weight's dtype. The adapter's head and biases replace the model's. All that changes gets new
    tensors, so that the old ones, which may be mapped from a file, keep their bits. If a delta does
    not reach the positions that share its weight, the positions first get projections of their own,
    see positions.py.

    Args:
        model: the base, with a head of the adapter's shape and without LoRA layers.
        adapter: LoRA, with its metadata.

    Raises:
        CheckpointError: for the reasons of `deltas_of`, or because the adapter does not fit the
            model. The model is then unchanged.
        ValueError: a weight that the adapter changes has no values, or is quantized in an unknown
            way.
    """
    modules = adapted_modules(model, adapter)
    for name, adapted in modules.items():
        if is_quantized_linear(adapted.module):
            raise CheckpointError(f"{adapter.source}: {not_merged(name)}")
        if reason := unknown_layout(adapted.module, adapted.weight):
            raise CheckpointError(f"{adapter.source}: {name} is {reason}")
    others, base = adapter.besides, named_tensors(model)
    check_there(tensors_of(model, others), "an adapter is merged")
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
        setattr(adapted.module, adapted.name, _like(adapted.weight, _merged(adapted)))
    apart = untied_by(model, adapter)
    for name, tensor in others.items():
        new = _like(base[name], tensor.to(base[name], copy=True))
        for place in (other for other in base if base[other] is base[name]):
            if place not in apart.get(name, ()):
                owner, _, last = place.rpartition(".")
                setattr(model.get_submodule(owner), last, new)


def _merged(adapted: AdaptedWeight) -> Tensor:
    """Returns a weight with its delta merged into it, as a new tensor.

    The delta's tensors are copied first, because matrix products are rounded differently depending
    on how their factors, which may be mapped from a file, lie in memory.
    """
    copied = adapted.delta.to(adapted.weight.device, copy=True)
    if adapted.is_stack:
        return merge_stack(adapted.module, adapted.weight, copied)
    return merge(adapted.weight, copied, partial(out_in, adapted.module))


def untied_by(model: nn.Module, adapter: Adapter) -> dict[str, tuple[str, ...]]:
    """Returns the adapter's weights that are for one module alone, although the model shares them.

    A weight is for the modules that an adapter names; a trained one that modules shared is held
    under each of its names. A buffer goes along with the module that has it, and stays shared.

    Returns:
        For the name of each such weight, the names of the others that share it in the model. The
        others do not get its values.
    """
    besides = adapter.besides
    return {
        name: others
        for name, others in _shared_by(model, besides).items()
        if not all(
            other in besides and torch.equal(besides[other], besides[name]) for other in others
        )
    }


def _shared_by(model: nn.Module, besides: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Returns, for each of an adapter's whole weights, the names of others that it is in the model.

    Names within the tensor's own module are left out, unless the adapter has them as well.
    """
    base, first = named_tensors(model), first_names(model)
    shared = dict[str, tuple[str, ...]]()
    for name in (name for name in besides if isinstance(base.get(name), nn.Parameter)):
        # By the first name of each module: a module that is used twice shares nothing with itself.
        sharing = {_in_module(other, first): other for other in base if base[other] is base[name]}
        shared[name] = tuple(
            other
            for module, other in sharing.items()
            if module != _in_module(name, first) and not _is_left_out(other, name, besides)
        )
    return shared


def _is_left_out(other: str, name: str, brought: Collection[str]) -> bool:
    """Returns whether a tensor is in the same module as `name`, but not in the adapter.

    The adapter brings that module as a whole, so the tensor was left out because it is tied, such
    as a bias with a second name.
    """
    module = name.rpartition(".")[0]
    return other.startswith(f"{module}.") and other not in brought


def _in_module(name: str, first: Mapping[str, str]) -> str:
    """Returns a tensor's name with its module's first name."""
    owner, _, last = name.rpartition(".")
    return f"{first.get(owner, owner)}.{last}"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by all of their names. Tied ones have several."""
    named = (model.named_parameters, model.named_buffers)
    return {name: tensor for each in named for name, tensor in each(remove_duplicate=False)}


def _like(old: Tensor, tensor: Tensor) -> Tensor:
    """Returns `tensor` as a parameter if `old` is one, with the same requires_grad."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=old.requires_grad)
    return tensor
