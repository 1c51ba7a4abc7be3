"""What the tests of the Trainer share: small data, and what to compare of two runs."""

import random

import torch

from transformers import TrainerCallback

RUNTIMES = ("runtime", "samples_per_second")


def make_data(count: int, scores: bool = False) -> list[dict]:
    """Rows of 5 to 24 tokens whose label is about their third token."""
    chance = random.Random(3)
    rows = []
    for _ in range(count):
        ids = [0, *(chance.randrange(5, 60) for _ in range(chance.randint(3, 22))), 2]
        label = ids[2] / 20 if scores else ids[2] % 2
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "label": label})
    return rows


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.tensor([row[name] + [pad] * (longest - len(row[name])) for row in rows])
        for name, pad in (("input_ids", 1), ("attention_mask", 0))
    }
    if "label" in rows[0]:
        batch["labels"] = torch.tensor([row["label"] for row in rows])
    return batch


def trained(model) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def largest_difference(first: dict, second: dict) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def without_runtimes(log_history: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in record.items() if not name.endswith(RUNTIMES)}
        for record in log_history
    ]


def sequence(*values):
    """A `compute_metrics` that returns these values, one in each evaluation."""
    left = list(values)
    return lambda prediction: {"score": left.pop(0)}


class Recorder(TrainerCallback):
    """Records learning rates, epochs, logs, and the number of batches."""

    def __init__(self):
        self.rates, self.epochs, self.logs, self.batches = [], [], [], 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.batches += 1

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.batches += 1
        self.rates.append(lr_scheduler.get_last_lr()[0])
        self.epochs.append(state.epoch)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)
