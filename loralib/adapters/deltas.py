"""What an adapter adds to each weight of its base, whatever layers it was trained in.

An adapter's tensors are pairs: for a module ``m``, ``m.lora_A`` and ``m.lora_B``. Those of a
`Linear` are one update of the whole output. Those of a `MergedLinear` are several, stacked, each
for a slice of the output:

    lora_A (r·e, in)                lora_B (width·e, r)           output of the module
    .-----------------.             .-----.                       .---------------.
    |  A of slice 0   | r           | B 0 | width                 |    slice 0    |  += s · B0 A0 x
    |-----------------|             |-----|                       |---------------|
    |  A of slice 2   | r           | B 2 | width                 |    slice 1    |
    '-----------------'             '-----'                       |---------------|
                                                                  |    slice 2    |  += s · B2 A2 x
                                                                  '---------------'

Which slices they are is not in the tensors: GPT-2's are query and value.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..nn.positions import shared_projections, unshare_positions
from .adapter import LORA, Adapter
from .checks import alpha_is_missing, check_positions

_GPT2_SLICES = (True, False, True)


@dataclass(frozen=True)
class Part:
    """One low-rank product, added to a slice of a module's output.

    Args:
        start: the first row of the output that it is added to.
        A: (r, in).
        B: (width, r); the slice is `start` … `start + width`.
    """

    start: int
    A: Tensor
    B: Tensor

    @property
    def columns(self) -> slice:
        """The slice of the output."""
        return slice(self.start, self.start + len(self.B))


@dataclass(frozen=True)
class Delta:
    """What is added to one module's output: scaling · B A x, for each part.

    Args:
        parts: one, or one for each updated slice.
        scaling: alpha / rank.
        out_features: width of the module's output.
    """

    parts: tuple[Part, ...]
    scaling: float
    out_features: int

    @property
    def in_features(self) -> int:
        """Width of the module's input."""
        return self.parts[0].A.shape[1]


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
                raise CheckpointError(f"{source}: lacks {name}, the other half of an update")
        A, B = tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]
        if A.dim() != 2 or B.dim() != 2 or not A.numel() or not B.numel() or len(A) % B.shape[1]:
            shapes = f"lora_A {tuple(A.shape)} and lora_B {tuple(B.shape)}"
            raise CheckpointError(f"{source}: {shapes} of {module} do not belong together")
        pairs[module] = A, B
    return pairs


def rank_of(tensors: Mapping[str, Tensor], source: str) -> int:
    """The rank that all updates among an adapter's tensors have.

    Raises:
        CheckpointError: there are none, or they are of several ranks.
    """
    ranks = {B.shape[1]: module for module, (_, B) in lora_pairs(tensors, source).items()}
    if len(ranks) != 1:
        listed = ", ".join(f"{rank} ({module})" for rank, module in sorted(ranks.items()))
        raise CheckpointError(f"{source}: has updates of {len(ranks)} ranks: {listed or 'none'}")
    return next(iter(ranks))


def deltas_of(adapter: Adapter) -> dict[str, Delta]:
    """An adapter's updates, by the name of the module that each belongs to.

    Raises:
        CheckpointError: its alpha is not known; or updates are stacked in a module of which it is
            not known which slices they belong to.
    """
    if adapter.metadata is None:
        raise alpha_is_missing(adapter.source)
    rank = rank_of(adapter.tensors, adapter.source)
    pairs = lora_pairs(adapter.tensors, adapter.source)
    scaling = adapter.metadata.alpha / rank
    return {name: _update(adapter, name, *pair, scaling) for name, pair in pairs.items()}


def enabled_slices(module: str) -> tuple[bool, ...]:
    """Which slices of a module's output its stacked updates belong to; () where nobody knows."""
    is_gpt2 = module.startswith("transformer.h.") and module.endswith(".c_attn")
    return _GPT2_SLICES if is_gpt2 else ()


