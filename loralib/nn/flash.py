"""Flash attention within rows of several lengths that are laid end to end: one kernel of a GPU.

PyTorch has two public ways to it. `torch.nn.attention.varlen.varlen_attn` has no dropout, and
nested tensors take a GPU longer to launch than to compute. Both call the operator that is called
here; where there is none, callers take `F.scaled_dot_product_attention` of padded rows.

Source: FlashAttention-2, arXiv 2307.08691.
"""

import torch
from torch import Tensor

from .fast_paths import are_fast_paths_off, is_transformed

# In one head; the kernel takes multiples of eight. Of its 256, not every GPU has the shared memory
# that training takes above these.
_WIDEST = 192
# NVIDIA's Ampere, the first architecture that has it.
_FIRST_ARCHITECTURE = 8


def suits(query: Tensor, key: Tensor, value: Tensor, heads: int) -> bool:
    """Whether there is a kernel for these: (queries, hidden), and (tokens, hidden) of one dtype."""
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
    """Whether PyTorch has it for this device, and nobody has switched it off.

    Asked in words that torch.compile takes for constants.
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
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    heads: int,
    dropout_p: float,
    causal: bool,
) -> Tensor:
    """softmax(q kᵀ / √d) v within each row, with a gradient.

    Args:
        query: (queries, hidden), what `suits` says there is a kernel for.
        key, value: (tokens, hidden).
        ends: (rows + 1,), int32, of queries and of tokens: 0, and where each row ends.
        longest: the most queries and tokens that a row has.
        heads: number of heads.
        dropout_p: dropout on the attention probabilities.
        causal: a token looks at itself and at those before it.

    Returns:
        (queries, hidden).
    """
    by_head = (x.unflatten(1, (heads, -1)) for x in (query, key, value))
    out, *_ = torch.ops.aten._flash_attention_forward(
        *by_head, *ends, *longest, dropout_p, causal, return_debug_mask=False
    )
    return out.flatten(1)
