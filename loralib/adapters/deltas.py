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

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import BY_ITS_MODEL, CheckpointError
from ..functional import Delta, joined_with_start
from .adapter import Adapter
from .families import enabled_slices
from .metadata import AdapterMetadata

MAGNITUDE = "lora_magnitude_vector"
START_A, START_B = "lora_A_start", "lora_B_start"
PARTS = ("lora_A", "lora_B", MAGNITUDE, START_A, START_B)


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
        named = [name for name in tensors if "lora_" in name]
        others = sorted(name for name in named if name.rpartition(".")[2] not in PARTS)
        hint = f"; {others[0]} is a name of another library's format" if others else ""
        raise CheckpointError(f"{source}: holds no LoRA: no tensor ends in lora_A or lora_B{hint}")
    return ranks


def rank_of(tensors: Mapping[str, Tensor], source: str) -> int:
    """Returns the rank that all pairs among an adapter's tensors have.

    Raises:
        CheckpointError: there are no pairs, or their ranks differ.
    """
    ranks = {rank: module for module, rank in ranks_of(tensors, source).items()}
    if len(ranks) != 1:
        listed = ", ".join(f"{rank} ({module})" for rank, module in sorted(ranks.items()))
        raise CheckpointError(f"{source}: has {len(ranks)} ranks: {listed}; {BY_ITS_MODEL}")
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
            f"slices of its output they belong to: {BY_ITS_MODEL}"
        )
    width = rows // count
    starts = tuple(index * width for index, on in enumerate(enabled) if on)
    return starts, width * len(enabled)


def has_slices(adapter: Adapter, module: str, delta: Delta) -> bool:
    """Returns whether a delta is stacked or of one slice of the output, and not a stack's."""
    is_of_slices = len(delta.starts) > 1 or len(delta.B) != delta.out_features
    return is_of_slices and not adapter.lora.is_of_stack(module)
