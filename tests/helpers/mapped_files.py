"""Whether a tensor's memory is that of a mapped file; on Linux."""

from pathlib import Path

import pytest
from torch import Tensor

_MAPS = Path("/proc/self/maps")


def lies_in_file(tensor: Tensor, path: Path) -> bool:
    """Whether all of a tensor is in this process's mapping of a file; skips without such a list."""
    if not _MAPS.is_file():
        pytest.skip("the system does not list what is mapped")
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    for line in _MAPS.read_text().splitlines():
        if line.endswith(f" {path}"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            if start <= first and last <= end:
                return True
    return False
