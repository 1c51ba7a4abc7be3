"""Computes attention scores of tokens' contents with the relative distances to other tokens.

For n tokens that look at m others, this takes one product with all distances that occur, and then a
view of the result in which every row starts one element before the row above it (`skew`):

    key - query   -2  -1   0   1   2                        key  0  1  2
    query 0        .   .   a   b   c                             a  b  c
    query 1        .   d   e   f   .         ----->              d  e  f
    query 2        g   h   i   .   .                             g  h  i

This needs no gather with an index as large as the scores, and sums gradients in a fixed order.
"""

import math
from collections.abc import Iterator
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import batched_product

_BLOCK = 64  # tokens; blocks of 48 to 128 take about as long


def skew(scores: Tensor, columns: int) -> Tensor:
    """(…, n, n + columns - 1) -> (…, n, columns): out[…, i, j] = scores[…, i, n - 1 - i + j].

    Returns a view of `scores`, or of a contiguous copy of it. If `scores` are wider than shown, the
    extra columns on the right are not read.
    """
    n, width = scores.shape[-2:]
    if n == 1:
        return scores[..., :columns]
    scores = scores.contiguous()
    # The same without as_strided: torch.compile does not know storage offsets, and a trace would
    # record the sizes and strides as constants.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        flat = scores.flatten(-2)[..., n - 1 : n - 1 + n * (width - 1)]
        return flat.unflatten(-1, (n, width - 1))[..., :columns]
    start = scores.storage_offset() + n - 1
    strides = (*scores.stride()[:-2], width - 1, 1)
    return scores.as_strided((*scores.shape[:-1], columns), strides, start)


class DistanceTerm:
    """Scores of tokens with distances, and their gradients, for rows of one length at a time.

    Not recorded by autograd.

    Args:
        distances: (2 · length - 1, hidden), the vectors of the distances other - token from
            1 - length to length - 1; on a CPU.
        heads: number of heads; divides hidden.
        step: rows are padded to a multiple of this many tokens. The number of distances in a
            product is a multiple of it, too, so one more is multiplied than can occur.
        is_trained: whether `distances` need a gradient.
    """

    def __init__(self, distances: Tensor, heads: int, step: int, is_trained: bool):
        length = len(distances) // 2 + 1
        self._heads, self._step, self._given = heads, step, len(distances)
        self._fill = -length % step
        padded = F.pad(distances, (0, 0, self._fill, self._fill + 1))
        self._by_head = padded.unflatten(1, (heads, -1))
        self._zero = length - 1 + self._fill
        # Many rows add to it, so half precision is summed in float32.
        sums = torch.promote_types(distances.dtype, torch.float32)
        self._gradient = torch.zeros_like(self._vectors, dtype=sums) if is_trained else None

    @cached_property
    def _vectors(self) -> Tensor:
        """(heads, distances, d)."""
        return self._by_head.transpose(0, 1).contiguous()

    @cached_property
    def _columns(self) -> Tensor:
        """(heads, d, distances), a layout that takes two thirds of the time in half precision."""
        return self._by_head.permute(1, 2, 0).contiguous()

    def add_scores(self, content: Tensor, scores: Tensor) -> None:
        """Adds the rows' scores with the distances to `scores`.

        Args:
            content: (heads · rows, n, d).
            scores: (heads · rows, n, others), changed in place.
        """
        n, others = scores.shape[1:]
        for tokens, which in self._blocks(n, others):
            own = self._head_by_head(content[:, tokens])
            products = batched_product(own, self._columns[..., which])
            by_row = products.view(len(scores), -1, products.shape[2])
            # Converted first: an addition of rows to columns that also converts takes longer.
            scores[:, tokens].add_(skew(by_row, others).to(scores.dtype))

    def backward(self, content: Tensor, grad: Tensor) -> Tensor:
        """Returns the gradient of the rows' content, and accumulates that of the distances.

        Args:
            content: (heads · rows, n, d), as given to `add_scores`.
            grad: (heads · rows, n, others), the scores' gradient.
        """
        n, others = grad.shape[1:]
        parts = []
        for tokens, which in self._blocks(n, others):
            some, vectors = grad[:, tokens], self._vectors[:, which]
            spread = grad.new_zeros(*some.shape[:2], vectors.shape[1])
            skew(spread, others).copy_(some)
            by_distance = self._head_by_head(spread)
            if self._gradient is not None:
                own = self._head_by_head(content[:, tokens])
                self._gradient[:, which] += batched_product(by_distance.transpose(1, 2), own)
            parts.append(batched_product(by_distance, vectors).view(*some.shape[:2], -1))
        return torch.cat(parts, dim=1)

    def _head_by_head(self, x: Tensor) -> Tensor:
        """(heads · rows, n, …) -> (heads, rows · n, …)."""
        return x.reshape(self._heads, -1, x.shape[2])

    def gradient(self) -> Tensor | None:
        """Returns the distances' gradient, in their shape and dtype; None if they need none."""
        if self._gradient is None:
            return None
        given = slice(self._fill, self._fill + self._given)
        return self._gradient[:, given].transpose(0, 1).flatten(1).to(self._by_head.dtype)

    def _blocks(self, n: int, others: int) -> Iterator[tuple[slice, slice]]:
        """Yields blocks of a row's n tokens, each with the distances from its tokens to the others.

        A product of n tokens at once would multiply each with n - 1 distances more than it has
        others, which is wasteful for long rows.
        """
        zero, size = self._zero, _round_up(math.ceil(n / math.ceil(n / _BLOCK)), self._step)
        for start in range(0, n, size):
            stop = min(start + size, n)
            yield slice(start, stop), slice(zero - stop + 1, zero + others - start + 1)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
