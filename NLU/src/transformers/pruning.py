"""Removes attention heads from layers, permanently.

In a layer with heads of dimension d, a head owns d rows of the weights of query, key and value, and
d columns of the output's weight. A LoRA update B A loses the same rows of B, or columns of A.
Without a head, a layer computes what it computed with that head masked by zero.
Source: "Are Sixteen Heads Really Better than One?", arXiv 1905.10650.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

# The tensors of a linear layer, with or without LoRA, that have a row for each output …
_BY_ROW = ("weight", "bias", "lora_B", "lora_B_start", "lora_magnitude_vector")
# … and those that have a column for each input.
_BY_COLUMN = ("weight", "lora_A", "lora_A_start")


def heads_by_layer(
    wanted: Mapping[int, Iterable[int]], layers: int, heads: int
) -> dict[int, list[int]]:
    """Checks the heads to be pruned, and returns them by layers counted from the first.

    Args:
        wanted: layer -> heads; layer -1 is the last one.
        layers: the number of layers.
        heads: the number of heads per layer before any was pruned, by which they are numbered.

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
    """Keeps only some outputs of a linear layer, in place.

    Args:
        layer: a layer with or without LoRA.
        kept: (outputs,), the indices of those to keep.
    """
    _select(layer, _BY_ROW, 0, kept)
    layer.out_features = len(kept)


def keep_columns(layer: nn.Linear, kept: Tensor) -> None:
    """Keeps only some inputs of a linear layer; arguments as in `keep_rows`."""
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
    """Returns the rows or columns of heads, given by their indices among the layer's own heads."""
    return torch.cat([torch.arange(head * dim, (head + 1) * dim) for head in heads])
