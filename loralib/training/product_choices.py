"""How this run multiplies its large matrices: measured once a machine, the same in all processes.

See loralib/nn/products.py for the ways that there are. What was chosen is kept in the user's cache,
so that the next run need not measure, and adds in the same order.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from ..io.atomic import atomic_write
from ..nn import products
from .distributed import gather_objects
from .process import rank

logger = logging.getLogger(__name__)

# A matrix, (out, in), and the bias of its layer.
FrozenWeight: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def choose_products(
    weights: Sequence[FrozenWeight],
    dtype: torch.dtype,
    world_size: int,
    rows: int = products.MANY_ROWS,
    backward: bool = True,
) -> None:
    """Chooses how to multiply with a model's frozen weights; on a CPU, before the first step.

    Args:
        weights: `frozen_weights` of the model; the same in all processes.
        dtype: what products are computed in.
        world_size: number of processes, which all have to call this.
        rows, backward: as for `products.measure`.
    """
    if rank() == 0:
        path = _cache_path()
        known = _read(path)
        products.use_choices({"machine": products.machine(), "ways": known})
        products.measure(weights, dtype, rows, backward)
        if products.choices()["ways"] != known:
            _write(path)
    if world_size > 1:
        # Processes on a machine of another kind take what is usual there.
        products.use_choices(gather_objects(products.choices(), world_size)[0])


def frozen_weights(model: nn.Module) -> list[FrozenWeight]:
    """The frozen matrices that `products.linear` multiplies with, each with its bias."""
    layers = [module for module in model.modules() if isinstance(module, products.HasMatrix)]
    matrices = [(layer.matrix, layer.bias) for layer in layers]
    return [(matrix, bias) for matrix, bias in matrices if not matrix.requires_grad]


def _cache_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "loralib" / "products.json"


def _read_all(path: Path) -> dict[str, dict[str, str]]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, and is written anew: %s", path, error)
        return {}


def _read(path: Path) -> dict[str, str]:
    """What was chosen on this machine before."""
    return _read_all(path).get(products.machine(), {})


def _write(path: Path) -> None:
    chosen = products.choices()
    everything = {**_read_all(path), chosen["machine"]: chosen["ways"]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as unfinished:
            unfinished.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written; the next run measures again: %s", path, error)
