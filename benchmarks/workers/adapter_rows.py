"""Batches of mixed_adapters.py, and a check that each row gets its adapter. Its plan has, besides
timing.py's and roberta_rows.py's rank, alpha and pad_to,

batches    each {"lengths": of the rows, none for switches; "repeats": how many switches}
adapters   how many there are, which the rows of a batch have in turn; 0 for none
way        "batch", or "switch": from adapter to adapter, without computing
"""

from collections.abc import Callable, Iterable

import roberta_rows
import torch
from timing import Batch
from torch import Tensor

# Modules that adapters update, by the last part of their names.
TARGETS = ("query", "value")
# What a row's logits, about 1, may differ by: among other rows, sums are rounded otherwise.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}

# Inputs, and one adapter for all rows or one for each -> logits (rows, labels).
LogitsOf = Callable[[dict[str, Tensor], str | list[str]], Tensor]


def adapter_names(plan: dict) -> list[str]:
    """What the adapters are called."""
    return [f"task{number}" for number in range(plan["adapters"])]


def make_batch(plan: dict, index: int, entry: dict) -> Batch:
    """A batch of random tokens, its `inputs_of`, and the name of each row's adapter.

    A switch takes the entry as it is.
    """
    if not entry["lengths"]:
        return entry
    names = adapter_names(plan)
    batch = roberta_rows.make_batch(plan, index, entry["lengths"])
    rows = len(entry["lengths"])
    return {**inputs_of(batch), "names": [names[row % len(names)] for row in range(rows) if names]}


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """What a model predicts from."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def draw_weights(tensors: Iterable[Tensor]) -> None:
    """Fills an adapter's tensors at random, A, B and the head's, so that each counts; in place."""
    for tensor in tensors:
        tensor.normal_(std=tensor.shape[-1] ** -0.5)


def check_mixing(
    plan: dict, make_batch: Callable[[dict, int, dict], Batch], logits_of: LogitsOf
) -> None:
    """Checks, on two short rows an adapter, that mixed rows have their adapter's own logits.

    Args:
        plan: the worker's.
        make_batch: the worker's.
        logits_of: what it computes.

    Raises:
        ValueError: they have not, or all adapters give the same logits, so that what was timed
            would not be real work.
    """
    lengths = [4 + row % 5 for row in range(2 * plan["adapters"])]
    batch = make_batch(plan, 0, {"lengths": lengths, "repeats": 1})
    names = batch["names"]
    inputs = {name: part.to(plan["device"]) for name, part in inputs_of(batch).items()}
    tolerance = TOLERANCE[plan["weights"]]
    mixed = logits_of(inputs, names)
    for name in adapter_names(plan):
        rows = [row for row, other in enumerate(names) if other == name]
        alone = logits_of({key: part[rows] for key, part in inputs.items()}, name)
        error = (mixed[rows] - alone).abs().max().item()
        if not error <= tolerance:
            raise ValueError(f"the logits of {name} differ by {error:.2g} in a mixed batch")
    if len(set(names)) > 1:
        effect = (mixed - logits_of(inputs, names[0])).abs().max().item()
        if effect <= tolerance:
            raise ValueError(f"all adapters give the logits of {names[0]}")
