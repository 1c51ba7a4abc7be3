"""The padded path, which computes padding as well, and attention by its formula.

    A  =  dropout( softmax( Q Kᵀ / √d  -  10000 · hidden ) ) ⊙ head_mask        out = A V

Models usually compute packed tokens (loralib/nn/packing.py) and never hold A. They take this path,
which costs as much time and memory as upstream, for what packed tokens cannot give: A itself, masks
of heads, masks of pairs of tokens, rows whose first position is padding (a classifier reads it all
the same), and graphs that `torch.jit.trace` or `torch.export` records for batches of other sizes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import loralib as lora
from loralib.nn.fast_paths import is_recorded
from loralib.nn.packing import PackedRows
from loralib.nn.routing import note_tokens

# Upstream's value: within float16's range, and far below any score.
HIDDEN = -10_000.0


def needs_padded_batch(
    attention_mask: Tensor | None, head_mask: Tensor | None, output_attentions: bool
) -> bool:
    """Returns whether a batch has to take this path, wherever its padding is."""
    return (
        output_attentions
        or head_mask is not None
        or (attention_mask is not None and attention_mask.dim() > 2)
        or is_recorded()
    )


class PaddedRows:
    """All positions of a batch, padding included, with the interface of `PackedRows`.

    Sizes are read from tensors, so they are variables in graphs that are recorded.

    Args:
        like: (batch, length, …).
        mask: (batch, length), zero at padding, or (batch, queries, keys), zero where a query may
            not attend; None without any.

    Attributes:
        shape: (batch, length).
        segments: as in `PackedRows`.

    Raises:
        ValueError: the mask does not have the batch's shape, or has a wrong number of dimensions.
    """

    def __init__(self, like: Tensor, mask: Tensor | None):
        self.shape = (like.shape[0], like.shape[1])
        self.mask = mask
        self._device = like.device
        if not is_recorded():
            _check_mask(self.shape, mask)
            self.segments = note_tokens(self.lengths)
        else:  # such a graph cannot have adapters of single rows
            self.segments = (slice(None),)

    @property
    def lengths(self) -> list[int]:
        """The number of columns, once per row."""
        return [int(self.shape[1])] * int(self.shape[0])

    @property
    def spans(self) -> list[int]:
        """The same as `lengths`."""
        return self.lengths

    @property
    def used_columns(self) -> int:
        """The number of columns."""
        return int(self.shape[1])

    @property
    def first(self) -> Tensor:
        """(batch,), where each row's first position is."""
        return torch.arange(self.shape[0], device=self._device) * self.shape[1]

    @property
    def positions(self) -> Tensor:
        """(batch · length,), the column that each position stands in."""
        columns = torch.arange(self.shape[1], device=self._device)
        return columns.expand(self.shape).flatten()

    def pack(self, x: Tensor) -> Tensor:
        """(batch, length, …) -> (batch · length, …).

        Raises:
            ValueError: x is of another batch or length.
        """
        if not is_recorded() and x.shape[:2] != self.shape:
            raise ValueError(f"the batch is {self.shape}, but a tensor is for {tuple(x.shape[:2])}")
        return x.flatten(0, 1)

    def as_batch(self, x: Tensor) -> Tensor:
        """(batch · length, …) -> (batch, length, …), without changing what is at padding."""
        return x.view(*self.shape, *x.shape[1:])

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(batch · length, …) -> (batch, length, …), `fill` where there is padding."""
        batch = self.as_batch(x)
        if self.mask is None or self.mask.dim() != 2:
            return batch
        return batch.masked_fill((self.mask == 0).view(*self.shape, *[1] * (x.dim() - 1)), fill)

    def hide_padding(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(batch · length, …) with `fill` at padding."""
        return self.pack(self.pad(x, fill))

    def show(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Does what `PackedRows.show` does: padding is shown as zeros, and x keeps its values."""
        padded = self.pad(x)
        return padded, self.pack(padded) + (x - self.hide_padding(x))

    def without_padding(self) -> PackedRows:
        """Returns the `PackedRows` of the tokens that are not padding."""
        if self.mask is not None and self.mask.dim() == 2:
            return PackedRows(self.mask)
        return PackedRows.from_lengths(self.lengths).to(self._device)


def _check_mask(shape: tuple[int, int], mask: Tensor | None) -> None:
    batch, length = shape
    allowed = ((batch, length), (batch, length, length))
    if mask is not None and tuple(mask.shape) not in allowed:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}, the batch is {shape}: it has to be "
            "(batch, length) or (batch, length, length)"
        )


def visible(mask: Tensor | None, causal: bool, like: Tensor) -> Tensor | None:
    """Returns where queries may attend, (batch, 1, 1 or queries, keys); None for everywhere.

    Args:
        mask: as in `PaddedRows`.
        causal: hide the tokens after each query, too; ignored if the mask has a row per query.
        like: (batch, length, …).
    """
    if mask is not None and mask.dim() == 3:
        return mask[:, None] != 0
    seen = None if mask is None else mask[:, None, None, :] != 0
    if not causal:
        return seen
    places = torch.arange(like.shape[1], device=like.device)
    before = (places <= places[:, None])[None, None]
    return before if seen is None else before & seen


@dataclass
class PaddedAttention:
    """A layer's attention on the padded path: its inputs, and the probabilities that it stores.

    Args:
        rows: the batch.
        seen: what `visible` returns.
        blank: tokens that may not attend to any get zeros, not the mean of all values.
        head_mask: (1 or batch, heads, 1 or queries, 1 or keys), factors of the probabilities; None
            for ones.
        is_shown: store the probabilities.

    Attributes:
        probabilities: (batch, heads, queries, keys), set when the layer is computed; None unless
            `is_shown`.
    """

    rows: PaddedRows
    seen: Tensor | None
    blank: bool = False
    head_mask: Tensor | None = None
    is_shown: bool = False
    probabilities: Tensor | None = field(default=None, init=False)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        dropout_p: float,
        scale: float,
        position_scores: Tensor | None = None,
    ) -> Tensor:
        """Computes attention by the formula in the module's docstring.

        Args:
            query, key, value: (tokens, hidden).
            heads: number of heads; divides hidden.
            dropout_p: dropout on the probabilities.
            scale: the factor of Q Kᵀ.
            position_scores: (batch, heads, queries, keys), added to the scores.

        Returns:
            (tokens, hidden).

        Raises:
            ValueError: `head_mask` is for another number of heads.
        """
        q, k, v = (self.by_head(x, heads).transpose(1, 2) for x in (query, key, value))
        scores = (q * scale) @ k.transpose(2, 3)
        if position_scores is not None:
            scores = scores + position_scores
        if self.seen is not None:
            scores = scores + (1.0 - self.seen.to(scores.dtype)) * HIDDEN
        probabilities = scores.softmax(dim=-1)
        if self.blank and self.seen is not None:
            probabilities = probabilities * self.seen.to(probabilities.dtype)
        if dropout_p > 0:
            probabilities = lora.dropout(probabilities, dropout_p, training=True)
        if self.head_mask is not None:
            if self.head_mask.shape[1] != heads:
                raise ValueError(
                    f"head_mask is for {self.head_mask.shape[1]} heads, a layer has {heads}"
                )
            probabilities = probabilities * self.head_mask.to(probabilities.dtype)
        if self.is_shown:
            self.probabilities = probabilities
        return self.rows.pack((probabilities @ v).transpose(1, 2).flatten(2))

    def by_head(self, x: Tensor, heads: int) -> Tensor:
        """(tokens, hidden) -> (batch, length, heads, dim)."""
        return self.rows.as_batch(x).unflatten(2, (heads, -1))
