"""Makes batches of mixed_adapters.py, and checks that each row gets its adapter.

Its plan has the fields of timing.py, rank, alpha and pad_to of roberta_rows.py, and

batches    each {"lengths": the rows' lengths, empty for switches; "repeats": number of switches}
adapters   number of adapters, which the rows of a batch have in turn; 0 for none
way        "batch", or "switch" from adapter to adapter, without computing anything
"""

from collections.abc import Callable, Iterable

import roberta_rows
import torch
from timing import Batch
from torch import Tensor

# The last parts of the names of the modules that adapters update.
TARGETS = ("query", "value")
# The allowed difference of a row's logits, which are about 1: sums are rounded differently in other
# batches.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}

# Inputs, and one adapter for all rows or one for each -> logits (rows, labels).
LogitsOf = Callable[[dict[str, Tensor], str | list[str]], Tensor]


def adapter_names(plan: dict) -> list[str]:
    """Returns the adapters' names."""
    return [f"task{number}" for number in range(plan["adapters"])]


def make_batch(plan: dict, index: int, entry: dict) -> Batch:
    """Makes a batch of random tokens, with the name of each row's adapter.

    For switches, it returns the entry as it is.
    """
    if not entry["lengths"]:
        return entry
    names = adapter_names(plan)
    batch = roberta_rows.make_batch(plan, index, entry["lengths"])
    rows = len(entry["lengths"])
    return {**inputs_of(batch), "names": [names[row % len(names)] for row in range(rows) if names]}


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """Returns the model's inputs in a batch."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def draw_weights(tensors: Iterable[Tensor]) -> None:
    """Fills an adapter's tensors (A, B, head) with random values, so that each has an effect."""
    for tensor in tensors:
        tensor.normal_(std=tensor.shape[-1] ** -0.5)


def check_mixing(
    plan: dict, make_batch: Callable[[dict, int, dict], Batch], logits_of: LogitsOf
) -> None:
    """Checks that rows in a mixed batch get their own adapter's logits, on two rows per adapter.

    Args:
        plan: the worker's plan.
        make_batch: the worker's function of that name.
        logits_of: computes the worker's logits.

    Raises:
        ValueError: they do not; or all adapters give the same logits, so that the times would not
            be those of real work.
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
