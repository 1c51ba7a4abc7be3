"""Prediction of this project's RoBERTa with a bank of adapters, as predict.py makes it."""

from itertools import cycle, islice

import adapter_rows
import torch
from adapter_rows import TARGETS, adapter_names, check_mixing, draw_weights, inputs_of
from timing import Batch, Step, run
from torch import Tensor

import transformers
from loralib.adapters.adapter import Adapter, lora_metadata
from loralib.serving.bank import AdapterBank
from loralib.training.precision import Precision, hold_frozen_in
from transformers import RobertaConfig, RobertaForSequenceClassification


def make_batch(plan: dict, index: int, entry: dict) -> Batch:
    """A batch with the rows of each adapter next to each other."""
    batch = adapter_rows.make_batch(plan, index, entry)
    if not batch.get("names"):
        return batch
    order = sorted(range(len(batch["names"])), key=batch["names"].__getitem__)
    rows = {name: part[order] for name, part in inputs_of(batch).items()}
    return {**rows, "names": [batch["names"][row] for row in order]}


def make_step(plan: dict) -> Step:
    """What `plan` asks for: a batch's logits, or switches."""
    model = RobertaForSequenceClassification(RobertaConfig(**plan["shape"])).eval()
    model.train_only(())
    hold_frozen_in(model, getattr(torch, plan["weights"]))
    model.to(plan["device"])
    precision = Precision(getattr(torch, plan["autocast"] or "float32"), plan["device"])

    @torch.inference_mode()
    def plain(batch: Batch) -> Tensor:
        with precision.autocast():
            return model(**inputs_of(batch))["logits"].float()

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


def make_adapter(model: RobertaForSequenceClassification, rank: int, alpha: float) -> Adapter:
    """A random adapter with a head of its own."""
    head = model.classifier.state_dict(prefix="classifier.")
    tensors = {name: torch.empty(tensor.shape) for name, tensor in head.items()}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            tensors[f"{name}.lora_A"] = torch.empty(rank, module.in_features)
            tensors[f"{name}.lora_B"] = torch.empty(module.out_features, rank)
    draw_weights(tensors.values())
    return Adapter(tensors, lora_metadata(tensors, rank, alpha))


if __name__ == "__main__":
    run(make_step, make_batch, {"this project": transformers.__version__})