def _update(adapter: Adapter, module: str, A: Tensor, B: Tensor, scaling: float) -> Delta:
    count = len(A) // B.shape[1]
    if count == 1:
        return Delta((Part(0, A, B),), scaling, len(B))
    enabled = enabled_slices(module)
    if sum(enabled) != count or len(B) % count:
        raise CheckpointError(
            f"{adapter.source}: {module} has {count} stacked updates, and it is not known which "
            "slices of its output they belong to"
        )
    width = len(B) // count
    starts = [index * width for index, on in enumerate(enabled) if on]
    stacked = zip(starts, A.chunk(count), B.chunk(count), strict=True)
    return Delta(tuple(Part(*part) for part in stacked), scaling, width * len(enabled))


def linear_module(model: nn.Module, name: str, source: str) -> nn.Module:
    """The module that an update belongs to.

    Raises:
        CheckpointError: the model has no such module, or it is not a linear one.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise CheckpointError(f"{source}: the model has no {name} to take an update") from error
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        raise CheckpointError(f"{source}: {name} is no linear layer of the model")
    return module


def out_in(module: nn.Module, weight: Tensor) -> Tensor:
    """A linear module's weight as (out, in), a view of it.

    It is held as (in, out) by those with `fan_in_fan_out`, and by GPT-2's Conv1D, which is no
    `nn.Linear`.
    """
    held_in_out = not isinstance(module, nn.Linear) or getattr(module, "fan_in_fan_out", False)
    return weight.t() if held_in_out else weight


def adapted_modules(model: nn.Module, adapter: Adapter) -> dict[str, tuple[nn.Module, Delta]]:
    """The modules of a plain model that an adapter's updates belong to, and those, by name.

    Raises:
        CheckpointError: as `updates`; or the model has not such modules, or of other shapes.
    """
    modules = {}
    for name, update in deltas_of(adapter).items():
        module = linear_module(model, name, adapter.source)
        theirs = (update.out_features, update.in_features)
        ours = tuple(out_in(module, module.weight).shape)
        if theirs != ours:
            raise CheckpointError(
                f"{adapter.source}: the update of {name} is {theirs}, the model's weight is "
                f"{ours}: a base of another size"
            )
        modules[name] = module, update
    if shared_projections(model) & modules.keys():
        check_positions(adapter)
    return modules


@torch.no_grad()
def merge_into(model: nn.Module, adapter: Adapter) -> None:
    """Puts an adapter into a plain model for good, without a trace of low-rank layers.

    Updates are added to the weights, summed in float32 or wider and rounded once, to the weight's
    dtype; a head and biases that the adapter brings take the place of the model's. All that
    changes gets new tensors, so that the old ones, which may be a mapped file, keep their bits.
    Where an update is kept from positions that share its weight, those first get projections of
    their own, see positions.py.

    Args:
        model: the base, with a head of the adapter's shape, and no LoRA layers.
        adapter: LoRA, with its info.

    Raises:
        CheckpointError: as `updates`, or it does not fit the model; that is unchanged then.
    """
    modules = adapted_modules(model, adapter)
    others = {name: t for name, t in adapter.tensors.items() if LORA.part not in name}
    own = dict(model.named_parameters())
    for name, tensor in others.items():
        if name not in own:
            raise CheckpointError(f"{adapter.source}: has {name}, unknown to the model")
        if name.removesuffix(".weight") in modules:
            raise CheckpointError(f"{adapter.source}: has {name} itself beside its update")
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{adapter.source}: {name} is {tuple(tensor.shape)}, in the model "
                f"{tuple(own[name].shape)}"
            )
    if adapter.metadata.positions is False:
        unshare_positions(model, modules)
    for module, update in modules.values():
        _replace(module, "weight", _folded(module, update))
    for name, tensor in others.items():
        owner, _, last = name.rpartition(".")
        _replace(model.get_submodule(owner), last, tensor.to(own[name].dtype))


def _folded(module: nn.Module, update: Delta) -> Tensor:
    wide = torch.promote_types(module.weight.dtype, torch.float32)
    total = module.weight.detach().to(wide, copy=True)
    for part in update.parts:
        rows = out_in(module, total)[part.columns]
        rows.addmm_(part.B.to(wide), part.A.to(wide), alpha=update.scaling)
    return total.to(module.weight.dtype)


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(tensor, requires_grad=old.requires_grad))
