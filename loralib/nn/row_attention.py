"""Attention within rows of packed tokens, for training on a CPU: row by row, without padding.

    S = Q Kᵀ / √d      P = softmax(S)      D = dropout(P)      O = D V      of a row and a head

To S may be added what the distances between tokens score; see distances.py. All is one operation
for autograd, which keeps of it Q, K, V, P and one byte an element for what was dropped. A row's
matrices are small enough for the processor's cache, from where the next operation takes them; and
no call is spent on views that are to be recorded.

In half precision a row's matrices are filled up with zeros to a multiple of 16 tokens: oneDNN
compiles a kernel for each size that it meets, which takes a processor with AMX seven times as long
as the product.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dropout as dropouts
from .distances import DistanceTerm
from .plain import is_plain

_STEP = 16  # tokens


def trains_on_cpu(*tensors: Tensor | None, dropout_p: float) -> bool:
    """Whether attention is recorded, or has dropout, where `attend_rows` can compute it.

    Args:
        tensors: queries, keys, values, and the terms of distances that there are.
        dropout_p: dropout on the attention probabilities.
    """
    if is_plain() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    given = [x for x in tensors if x is not None]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    computable = all(x.device.type == "cpu" and x.dtype == given[0].dtype for x in given)
    return computable and (recorded or dropout_p > 0) and dropout_p < 1


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    heads: int,
    dropout_p: float,
    causal: bool = False,
    scale: float | None = None,
    c2p: Tensor | None = None,
    p2c: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + distances' scores) v within each row, over `heads` slices of hidden.

    Args:
        query: (tokens, hidden), or (rows, hidden) for one query a row; on a CPU.
        key, value: (tokens, hidden), of the same dtype.
        lengths: the rows' tokens.
        heads: number of heads; divides hidden.
        dropout_p: dropout on the attention probabilities, below 1.
        causal: a token looks at itself and at those before it; needs a query for every token.
        scale: 1 / √d where not given.
        c2p: (2 · length - 1, hidden), what a query is multiplied with for the distances key - query
            from 1 - length to length - 1, of rows that may be shorter than `length`.
        p2c: the same, what a key is multiplied with for the distances query - key.

    Returns:
        The same shape as `query`.
    """
    # Distances have sizes of their own.
    is_filled = query.dtype in (torch.bfloat16, torch.float16) and c2p is None and p2c is None
    step = _STEP if is_filled else 1
    rows = _Rows(tuple(lengths), heads, one_query=len(query) != len(key), step=step)
    scale = (query.shape[1] // heads) ** -0.5 if scale is None else scale
    return _RowAttention.apply(query, key, value, c2p, p2c, rows, dropout_p, scale, causal)


class _RowAttention(torch.autograd.Function):
    """`attend_rows`; its docstring explains the arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        c2p: Tensor | None,
        p2c: Tensor | None,
        rows: "_Rows",
        dropout_p: float,
        scale: float,
        causal: bool,
    ) -> Tensor:
        ctx.rows, ctx.dropout_p, ctx.scale = rows, dropout_p, scale
        of_queries, of_keys = (_term(distances, rows.heads) for distances in (c2p, p2c))
        probabilities, out = query.new_empty(sum(rows.sizes)), torch.empty_like(query)
        mask = dropouts.keep_mask(probabilities.shape, dropout_p) if dropout_p > 0 else None
        for q, k, v, p, keep, o in zip(
            rows.of_queries(query),
            rows.of_keys(key),
            rows.of_keys(value),
            rows.of_scores(probabilities),
            rows.of_mask(mask),
            rows.of_queries(out),
            strict=True,
        ):
            q, k = rows.filled(q), rows.filled(k)
            scores = _inside(torch.bmm(q, k.transpose(1, 2)), p)
            # Not in half precision, whose softmax takes PyTorch three times as long.
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
            if of_queries is not None:
                of_queries.add_scores(q, scores)
            if of_keys is not None:
                of_keys.add_scores(k, scores.transpose(1, 2))
            if causal:
                scores.masked_fill_(_later(scores), float("-inf"))
            p.copy_(torch.softmax(scores, dim=-1))
            dropped = rows.filled(_dropped(p, keep, dropout_p), both=True)
            o.copy_(_inside(torch.bmm(dropped, rows.filled(v)), o))
        ctx.save_for_backward(query, key, value, c2p, p2c, probabilities, mask)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, c2p, p2c, probabilities, mask = ctx.saved_tensors
        rows, dropout_p = ctx.rows, ctx.dropout_p
        of_queries = _term(c2p, rows.heads, ctx.needs_input_grad[3])
        of_keys = _term(p2c, rows.heads, ctx.needs_input_grad[4])
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for q, k, v, p, keep, g, grad_q, grad_k, grad_v in zip(
            rows.of_queries(query),
            rows.of_keys(key),
            rows.of_keys(value),
            rows.of_scores(probabilities),
            rows.of_mask(mask),
            rows.of_queries(grad),
            rows.of_queries(grads[0]),
            rows.of_keys(grads[1]),
            rows.of_keys(grads[2]),
            strict=True,
        ):
            q, k, g = rows.filled(q), rows.filled(k), rows.filled(g)
            dropped = rows.filled(_dropped(p, keep, dropout_p), both=True)
            grad_v.copy_(_inside(torch.bmm(dropped.transpose(1, 2), g), v))
            # Zero beyond the row's tokens, because g is.
            grad_s = torch.bmm(g, rows.filled(v).transpose(1, 2))
            _to_softmax_gradient(_inside(grad_s, p), p, _inside(dropped, p))
            if of_queries is not None:
                from_c2p = of_queries.backward(q, grad_s)
            if of_keys is not None:
                from_p2c = of_keys.backward(k, grad_s.transpose(1, 2))
            grad_s.mul_(ctx.scale)
            grad_q.copy_(_inside(torch.bmm(grad_s, k), grad_q))
            grad_k.copy_(_inside(torch.bmm(grad_s.transpose(1, 2), q), grad_k))
            if of_queries is not None:
                grad_q.add_(from_c2p)
            if of_keys is not None:
                grad_k.add_(from_p2c)
        of_distances = (_gradient(term) for term in (of_queries, of_keys))
        return *grads, *of_distances, None, None, None, None


def _term(distances: Tensor | None, heads: int, is_trained: bool = False) -> DistanceTerm | None:
    return None if distances is None else DistanceTerm(distances, heads, is_trained)


def _gradient(term: DistanceTerm | None) -> Tensor | None:
    return None if term is None else term.gradient()


class _Rows:
    """Tensors of packed tokens as one view a row, by head.

    Args:
        lengths: the rows' tokens.
        heads: number of heads.
        one_query: a row has one query, not one for each token.
        step: numbers of tokens are rounded up to multiples of it where they are multiplied.

    Attributes:
        sizes: numbers of scores, of all heads, in each row.
    """

    def __init__(self, lengths: tuple[int, ...], heads: int, one_query: bool, step: int):
        self.lengths, self.heads, self.step = lengths, heads, step
        self.queries = (1,) * len(lengths) if one_query else lengths
        self.sizes = [heads * n * m for n, m in zip(self.queries, lengths, strict=True)]

    def of_queries(self, x: Tensor) -> Iterator[Tensor]:
        """(queries, hidden) -> for each row (heads, queries, d)."""
        return (self._by_head(row) for row in x.split(self.queries))

    def of_keys(self, x: Tensor) -> Iterator[Tensor]:
        """(tokens, hidden) -> for each row (heads, keys, d)."""
        return (self._by_head(row) for row in x.split(self.lengths))

    def of_scores(self, x: Tensor) -> Iterator[Tensor]:
        """(scores of all rows,) -> for each row (heads, queries, keys)."""
        shapes = zip(x.split(self.sizes), self.queries, self.lengths, strict=True)
        return (row.view(self.heads, n, m) for row, n, m in shapes)

    def of_mask(self, mask: Tensor | None) -> Iterator[Tensor | None]:
        """As `of_scores`; None for each row without dropout."""
        return iter([None] * len(self.lengths)) if mask is None else self.of_scores(mask)

    def filled(self, x: Tensor, both: bool = False) -> Tensor:
        """(heads, n, m), contiguous, with zeros up to a multiple of `step` of n; of m if `both`."""
        _, n, m = x.shape
        fill_n, fill_m = -n % self.step, -m % self.step if both else 0
        if not (fill_n or fill_m):
            return x.contiguous()
        return F.pad(x, (0, fill_m, 0, fill_n))

    def _by_head(self, row: Tensor) -> Tensor:
        return row.unflatten(1, (self.heads, -1)).transpose(0, 1)


def _inside(filled: Tensor, like: Tensor) -> Tensor:
    """What of a matrix that `_Rows.filled` enlarged is of tokens; `like` has its size."""
    return filled if filled.shape == like.shape else filled[:, : like.shape[1], : like.shape[2]]


def _later(scores: Tensor) -> Tensor:
    """Where (…, n, n) scores are those of a token and a later one."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)


def _dropped(x: Tensor, keep: Tensor | None, p: float) -> Tensor:
    return x if keep is None else dropouts.apply_mask(x, keep, p)


def _to_softmax_gradient(grad: Tensor, p: Tensor, dropped: Tensor) -> None:
    """D ⊙ grad - p Σ D ⊙ grad, the gradient of what a softmax gave p for, in place.

    Args:
        grad: of D, which is p after dropout; it becomes the gradient.
        p: (…, n, m), rows that sum to 1.
        dropped: D.
    """
    weighted = grad.mul_(dropped)
    weighted.sub_(p * weighted.sum(dim=-1, keepdim=True))
