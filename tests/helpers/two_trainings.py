"""What test_trainer_two_processes.py runs in each of two processes: ``two_trainings.py FOLDER``.

There are runs on a stream and with several outputs, resumed runs, and an evaluation with a loader
of the user's own. The main process writes the results to FOLDER/found.json.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_trainers import (
    Line,
    Stream,
    line_of,
    make_line_trainer,
    make_points,
    make_span_trainer,
    make_spans,
)
from torch.utils.data import DataLoader

from transformers import Trainer, torch_distributed_zero_first
from transformers.trainer_pt_utils import (
    SequentialDistributedSampler,
    distributed_broadcast_scalars,
    distributed_concat,
)
from transformers.utils.cli import run_script

SAVING = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}


class Sampled(Trainer):
    """Evaluates with a loader like that of 4.4.2, which fills up the last process's share."""

    def get_eval_dataloader(self, eval_dataset=None):
        data = eval_dataset or self.eval_dataset
        sampler = SequentialDistributedSampler(data, batch_size=4)
        return DataLoader(data, 4, sampler=sampler, collate_fn=self.data_collator)


def on_a_stream(folder: Path, **settings: Any) -> Trainer:
    """A run on 11 points that can only be iterated over."""
    given = {"model": Line(), "train_dataset": Stream(11), "max_steps": 5}
    return make_line_trainer(folder, **{**given, **settings})


def resumed_line(folder: Path) -> list[list[float]]:
    """The lines that a run with dropout and a run that resumes it find."""
    found = []
    for name, checkpoint in (("whole", None), ("resumed", folder / "whole" / "checkpoint-3")):
        trainer = on_a_stream(folder / name, model=Line(dropout=0.5), **SAVING)
        trainer.train(checkpoint and str(checkpoint))
        found.append(list(line_of(trainer)))
    return found


def resumed_spans(folder: Path) -> list[Any]:
    """Weights and evaluations of a run with several outputs, and of a run that resumes it."""
    found = []
    for name, checkpoint in (("whole", None), ("resumed", folder / "whole" / "checkpoint-2")):
        trainer = make_span_trainer(
            folder / name,
            evaluation_strategy="epoch",
            compute_metrics=lambda p: {"sum": float(sum(part.sum() for part in p.predictions))},
            **SAVING,
        )
        trainer.train(checkpoint and str(checkpoint))
        records = [
            {n: v for n, v in r.items() if "_per_" not in n and "runtime" not in n}
            for r in trainer.state.log_history
        ]
        found.append([trainer.model.scores.weight.tolist(), records])
    return found


class Normed(Line):
    """A line through points whose mean it counts, as a batch norm does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x, labels):
        if self.training:
            self.mean.copy_(x.mean())
        return super().forward(x + self.mean, labels)


def normed(folder: Path) -> list[list[float]]:
    """The losses during and after training, and those of the models saved at these times."""
    settings = {"evaluation_strategy": "steps", "eval_steps": 4, "save_steps": 4}
    trainer = make_line_trainer(folder, model=Normed(), **{**SAVING, **settings})
    trainer.train()
    records = trainer.state.log_history
    found = [record["eval_loss"] for record in records if "eval_loss" in record]
    found.append(trainer.evaluate()["eval_loss"])
    trainer.save_model()
    dist.barrier()
    saved = []
    for path in (folder / "checkpoint-4", folder):
        state = torch.load(path / "pytorch_model.bin", weights_only=True)
        trainer.model.load_state_dict(state)
        saved.append(trainer.evaluate()["eval_loss"])
    return [found, saved]


def in_turn(folder: Path) -> list[int]:
    """The processes in the order in which they went through a block."""
    rank, log = dist.get_rank(), folder / "turns"
    with torch_distributed_zero_first(rank):
        if rank == 0:
            time.sleep(0.2)  # so that without the block, the other process would be first
        with log.open("a") as file:
            file.write(f"{rank}\n")
    dist.barrier()
    return [int(line) for line in log.read_text().split()]


def main(folder: Path) -> None:
    """Computes all results; the main process writes them."""
    loader = on_a_stream(folder / "plain").get_train_dataloader()
    loader.dataset.set_epoch(0)
    batches = [batch["x"].tolist() for batch in loader]
    rank = dist.get_rank()
    gathered = [None, None]
    dist.all_gather_object(gathered, batches)
    spans = make_span_trainer(folder / "spans")
    predicted = spans.predict(make_spans(7))
    own = make_line_trainer(folder / "own", Sampled, model=Line(1.0, 2.0))
    compared = []
    own.compute_metrics = lambda p: compared.append(p.predictions.tolist()) or {}
    rows = torch.arange(4.0).reshape(2, 2) + 10 * rank
    refused = ""
    try:
        make_line_trainer(folder / "search", model_init=Line).hyperparameter_search()
    except (ValueError, RuntimeError) as error:
        refused = str(error)
    found = {
        "batches": gathered,
        "spans": [part.tolist() for part in (*predicted.predictions, *predicted.label_ids)],
        "spans_loss": predicted.metrics["eval_loss"],
        "own_loss": own.evaluate(make_points(9, seed=5))["eval_loss"],
        "own": compared,
        "line": resumed_line(folder / "lines"),
        "resumed": resumed_spans(folder / "resumed"),
        "normed": normed(folder / "normed"),
        "turns": in_turn(folder),
        "rows": distributed_concat((rows,), 3)[0].tolist(),
        "scalars": distributed_broadcast_scalars([rank, 0.5]).tolist(),
        "refused": refused,
    }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    # It also leaves the process group.
    run_script(partial(main, Path(sys.argv[1])))
