"""Files in which a value has changed on its way."""

from pathlib import Path

from torch import Tensor


def flip_in(path: Path, tensor: Tensor) -> None:
    """Flips a bit of a tensor's first value in a file that holds the tensor uncompressed."""
    content, held = bytearray(path.read_bytes()), tensor.contiguous().numpy().tobytes()
    assert content.count(held) == 1
    content[content.index(held)] ^= 1
    path.write_bytes(content)
