"""Imports Matplotlib, which is optional, and writes its pictures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By a file's suffix, the metadata with which Matplotlib would record the time and its version.
_LEFT_OUT: Mapping[str, Mapping[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def import_figure() -> type[Figure]:
    """Imports Matplotlib's `Figure`, which draws without a window.

    Raises:
        ValueError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the picture needs matplotlib: pip install matplotlib") from error
    return Figure


def check_can_save(path: str | os.PathLike) -> None:
    """Checks, before the picture's data is computed, that it can be saved as `path`.

    Raises:
        ValueError: Matplotlib is not installed, or the suffix is not one of the supported formats.
        FileNotFoundError: the folder does not exist.
    """
    path = Path(path)
    import_figure()
    if path.suffix not in _LEFT_OUT:
        known = ", ".join(_LEFT_OUT)
        raise ValueError(f"{path}: unknown format of a picture; end the name in one of {known}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")


def save_figure(
    figure: Figure, path: str | os.PathLike, dpi: float = 100, description: str | None = None
) -> None:
    """Writes a figure atomically.

    The same figure and version of Matplotlib give the same bytes.

    Args:
        figure: the figure.
        path: the file, whose suffix is ``.png``, ``.svg`` or ``.pdf``.
        dpi: dots per inch, for a PNG.
        description: text that is stored in a PNG, under PNG's standard keyword ``Description``.

    Raises:
        KeyError: the file has another suffix. `check_can_save` finds that out in advance.
        OSError: the file cannot be written.
    """
    from matplotlib import rc_context

    suffix = Path(path).suffix
    metadata: dict[str, str | None] = {**_LEFT_OUT[suffix]}
    options: dict[str, Any] = {}
    if suffix == ".png":
        if description:
            metadata["Description"] = description
        options = {"dpi": dpi, "pil_kwargs": {"optimize": True}}
    with atomic_write(path) as temporary, rc_context({"svg.hashsalt": "loralib"}):
        figure.savefig(temporary, format=suffix[1:], metadata=metadata, **options)
