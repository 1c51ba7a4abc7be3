"""Chooses how a run multiplies large matrices: measured once per machine, shared by all processes.

loralib/nn/linear_methods.py has what to choose from. Measurements are kept in the process and in a
cache file of the user's, so that the next run need not measure, and adds in the same order. A run
uses only choices for its own products, so what other runs measured does not change its rounding.
"""

import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..io.atomic import atomic_write_text
from ..nn import products
from ..nn.products import FrozenWeight
from .distributed import gather_objects
from .launcher_env import rank
from .locks import in_turn

logger = logging.getLogger(__name__)

# What this process has chosen, by machine.
_chosen_before: dict[str, dict[str, str]] = {}
# Seconds to wait for another process that is writing the cache.
_PATIENCE = 10.0


def choose_products(
    weights: Sequence[FrozenWeight],
    dtype: torch.dtype,
    world_size: int,
    rows: int = products.MANY_ROWS,
    backward: bool = True,
) -> None:
    """Chooses how to multiply with a model's frozen weights on a CPU, before a run begins.

    Args:
        weights: `frozen_weights` of the model; the same in all processes.
        dtype: what products are computed in.
        world_size: the number of processes, all of which have to call this.
        rows, backward: as for `products.measure`.
    """
    machine, methods = products.machine(), {}
    if rank() == 0:
        path, before = _cache_path(), _chosen_before.setdefault(machine, {})
        known = {**_read(path).get(machine, {}), **before}
        methods = products.measure(weights, dtype, known, rows, backward)
        before.update(methods)
        measured = {key: method for key, method in methods.items() if known.get(key) != method}
        if measured:
            _add(path, machine, measured)
        if dtype is torch.bfloat16 and products.is_slow_in_bfloat16(methods):
            _say_that_it_is_slow()
    products.use_choices({"machine": machine, "methods": methods})
    # Processes on another kind of machine ignore these, and use the defaults.
    products.use_choices(gather_objects(products.choices(), world_size)[0])


@contextmanager
def chosen_products(
    weights: Sequence[FrozenWeight], dtype: torch.dtype, world_size: int
) -> Iterator[None]:
    """Calls `choose_products` for an evaluation, and restores the earlier choices afterwards.

    Args:
        weights, dtype, world_size: as for `choose_products`.
    """
    before = products.choices()
    choose_products(weights, dtype, world_size, backward=False)
    try:
        yield
    finally:
        products.use_choices(before)


@functools.cache  # once per process
def _say_that_it_is_slow() -> None:
    logger.info(
        "this processor multiplies in float32 faster than in bfloat16, so most products are "
        "computed in float32 and rounded: bfloat16 saves memory here, but not time"
    )


def frozen_weights(model: nn.Module) -> list[FrozenWeight]:
    """Returns the frozen matrices with which a model multiplies by loralib/nn/products.py.

    Such a layer has an attribute `matrix`, (out, in), and a `bias`. If it multiplies only some rows
    at a time, however many there are, it also has `rows_at_once`, a function from a dtype to their
    number.
    """
    found = []
    for layer in model.modules():
        matrix = getattr(layer, "matrix", None)
        if isinstance(matrix, Tensor) and not matrix.requires_grad:
            rows_at_once = getattr(layer, "rows_at_once", None)
            found.append(FrozenWeight(matrix, getattr(layer, "bias", None), rows_at_once))
    return found


def _cache_path() -> Path | None:
    """Returns the file in which choices are kept; None if the user has no home folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "loralib" / "products.json"
    except RuntimeError:  # neither HOME nor the user database has it, as in some containers
        return None


def _read(path: Path | None) -> dict[str, dict[str, str]]:
    """Reads what earlier runs chose, by machine."""
    if path is None:
        return {}
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, and is rewritten: %s", path, error)
        return {}


def _checked(content: Any) -> dict[str, dict[str, str]]:
    tables = [content, *content.values()] if isinstance(content, dict) else [content]
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError("it does not hold names of machines with their choices")
    if not all(isinstance(method, str) for table in tables[1:] for method in table.values()):
        raise ValueError("it holds a choice that is not a name")
    return content


def _add(path: Path | None, machine: str, measured: Mapping[str, str]) -> None:
    """Adds choices to those that the cache holds for a machine."""
    if path is None:
        logger.warning("no home folder to keep a cache in; the next run measures again: set HOME")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_turn(path.with_suffix(".lock"), _PATIENCE):
            everything = _read(path)
            everything[machine] = {**everything.get(machine, {}), **measured}
            atomic_write_text(path, json.dumps(everything, indent=1))
    except OSError as error:
        logger.warning("%s cannot be written; the next run measures again: %s", path, error)
