"""Flash attention on a GPU: one kernel for rows of several lengths that are laid end to end.

PyTorch has two public interfaces to it: `torch.nn.attention.varlen.varlen_attn`, which has no
dropout, and nested tensors, which take longer to launch than the GPU takes to compute. Both call
the operator that is called here. Where it is missing, callers use `F.scaled_dot_product_attention`
on padded rows.

Source: FlashAttention-2, arXiv 2307.08691.
"""

import torch
from torch import Tensor

from .fast_paths import are_fast_paths_off, is_transformed

# The widest head, which has to be a multiple of eight. The kernel takes up to 256, but not every
# GPU has the shared memory that training needs above 192.
_WIDEST = 192
# NVIDIA's Ampere, the first architecture with the kernel.
_FIRST_ARCHITECTURE = 8


def suits(query: Tensor, key: Tensor, value: Tensor, heads: int) -> bool:
    """Returns whether the kernel can compute attention of these tensors.

    Args:
        query: (queries, hidden).
        key, value: (tokens, hidden), of the same dtype.
        heads: number of heads; divides hidden.
    """
    width = query.shape[1] // heads
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and width % 8 == 0
        and width <= _WIDEST
        and _is_there(query.device)
        and not (are_fast_paths_off() or is_transformed(query, key, value))
    )


def _is_there(device: torch.device) -> bool:
    """Returns whether PyTorch has the kernel for this device, and it is not switched off.

    Uses only calls that torch.compile treats as constants.
    """
    return (
        torch.version.hip is None
        and torch._C._get_flash_sdp_enabled()
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_properties(device).major >= _FIRST_ARCHITECTURE
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    heads: int,
    dropout_p: float,
    causal: bool,
) -> Tensor:
    """Computes softmax(q kᵀ / √d) v within each row; recorded by autograd.

    Args:
        query: (tokens, hidden), or (rows, hidden) for one query per row; `suits` is true for it.
        key, value: (tokens, hidden).
        ends: the rows' cumulative lengths, (rows + 1,), int32: 0, then the end of each row.
        longest: the most tokens of a row.
        heads: number of heads.
        dropout_p: dropout on the attention probabilities.
        causal: whether a token attends only to itself and those before it.

    Returns:
        The same shape as `query`.
    """
    ends_of_queries, queries = ends, longest
    if len(query) != len(key):
        ends_of_queries = torch.arange(len(ends), dtype=ends.dtype, device=ends.device)
        queries = 1
    by_head = (x.unflatten(1, (heads, -1)) for x in (query, key, value))
    both = ends_of_queries, ends, queries, longest
    out, *_ = torch.ops.aten._flash_attention_forward(
        *by_head, *both, dropout_p, causal, return_debug_mask=False
    )
    return out.flatten(1)
