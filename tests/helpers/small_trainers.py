"""Trainers of small models, a line and spans, for tests that do not depend on the model."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from transformers import Trainer, TrainingArguments


class Line(nn.Module):
    """y = a·x + b, with dropout on x and, if `twice`, -y as a second output."""

    def __init__(self, a: float = 0.0, b: float = 0.0, dropout: float = 0.0, twice: bool = False):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b))
        self.dropout, self.twice = nn.Dropout(dropout), twice

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """(examples, …) -> the loss, if there are labels, and the outputs."""
        y = self.dropout(x) * self.a + self.b
        outputs = (y, -y) if self.twice else (y,)
        return outputs if labels is None else (F.mse_loss(y, labels), *outputs)


class MeanOfTargets(nn.Module):
    """Its loss is the mean of the targets' numbers; of none, `of_none`. It learns nothing."""

    def __init__(self, of_none: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.of_none = of_none

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """(rows, tokens) -> the loss."""
        counted = labels != -100
        mean = torch.where(counted, labels, 0).sum() / counted.sum().clamp(min=1)
        return {"loss": torch.where(counted.any(), mean, self.of_none) + 0 * self.weight}


def make_targets(*rows: int | None) -> list[dict[str, list[int]]]:
    """Rows of two tokens with one target each, or none."""
    return [{"input_ids": [1, 2], "labels": [-100, -100 if x is None else x]} for x in rows]


def make_points(count: int, seed: int = 0) -> list[dict[str, float]]:
    """Points on y = 2x + 3."""
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(count, generator=generator).tolist()
    return [{"x": x, "labels": 2 * x + 3} for x in xs]


class Stream(IterableDataset):
    """An iterable dataset of points without a length, in another order in each pass."""

    def __init__(self, count: int):
        self.points, self.generator = make_points(count), torch.Generator()

    def __iter__(self):
        order = torch.randperm(len(self.points), generator=self.generator).tolist()
        return (self.points[index] for index in order)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of a pass."""
        self.generator.manual_seed(epoch)


class SizedStream(Stream):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(self.points)


def make_line_trainer(folder: Path, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    """A Trainer on 20 points, which evaluates on 9; takes its arguments and settings by name."""
    own = (
        "model",
        "model_init",
        "train_dataset",
        "eval_dataset",
        "data_collator",
        "compute_metrics",
        "callbacks",
        "optimizers",
    )
    given = {name: settings.pop(name) for name in own if name in settings}
    defaults = {
        "output_dir": str(folder),
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "save_strategy": "no",
    }
    if "model" not in given and "model_init" not in given:
        given["model"] = Line()
    given = {"train_dataset": make_points(20), "eval_dataset": make_points(9, seed=5), **given}
    return kind(args=TrainingArguments(**{**defaults, **settings}), **given)


def line_of(trainer: Trainer) -> tuple[float, float]:
    """The line that a Trainer has found so far."""
    return trainer.model.a.item(), trainer.model.b.item()


class Spans(nn.Module):
    """Two scores a token, as question answering has them, and the loss of a span's ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Embedding(30, 2)

    def forward(
        self,
        ids: Tensor,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """(rows, tokens) -> two scores (rows, tokens), and the loss if there are positions."""
        start, end = self.scores(ids).unbind(-1)
        if start_positions is None or end_positions is None:
            return {"start_logits": start, "end_logits": end}
        loss = F.cross_entropy(start, start_positions) + F.cross_entropy(end, end_positions)
        return {"loss": loss / 2, "start_logits": start, "end_logits": end}


def make_spans(count: int) -> list[dict[str, Any]]:
    """Rows of 4 to 6 tokens with a span each."""
    lengths = [4 + n % 3 for n in range(count)]
    return [
        {
            "ids": [(7 * n + place) % 30 for place in range(length)],
            "start_positions": n % 3,
            "end_positions": 3,
        }
        for n, length in enumerate(lengths)
    ]


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch: ids (rows, tokens), padded with zeros."""
    longest = max(len(row["ids"]) for row in rows)
    batch = {"ids": torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in rows])}
    for name in ("start_positions", "end_positions"):
        if name in rows[0]:
            batch[name] = torch.tensor([row[name] for row in rows])
    return batch


def make_span_trainer(folder: Path, **settings: Any) -> Trainer:
    """A Trainer of `Spans` on 12 rows, which evaluates on 8, one after the other."""
    given = {
        "model": Spans(),
        "train_dataset": make_spans(12),
        "eval_dataset": make_spans(8),
        "data_collator": pad,
        "per_device_eval_batch_size": 1,
    }
    return make_line_trainer(folder, **{**given, **settings})
