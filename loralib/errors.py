"""The errors that a user can act on. Their messages are one line."""

import shutil
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not fit.

    The message is one line, even where a name that it quotes is not.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


class DiskFullError(OSError):
    """A file that does not fit on its disk. The message is one line.

    Args:
        path: the file.
        needed: how many bytes it takes, in words.
        is_quota: whether it is the user's quota that is used up, not the disk.
    """

    def __init__(self, path: Path, needed: str, is_quota: bool = False):
        self.path, self.needed, self.is_quota = path, needed, is_quota
        full = "the user's quota is used up" if is_quota else "the disk is full"
        free = shutil.disk_usage(path.parent).free
        super().__init__(
            f"{path}: {full}: the file takes {needed} bytes, the disk has {free:,} free; make room "
            "and start again"
        )


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


class TrainingError(RuntimeError):
    """A run that cannot continue. The message is one line."""
