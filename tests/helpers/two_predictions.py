"""What test_trainer_mlm.py runs in each of two processes: ``two_predictions.py FOLDER``.

Small masked-language models predict rows of several lengths. The main process writes predictions
and labels to FOLDER/<family>-<eval_accumulation_steps>.npz.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformers import (
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)
from transformers.utils.cli import run_script

FAMILIES = ("roberta", "deberta")
ACCUMULATIONS = (None, 1)
VOCABULARY = 30
LENGTHS = (5, 9, 3, 12, 4, 7, 6)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
    "initializer_range": 0.3,
}


def make_mlm(family: str, **settings: Any) -> PreTrainedModel:
    """A model of "roberta" or "deberta"."""
    torch.manual_seed(0)
    if family == "roberta":
        return RobertaForMaskedLM(RobertaConfig(**SHAPE, type_vocab_size=1, **settings))
    relative = {"relative_attention": True, "pos_att_type": "p2c|c2p"}
    return DebertaV2ForMaskedLM(DebertaV2Config(**SHAPE, **relative, **settings))


def make_rows() -> list[dict[str, torch.Tensor]]:
    """Rows with about a third of their tokens as targets, one at least."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(5, VOCABULARY, (length,), generator=generator)
        is_target = torch.rand(length, generator=generator) < 0.3
        is_target[1] = True
        labels = ids.masked_fill(~is_target, -100)
        rows.append({"input_ids": ids.masked_fill(is_target, 4), "labels": labels})
    return rows


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads to the longest of the batch."""

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in rows], batch_first=True, padding_value=value
        )

    batch = {"input_ids": pad("input_ids", 1), "labels": pad("labels", -100)}
    return {**batch, "attention_mask": (batch["input_ids"] != 1).long()}


def make_trainer(family: str, folder: Path, **settings) -> Trainer:
    """A Trainer on the rows; `compute_metrics` and settings by name."""
    compute_metrics = settings.pop("compute_metrics", None)
    args = TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, per_device_eval_batch_size=2, **settings
    )
    return Trainer(
        make_mlm(family),
        args,
        collate,
        train_dataset=make_rows(),
        eval_dataset=make_rows(),
        compute_metrics=compute_metrics,
    )


def main(folder: Path) -> None:
    """Predicts with every family, gathering at the end and after every step."""
    for family in FAMILIES:
        for steps in ACCUMULATIONS:
            trainer = make_trainer(family, folder, eval_accumulation_steps=steps)
            output = trainer.predict(make_rows())
            if trainer.is_world_process_zero():
                np.savez(
                    folder / f"{family}-{steps}.npz",
                    predictions=output.predictions,
                    label_ids=output.label_ids,
                )


if __name__ == "__main__":
    # It also leaves the process group.
    run_script(partial(main, Path(sys.argv[1])))
