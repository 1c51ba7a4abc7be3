"""One switch for what is done for speed alone on a CPU: plain, PyTorch's own operations compute.

These are the products with frozen weights, attention, and dropout; and no batch is filled up to
sizes that recur. Without dropout, results differ in rounding; with it, PyTorch draws other numbers.
The switch is for comparing, and for finding out whether a fault lies here; it is the environment
variable ``LORALIB_PLAIN=1``, or `plain`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_plain = os.environ.get("LORALIB_PLAIN", "0") not in ("", "0")


def is_plain() -> bool:
    """Whether PyTorch's own operations are to compute."""
    return _plain


@contextmanager
def plain(on: bool = True) -> Iterator[None]:
    """Turns fast paths off, or with ``on=False`` on, within the block; for the whole process."""
    global _plain
    before, _plain = _plain, on
    try:
        yield
    finally:
        _plain = before
