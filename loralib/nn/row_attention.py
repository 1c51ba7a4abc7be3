"""Computes attention within rows of packed tokens on a CPU, for rows of similar length at once.

    S = Q Kᵀ / √d      P = softmax(S)      D = dropout(P)      O = D V      of a row and a head

Scores of the distances between tokens may be added to S; see distances.py. All of this is one
operation for autograd, which saves Q, K, V, P and one byte per element for dropout, and has no
views to record. Rows are computed in groups; see row_groups.py. Where a group is padded, padding
keys score -∞ with every token, and padding queries have a gradient of zero, so that padding adds to
no gradient.

If autograd records nothing, and there are no distances and no dropout, PyTorch's fused attention is
the better choice: it has scores in float32, and never holds all scores of long rows. It accepts
distances only as a bias of the scores' size.

In half precision, groups are padded to multiples of 16 tokens: oneDNN compiles a kernel for each
new size, which on a processor with AMX takes seven times as long as the product.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dropout as dropouts
from .distances import DistanceTerm
from .fast_paths import are_eager_paths_on
from .products import batched_product
from .row_groups import GroupedTokens, group_rows

_STEP = 16  # tokens

_Backward = Callable[..., tuple[Tensor | None, ...]]


def suits_cpu(
    query: Tensor, key: Tensor, value: Tensor, *distances: Tensor | None, dropout_p: float
) -> bool:
    """Returns whether `attend_rows` can compute this attention, and is preferred to PyTorch's.

    Args:
        query, key, value: what it would be given.
        distances: its c2p and p2c, as far as there are any.
        dropout_p: dropout on the attention probabilities.
    """
    terms = [x for x in distances if x is not None]
    given = [query, key, value, *terms]
    if not are_eager_paths_on(*given):
        return False
    computable = all(x.device.type == "cpu" and x.dtype == query.dtype for x in given)
    is_taken = bool(terms) or dropout_p > 0 or _is_recorded(given)
    return computable and is_taken and dropout_p < 1


def _is_recorded(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


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
    """Computes softmax(scale · q kᵀ + scores of distances) v within each row, by head.

    Args:
        query: (tokens, hidden), or (rows, hidden) for one query per row; on a CPU.
        key, value: (tokens, hidden), of the same dtype.
        lengths: the number of tokens in each row, at least 1.
        heads: number of heads, which are slices of hidden; divides it.
        dropout_p: dropout on the attention probabilities, below 1.
        causal: whether a token attends only to itself and those before it; needs a query for every
            token.
        scale: by default 1 / √d.
        c2p: (2 · length - 1, hidden), what a query is multiplied with for the distances key - query
            from 1 - length to length - 1. Rows may be shorter than `length`.
        p2c: of the same shape, what a key is multiplied with for the distances query - key.

    Returns:
        The same shape as `query`.
    """
    step = _STEP if query.dtype in (torch.bfloat16, torch.float16) else 1
    one_query = len(query) != len(key)
    queries, keys = group_rows(tuple(lengths), heads, one_query, step)
    scale = (query.shape[1] // heads) ** -0.5 if scale is None else scale
    recorded = _is_recorded((query, key, value, c2p, p2c))
    settings = queries, keys, dropout_p, scale, causal, recorded
    return _RowAttention.apply(query, key, value, c2p, p2c, *settings)


def _differentiable_once(backward: _Backward) -> _Backward:
    """Decorates a backward pass that autograd cannot record.

    Second derivatives are then an error, if one is computed: gradients that could be differentiated
    (`create_graph=True`) need not be. PyTorch's `once_differentiable` would leave terms out,
    silently, where `torch.autograd.grad` is asked for the derivatives by only some tensors.

    The backward pass that is decorated gets the saved tensors as its second argument. Among these
    have to be all inputs that may need gradients.
    """

    @functools.wraps(backward)
    def computed(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint gives them only once
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, saved, *grads)
        with torch.no_grad():
            found = backward(ctx, saved, *grads)
        return _Refusing.apply(len(found), *found, *grads, *saved)

    return computed


class _Refusing(torch.autograd.Function):
    """Returns some of the given tensors. Their derivatives by any of the others are an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "second derivatives cannot be computed through attention's fast path: set "
            "LORALIB_PLAIN=1, and choose PyTorch's math kernel (torch.nn.attention.sdpa_kernel)"
        )


