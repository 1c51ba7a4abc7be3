"""Taking attention heads out of layers, for good.

With H heads of dim d, a head's part of a layer are d rows of the query's, the key's and the value's
weight and d columns of the output's. A LoRA update B A loses the same rows of B, or columns of A.
A layer without a head computes what it computed with that head masked by zero.
Source: "Are Sixteen Heads Really Better than One?", arXiv 1905.10650.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

# Tensors of a linear layer, with LoRA or without, that have a row for each output …
_BY_ROW = ("weight", "bias", "lora_B", "lora_B_start", "lora_magnitude_vector")
# … and those that have a column for each input.
_BY_COLUMN = ("weight", "lora_A", "lora_A_start")


def heads_by_layer(
    wanted: Mapping[int, Iterable[int]], layers: int, heads: int
) -> dict[int, list[int]]:
    """Heads to be pruned, by layers that are counted from the first.

    Args:
        wanted: heads by layer, where -1 is the last one.
        layers: how many there are.
        heads: how many a layer had before any was pruned, by which they are numbered.

    Raises:
        ValueError: there is no such layer or head.
    """
    found: dict[int, set[int]] = {}
    for layer, numbers in wanted.items():
        if not -layers <= layer < layers:
            raise ValueError(f"prune_heads: the model has layers 0 to {layers - 1}, not {layer}")
        for head in numbers:
            if not 0 <= head < heads:
                raise ValueError(f"prune_heads: layers have heads 0 to {heads - 1}, not {head}")
        found.setdefault(layer % layers, set()).update(numbers)
    return {layer: sorted(numbers) for layer, numbers in sorted(found.items())}


def keep_rows(layer: nn.Linear, kept: Tensor) -> None:
    """Keeps some outputs of a linear layer, in place.

    Args:
        layer: with LoRA or without.
        kept: (outputs,), their numbers.
    """
    _select(layer, _BY_ROW, 0, kept)
    layer.out_features = len(kept)


def keep_columns(layer: nn.Linear, kept: Tensor) -> None:
    """Keeps some inputs of a linear layer, likewise."""
    _select(layer, _BY_COLUMN, 1, kept)
    layer.in_features = len(kept)


def _select(layer: nn.Linear, names: Iterable[str], dim: int, kept: Tensor) -> None:
    for name in names:
        tensor = getattr(layer, name, None)
        if tensor is None:
            continue
        part = tensor.detach().index_select(dim, kept.to(tensor.device)).contiguous()
        if isinstance(tensor, nn.Parameter):
            part = nn.Parameter(part, requires_grad=tensor.requires_grad)
        setattr(layer, name, part)
    layer.train(layer.training)  # drops LoRA's merged copy of the whole weight


def places_of_heads(heads: Iterable[int], dim: int) -> Tensor:
    """The rows or columns of heads, by their places among those that a layer has."""
    return torch.cat([torch.arange(head * dim, (head + 1) * dim) for head in heads])
