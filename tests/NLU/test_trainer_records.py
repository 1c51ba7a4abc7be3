"""What a run records, and where it reports to."""

import pytest
from trainer_runs import make_data, without_runtimes

from transformers.integrations import (
    TensorBoardCallback,
    WandbCallback,
    is_tensorboard_available,
    is_wandb_available,
)


def reporters(trainer) -> list[type]:
    kinds = (TensorBoardCallback, WandbCallback)
    return [type(c) for c in trainer.callback_handler.callbacks if isinstance(c, kinds)]


INSTALLED = [
    kind
    for kind, available in (
        (TensorBoardCallback, is_tensorboard_available()),
        (WandbCallback, is_wandb_available()),
    )
    if available
]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [([], []), (["none"], []), (None, INSTALLED), (["all"], INSTALLED)],
)
def test_where_a_run_reports_to(make_trainer, asked, expected):
    assert reporters(make_trainer(report_to=asked)) == expected


def test_two_runs_have_the_same_records(make_trainer, tmp_path):
    runs = []
    for name in ("first", "second"):
        trainer = make_trainer(
            dropout=0.1,
            output_dir=str(tmp_path / name),
            logging_steps=2,
            evaluation_strategy="epoch",
            compute_metrics=lambda p: {"spread": float(p.predictions.std())},
        )
        trainer.train()
        runs.append(trainer.state.log_history)
        # So that the process's peak is another one in the second run.
        ballast = bytearray(64 * 2**20)
        ballast[:: 2**12] = b"\1" * len(ballast[:: 2**12])
    assert without_runtimes(runs[0]) == without_runtimes(runs[1])
    assert not any("_mem_" in name for run in runs for record in run for name in record)


@pytest.mark.parametrize("skip", [False, True])
def test_memory_figures_are_in_the_results(make_trainer, skip):
    seen = []
    trainer = make_trainer(skip_memory_metrics=skip)
    trainer.callback_handler.callbacks[0].on_evaluate = lambda *args, metrics, **about: seen.append(
        dict(metrics)
    )
    results = [
        (trainer.train().metrics, "train"),
        (trainer.evaluate(), "eval"),
        (trainer.predict(make_data(3), metric_key_prefix="test").metrics, "test"),
    ]
    for metrics, split in results:
        assert (f"{split}_mem_cpu_peak" in metrics) is not skip
        assert skip or metrics[f"{split}_mem_cpu_peak"] > 10 * 2**20
    assert seen == [results[1][0]]


def test_operations_are_stored_when_asked_for(make_trainer):
    """As subclasses of 4.4's Trainer ask for it, before they save."""
    trainer = make_trainer()
    trainer.train()
    before = trainer.state.total_flos
    trainer._progress.flos = 12
    trainer.store_flos()
    assert trainer.state.total_flos == before + 12
