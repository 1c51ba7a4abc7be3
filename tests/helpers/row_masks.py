"""Attention's dropout masks, row by row."""

import math
from collections.abc import Sequence

from torch import Tensor

from loralib.nn.row_groups import _divide, group_rows


def masks_by_row(
    drawn: Tensor, lengths: Sequence[int], heads: int, one_query: bool, step: int = 1
) -> list[Tensor]:
    """Splits what `attend_rows` drew for all groups into masks by row: (heads, queries, keys)."""
    groups = _divide([-(-length // step) * step for length in lengths], heads)
    queries, keys = group_rows(tuple(lengths), heads, one_query, step)
    found, done = {}, 0
    for rows, q, k in zip(groups, queries.shapes, keys.shapes, strict=True):
        size = math.prod(q) * k[1]
        mask = drawn[done : done + size].view(heads, len(rows), q[1], k[1])
        done += size
        for index, row in enumerate(rows):
            found[row] = mask[:, index, : 1 if one_query else lengths[row], : lengths[row]]
    assert done == drawn.numel()
    return [found[row] for row in range(len(lengths))]