class _RowAttention(torch.autograd.Function):
    """`attend_rows` of rows in groups."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        c2p: Tensor | None,
        p2c: Tensor | None,
        queries: GroupedTokens,
        keys: GroupedTokens,
        dropout_p: float,
        scale: float,
        causal: bool,
        recorded: bool,
    ) -> Tensor:
        ctx.queries, ctx.keys, ctx.dropout_p, ctx.scale = queries, keys, dropout_p, scale
        of_queries, of_keys = (_term(distances, keys) for distances in (c2p, p2c))
        masks = _keep_masks(queries, keys, dropout_p)
        sides = queries, keys, keys
        slots = [side.read(x) for side, x in zip(sides, (query, key, value), strict=True)]
        out_slots = queries.empty(like=query)
        probabilities = []
        for q, k, v, out, hidden, keep in zip(
            *map(GroupedTokens.split, (*sides, queries), (*slots, out_slots)),
            keys.hidden(),
            masks,
            strict=True,
        ):
            scores = batched_product(q, k.transpose(1, 2), scale)
            # PyTorch's softmax in half precision takes three times as long as in float32.
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            if of_queries is not None:
                of_queries.add_scores(q, scores)
            if of_keys is not None:
                of_keys.add_scores(k, scores.transpose(1, 2))
            if causal:  # this hides padding keys from all real queries as well
                _hide_later(scores)
            elif hidden is not None:
                scores.add_(hidden)
            p = torch.softmax(scores, dim=-1).to(query.dtype)
            batched_product(_zero_dropped(p, keep), v, dropouts.kept_scale(dropout_p), out)
            if recorded:
                probabilities.append(p)
        ctx.save_for_backward(query, key, value, c2p, p2c, *probabilities, *masks)
        return queries.pack(out_slots)

    @staticmethod
    @_differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor | None, ...], grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, c2p, p2c, *kept = saved  # P, then masks
        queries, keys, kept_scale = ctx.queries, ctx.keys, dropouts.kept_scale(ctx.dropout_p)
        of_queries = _term(c2p, keys, ctx.needs_input_grad[3])
        of_keys = _term(p2c, keys, ctx.needs_input_grad[4])
        sides = queries, keys, keys
        slots = [side.read(x) for side, x in zip(sides, (query, key, value), strict=True)]
        grads = [side.empty(like=grad) for side in sides]
        of_out = queries.clear_padding(queries.read(grad))
        for q, k, v, grad_q, grad_k, grad_v, g, p, keep in zip(
            *map(GroupedTokens.split, (*sides, *sides, queries), (*slots, *grads, of_out)),
            kept[: len(kept) // 2],
            kept[len(kept) // 2 :],
            strict=True,
        ):
            batched_product(_zero_dropped(p, keep).transpose(1, 2), g, kept_scale, grad_v)
            grad_p = _zero_dropped(batched_product(g, v.transpose(1, 2), kept_scale), keep)
            grad_s = _softmax_gradient(grad_p, p)
            batched_product(grad_s, k, ctx.scale, grad_q)
            batched_product(grad_s.transpose(1, 2), q, ctx.scale, grad_k)
            if of_queries is not None:
                grad_q.add_(of_queries.backward(q, grad_s))
            if of_keys is not None:
                grad_k.add_(of_keys.backward(k, grad_s.transpose(1, 2)))
        of_tokens = (side.pack(of_slots) for side, of_slots in zip(sides, grads, strict=True))
        of_distances = (_gradient(term) for term in (of_queries, of_keys))
        return *of_tokens, *of_distances, None, None, None, None, None, None


def _term(
    distances: Tensor | None, keys: GroupedTokens, is_trained: bool = False
) -> DistanceTerm | None:
    return None if distances is None else DistanceTerm(distances, keys.heads, keys.step, is_trained)


def _gradient(term: DistanceTerm | None) -> Tensor | None:
    return None if term is None else term.gradient()


def _keep_masks(
    queries: GroupedTokens, keys: GroupedTokens, dropout_p: float
) -> list[Tensor | None]:
    """Returns each group's dropout mask, (heads · rows, queries, keys); None without dropout."""
    if dropout_p == 0:
        return [None] * len(keys.shapes)
    shapes = [(*q, k[1]) for q, k in zip(queries.shapes, keys.shapes, strict=True)]
    sizes = [math.prod(shape) for shape in shapes]
    parts = dropouts.keep_mask([sum(sizes)], dropout_p).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _hide_later(scores: Tensor) -> None:
    """Sets tokens' scores with later tokens to -∞, even if they are NaN; (…, n, n), in place.

    Filling them by a mask takes several times as long.
    """
    later = scores.new_full(scores.shape[-2:], float("-inf")).triu_(1)
    scores.tril_().add_(later)


def _zero_dropped(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else dropouts.zero_dropped(x, keep)


def _softmax_gradient(grad: Tensor, p: Tensor) -> Tensor:
    """Returns the gradient of a softmax's input, p (grad - Σ p grad), for output p with `grad`.

    Uses PyTorch's private operation if it is there: one call instead of four.
    """
    if hasattr(torch, "_softmax_backward_data"):
        return torch._softmax_backward_data(grad, p, -1, p.dtype)
    weighted = grad * p
    return weighted.sub_(p * weighted.sum(dim=-1, keepdim=True))
