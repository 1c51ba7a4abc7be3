"""Training losses are those that the release's own code logged, in data next to the project.

The logged losses have four decimals, and are of ten updates on one batch of 40 rows.
"""

import json
from pathlib import Path

import pytest
import torch

from transformers import Trainer

ORACLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "oracle"
ROWS = 40
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ORACLE.is_dir(), reason="the release's recorded losses are not here: no ../shared/data"
    ),
]

RUNS = {"deberta": [], "deberta_rdrop": ["--reg_loss_wgt", 1.0]}


@pytest.mark.parametrize(("name", "flags"), RUNS.items(), ids=RUNS)
def test_losses_are_the_releases_to_the_last_logged_digit(
    run_glue, monkeypatch, tmp_path, name, flags
):
    losses: list[float] = []
    compute_loss = Trainer.compute_loss

    def record(self, *given, **named) -> torch.Tensor:
        loss = compute_loss(self, *given, **named)
        losses.append(loss.item())
        return loss

    # Losses before rounding: one halfway between two decimals could be rounded either way.
    monkeypatch.setattr(Trainer, "compute_loss", record)
    monkeypatch.chdir(tmp_path)
    rows, base = ORACLE / "rows.csv", ORACLE / "deberta" / "base"
    arguments = [
        *("--model_name_or_path", base, "--train_file", rows, "--do_train", "--seed", 0),
        *("--apply_lora", "--lora_r", 4, "--lora_alpha", 16),
        *("--lora_path", ORACLE / "deberta" / "adapter.bin", "--cls_dropout", 0),
        *("--learning_rate", 3e-3, "--warmup_steps", 2, "--weight_decay", 0.1),
        *("--num_train_epochs", 10, "--per_device_train_batch_size", ROWS, "--logging_steps", 1),
        *("--output_dir", "out", "--save_strategy", "no", "--report_to", "none", "--no_cuda"),
    ]
    run_glue.main([*map(str, arguments), *map(str, flags)])
    released = json.loads((ORACLE / "release_losses.json").read_text())[name]
    # Half of the last digit, and the rounding of ten updates in float32.
    assert losses == pytest.approx(released, abs=0.5e-4 + 2e-6)
