"""One switch for what is done for speed alone on a CPU: plain, PyTorch's own operations compute.

These are the products with frozen weights, attention, and dropout; and no batch is filled up to
sizes that recur. Without dropout, results differ in rounding; with it, PyTorch draws other numbers.
The switch is for comparing, and for finding out whether a fault lies here; it is the environment
variable ``LORALIB_PLAIN=1``, or `plain`. It is on by itself where PyTorch transforms what is
computed (`torch.func`, forward-mode derivatives), for which what is fast here has no rules.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad

_plain = os.environ.get("LORALIB_PLAIN", "0") not in ("", "0")


def is_plain() -> bool:
    """Whether PyTorch's own operations are to compute."""
    return _plain or is_transformed()


def is_transformed() -> bool:
    """Whether PyTorch transforms what is computed: vmap, grad, jvp, or dual numbers are in effect.

    By private names, because there are no public ones.
    """
    in_transform = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    return in_transform() or getattr(forward_ad, "_current_level", -1) >= 0


@contextmanager
def plain(on: bool = True) -> Iterator[None]:
    """Turns fast paths off, or with ``on=False`` on, within the block; for the whole process."""
    global _plain
    before, _plain = _plain, on
    try:
        yield
    finally:
        _plain = before
