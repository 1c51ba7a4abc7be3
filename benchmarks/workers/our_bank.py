"""Predicts with this project's bank of adapters, on any model."""

from itertools import cycle, islice

import adapter_rows
import torch
from adapter_rows import TARGETS, adapter_names, check_mixing, draw_weights, inputs_of
from timing import Batch, Step
from torch import Tensor, nn

from loralib.adapters.adapter import Adapter, lora_metadata
from loralib.serving.bank import AdapterBank


def make_batch(plan: dict, index: int, entry: dict) -> Batch:
    """Makes a batch in which the rows of each adapter are next to each other."""
    batch = adapter_rows.make_batch(plan, index, entry)
    if not batch.get("names"):
        return batch
    order = sorted(range(len(batch["names"])), key=batch["names"].__getitem__)
    rows = {name: part[order] for name, part in inputs_of(batch).items()}
    return {**rows, "names": [batch["names"][row] for row in order]}


def banked(plan: dict, model: nn.Module, plain: Step) -> Step:
    """Returns the work that the plan asks for: a batch's logits, or switches.

    Args:
        plan: the worker's plan.
        model: the model in its precision, on its device.
        plain: computes the logits of a batch without adapters.
    """
    names = adapter_names(plan)
    if not names:
        return plain
    bank = AdapterBank(model)
    for name in names:
        bank.add(name, make_adapter(model, plan["rank"], plan["alpha"]))

    def logits_of(inputs: dict[str, Tensor], names: str | list[str]) -> Tensor:
        with bank.use(names):
            return plain(inputs)

    def switch(batch: Batch) -> Tensor:
        for name in islice(cycle(names), batch["repeats"]):
            with bank.use(name):
                pass
        return torch.tensor(batch["repeats"])

    check_mixing(plan, make_batch, logits_of)
    if plan["way"] == "switch":
        return switch
    return lambda batch: logits_of(batch, batch["names"])


def make_adapter(model: nn.Module, rank: int, alpha: float) -> Adapter:
    """Makes a random adapter with a head of its own."""
    head = model.classifier.state_dict(prefix="classifier.")
    tensors = {name: torch.empty(tensor.shape) for name, tensor in head.items()}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            tensors[f"{name}.lora_A"] = torch.empty(rank, module.in_features)
            tensors[f"{name}.lora_B"] = torch.empty(module.out_features, rank)
    draw_weights(tensors.values())
    return Adapter(tensors, lora_metadata(tensors, rank, alpha))
