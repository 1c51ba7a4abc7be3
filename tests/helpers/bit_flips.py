"""Files with a flipped bit, as if they were damaged in transit."""

from pathlib import Path

from torch import Tensor


def flip_bit_in(path: Path, tensor: Tensor) -> None:
    """Flips a bit of a tensor's first value in a file that holds the tensor uncompressed."""
    content, values = bytearray(path.read_bytes()), tensor.contiguous().numpy().tobytes()
    assert content.count(values) == 1
    content[content.index(values)] ^= 1
    path.write_bytes(content)
