"""Losses that the Trainer logs are means over the batches that have a target."""

import math
from pathlib import Path

import pytest
import torch
from simulated_gpu import SimulatedGpu
from small_trainers import MeanOfTargets, make_targets
from torch.utils.data import DataLoader

from loralib.io.structure import check_structure
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers.trainer_checkpoint import _mean_state
from transformers.trainer_progress import Progress


class InOrder(Trainer):
    """Reads the rows in their order, one per batch."""

    def get_train_dataloader(self):
        pinned = self.args.device.type == "cuda"
        return DataLoader(self.train_dataset, collate_fn=default_data_collator, pin_memory=pinned)


class OnTheDevice(InOrder):
    """Its loader yields batches that are already on the device."""

    def get_train_dataloader(self):
        batches = [default_data_collator([row]) for row in self.train_dataset]
        return [{name: x.to(self.args.device) for name, x in batch.items()} for batch in batches]


def make_trainer(
    folder: Path, rows, kind=InOrder, callbacks=None, of_none=0.0, **settings
) -> Trainer:
    defaults = {
        "num_train_epochs": 1,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": ["none"],
        "disable_tqdm": True,
    }
    args = TrainingArguments(str(folder), **{**defaults, **settings})
    model = MeanOfTargets(of_none)
    return kind(model, args, train_dataset=make_targets(*rows), callbacks=callbacks)


def losses_of(trainer: Trainer) -> list[float]:
    """Returns the logged losses and then the run's."""
    history = trainer.state.log_history
    return [record[name] for record in history for name in ("loss", "train_loss") if name in record]


@pytest.mark.parametrize("of_none", [0.0, math.nan], ids=["zero", "nan, as PyTorch's loss"])
@pytest.mark.parametrize(
    ("rows", "accumulation", "expected"),
    [
        ((2, 4, 6, 8), 1, [3, 7, 5]),
        ((2,), 1, [2]),
        ((2, None, None, 8), 1, [2, 8, 5]),
        ((None, None, 5, 8), 1, [math.nan, 6.5, 6.5]),
        ((None, None), 1, [math.nan, math.nan]),
        ((2, None, None, 8, None, None, 3, 3), 2, [5, 3, 4]),
        # The last row of the first epoch is left over for the second update, which ends the run.
        ((None, None, 4), 2, [4, math.nan, 4]),
        ((2, 4, 8), 2, [4.6667, 3, 4]),
        # An epoch that is shorter than an accumulation makes one update.
        ((6,), 2, [6]),
    ],
)
def test_losses_are_means_of_the_batches_that_have_targets(
    tmp_path, caplog, rows, accumulation, expected, of_none
):
    settings = {"logging_strategy": "epoch", "num_train_epochs": 2} if len(rows) == 3 else {}
    settings |= {"gradient_accumulation_steps": accumulation, "of_none": of_none}
    trainer = make_trainer(tmp_path, rows, **settings)
    result = trainer.train()
    assert losses_of(trainer) == pytest.approx(expected, nan_ok=True)
    assert result.training_loss == pytest.approx(expected[-1], nan_ok=True)
    warnings = caplog.text.count("had a target, such as a label or a masked token: the loss is un")
    assert warnings == sum(map(math.isnan, expected))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((None, None, None, None), ["1 step", "4 steps"]),
        ((None, None, 4, None, None), ["1 step"]),
        ((4, None, None), ["1 step"]),
    ],
)
def test_losses_without_any_target_give_a_warning_once_and_for_the_run(
    tmp_path, caplog, rows, expected
):
    make_trainer(tmp_path, rows, logging_steps=1).train()
    warnings = [r.getMessage() for r in caplog.records if "had a target" in r.getMessage()]
    assert [one.split(" had ")[0] for one in warnings] == [f"no batch of {n}" for n in expected]


ROWS = (2, None, 6, None, None, 9, 1, None, 4)


def test_a_resumed_run_logs_the_same_losses(tmp_path):
    """From every step, most of them between two logs."""
    settings = {"logging_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(tmp_path, ROWS, **settings)
    whole.train()
    for step in range(1, len(ROWS)):
        resumed = make_trainer(tmp_path / "resumed", ROWS, **settings)
        resumed.train(str(tmp_path / f"checkpoint-{step}"))
        assert losses_of(resumed) == losses_of(whole)


def test_a_log_resets_only_the_sums_since_the_last_one():
    progress = Progress()
    for loss, has_target in ((3.0, True), (0.0, False)):
        progress.add(torch.tensor(loss), 0.5, has_target)
    progress.read_losses()
    progress.note_log(1)
    found = vars(progress)
    assert [found[f"{name}_since_log"] for name in ("loss", "weight")] == [0, 0]
    assert [found[f"{name}_total"] for name in ("loss", "weight")] == [3.0, 0.5]


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_loss_that_is_not_finite_is_named(first):
    progress = Progress()
    for step, loss in enumerate((1.0, math.inf, 2.0, math.nan)[1 - first :]):
        progress.step = step
        progress.add(torch.tensor(loss), 1.0, True)
    progress.read_losses()
    assert progress.first_bad_step == first


def test_states_of_processes_are_averaged_for_another_number_of_processes():
    states = []
    for loss, has_target in ((4.0, True), (2.0, True), (0.0, False)):
        progress = Progress()
        progress.add(torch.tensor(loss), 1.0, has_target)
        used = ("a", "b") if loss == 2 else ("a",)
        pending = {name: torch.tensor(3 * loss) for name in used}
        states.append({"progress": progress.state_dict(), "pending_gradients": pending})
    found = _mean_state(states)
    joined = found["progress"]
    assert joined["loss_total"] / joined["weight_total"] == 3.0
    assert joined["loss_since_log"] == joined["loss_total"] == 2.0
    check_structure(joined, Progress().state_dict())  # as when the run resumes once more
    assert found["pending_gradients"] == {"a": 6.0, "b": 2.0}


class Waits(TrainerCallback):
    """Records what made the CPU wait in each step, without the log after it."""

    def __init__(self, gpu):
        self.gpu, self.seen = gpu, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.gpu.waits.clear()

    def on_step_end(self, args, state, control, **kwargs):
        self.seen += self.gpu.waits


@pytest.mark.parametrize("kind", [InOrder, OnTheDevice])
def test_no_step_waits_for_the_device_to_find_targets(tmp_path, kind):
    with SimulatedGpu() as gpu:
        waits = Waits(gpu)
        trainer = make_trainer(tmp_path, (2, None, None, 8), kind, [waits])
        trainer.train()
    assert losses_of(trainer) == [2, 8, 5]
    assert waits.seen == []
