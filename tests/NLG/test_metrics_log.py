"""Tests the log of a run's metrics: metrics.jsonl, TensorBoard's files, and learning curves."""

import errno
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

import metrics_log
from loralib.errors import DiskFullError
from metrics_log import METRICS_NAME, MetricsLog


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """A list of the rows of each picture; matplotlib counts as installed, TensorBoard does not."""
    drawn = []
    monkeypatch.setattr(metrics_log, "is_installed", lambda name: False)
    monkeypatch.setattr(metrics_log, "is_matplotlib_available", lambda: True)
    monkeypatch.setattr(metrics_log, "write_curves", lambda folder, rows, _: drawn.append(rows))
    return drawn


def rows_of(folder):
    return [json.loads(line) for line in (folder / METRICS_NAME).read_text().splitlines()]


def steps_of(folder):
    return [row["step"] for row in rows_of(folder)]


def test_a_new_run_begins_a_new_log(tmp_path):
    (tmp_path / METRICS_NAME).write_text('{"step": 1}\n')
    log = MetricsLog(tmp_path, 0)
    assert steps_of(tmp_path) == []
    log.write(1, loss=0.5, lr=0.25)
    log.write(2, valid_loss=0.75)
    assert rows_of(tmp_path) == [
        {"step": 1, "loss": 0.5, "lr": 0.25},
        {"step": 2, "valid_loss": 0.75},
    ]


def test_a_resumed_run_continues_after_its_step(tmp_path, caplog):
    """Lines of later steps, which a killed run left, are removed, and so are damaged ones."""
    sound, damaged = (
        [f'{{"step": {step}}}' for step in (1, 2, 3, 4)],
        ['{"step": "3"}', "[4]", '{"s'],
    )
    (tmp_path / METRICS_NAME).write_text("\n".join([*sound[:2], *damaged, *sound[2:]]))
    log = MetricsLog(tmp_path, 3)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert caplog.messages == [f"{tmp_path / METRICS_NAME}: left out 3 damaged lines"]
    log.write(4)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_a_resumed_run_without_a_log_begins_one(tmp_path):
    MetricsLog(tmp_path, 3).write(4)
    assert steps_of(tmp_path) == [4]


def test_other_processes_write_nothing(tmp_path, pictures, monkeypatch, caplog):
    monkeypatch.setattr(metrics_log, "is_matplotlib_available", lambda: False)
    log = MetricsLog(tmp_path, 0, is_main=False)
    log.write(1, loss=0.5)
    assert log.draw() is None
    assert [*tmp_path.iterdir()] == pictures == caplog.messages == []


@pytest.mark.parametrize(("asked", "times"), [("all", 1), ("plot", 1), ("none", 0)])
def test_a_picture_is_of_the_whole_run(tmp_path, pictures, asked, times):
    (tmp_path / METRICS_NAME).write_text('{"step": 1}\n')
    log = MetricsLog(tmp_path, 1, report_to=[asked])
    log.write(2, loss=0.5)
    log.draw()
    assert pictures == [[{"step": 1}, {"step": 2, "loss": 0.5}]] * times


@pytest.mark.parametrize(
    ("asked", "levels"), [("all", ["INFO"]), ("plot", ["WARNING"]), ("none", [])]
)
def test_without_matplotlib(tmp_path, pictures, monkeypatch, caplog, asked, levels):
    monkeypatch.setattr(metrics_log, "is_matplotlib_available", lambda: False)
    caplog.set_level("INFO")
    assert MetricsLog(tmp_path, 0, report_to=[asked]).draw() is None
    assert pictures == []
    assert [record.levelname for record in caplog.records] == levels


@pytest.mark.parametrize(
    ("asked", "installed", "shown"),
    [
        ("all", True, True),
        ("all", False, False),
        ("tensorboard", True, True),
        ("plot", True, False),
    ],
)
def test_tensorboard_drops_what_a_killed_run_wrote_later(
    tmp_path, monkeypatch, asked, installed, shown
):
    """Its writer has a thread, which ends when it is closed."""
    made, scalars, flushed, closed = [], [], [], []

    def writer(folder, purge_step):
        made.append((folder, purge_step))
        return SimpleNamespace(
            add_scalar=lambda *scalar: scalars.append(scalar),
            flush=lambda: flushed.append(True),
            close=lambda: closed.append(True),
        )

    monkeypatch.setattr(metrics_log, "is_installed", lambda name: installed)
    module = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = MetricsLog(tmp_path, 3, report_to=[asked])
    assert made == []
    log.write(4, loss=0.5, lr=0.25)
    log.write(5, loss=0.125)
    assert made == [(tmp_path / "runs", 4)] * shown
    assert scalars == [("loss", 0.5, 4), ("lr", 0.25, 4), ("loss", 0.125, 5)] * shown
    assert (flushed, closed) == ([True, True] * shown, [])
    del log
    assert closed == [True] * shown


@pytest.mark.parametrize("file", [METRICS_NAME, "runs/events.out.tfevents"])
def test_the_error_of_a_full_disk_names_the_file(tmp_path, monkeypatch, file):
    """The system's error has no name once the file is open."""

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = MetricsLog(tmp_path, 0, report_to=["none"])
    if file == METRICS_NAME:
        monkeypatch.setattr(metrics_log, "open", refuse, raising=False)
    else:
        log._has_tensorboard = True
        module = SimpleNamespace(SummaryWriter=refuse)
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with pytest.raises(DiskFullError, match=re.escape(f"{tmp_path / file}: the disk is full")):
        log.write(1, loss=0.5)
