"""Tests gpt2_ft.py with --cuda_graphs, on a simulated GPU and on a real one."""

import json

import pytest
from simulated_gpu import GPUS, SimulatedGpu
from simulated_graphs import SimulatedGraphs

import gpt2_ft

FLAGS = ("--max_step", "8", "--lr", "1e-4", "--eval_interval", "4", "--log_interval", "1")


def losses_of(work_dir):
    lines = (work_dir / "metrics.jsonl").read_text().splitlines()
    return [row.get("loss", row.get("valid_loss")) for row in map(json.loads, lines)]


@pytest.mark.parametrize("how", [(), ("--bf16",), ("--fp16",), ("--grad_acc", "2")])
@pytest.mark.parametrize("kind", GPUS)
def test_a_run_has_the_losses_of_one_without(tiny, tmp_path, kind, how):
    with kind():
        gpt2_ft.main(tiny.flags(tmp_path / "plain", *FLAGS, *how))
        if kind is SimulatedGpu:
            with SimulatedGraphs() as graphs:
                gpt2_ft.main(tiny.flags(tmp_path / "graphs", *FLAGS, *how, "--cuda_graphs"))
            assert graphs.replays == 8
            assert graphs.recorded < 8
        else:
            gpt2_ft.main(tiny.flags(tmp_path / "graphs", *FLAGS, *how, "--cuda_graphs"))
    ours, theirs = losses_of(tmp_path / "graphs"), losses_of(tmp_path / "plain")
    assert len(theirs) == 10
    in_half = {"--bf16", "--fp16"} & {*how}
    assert ours == pytest.approx(theirs, abs=0.05 if in_half else 1e-3)


def test_it_needs_a_gpu(tiny, tmp_path, error_of):
    error = error_of(tiny.flags(tmp_path, "--cuda_graphs"))
    assert "--cuda_graphs needs a GPU: leave it out" in error


def test_a_run_without_graphs_is_not_resumed_with_them(tiny, tmp_path, error_of):
    flags = tiny.flags(tmp_path, *FLAGS)
    with SimulatedGpu():
        gpt2_ft.main(flags)
        error = error_of([*flags, "--resume", "--cuda_graphs"])
    assert (
        "belongs to a run with --cuda_graphs False, but this run has True: give the same" in error
    )


def test_a_run_that_could_use_graphs_says_so(tiny, tmp_path, caplog):
    caplog.set_level("INFO")
    gpt2_ft.main(tiny.flags(tmp_path / "cpu", "--max_step", "1"))
    assert "training" in caplog.text
    assert "faster with" not in caplog.text
    with SimulatedGpu():
        gpt2_ft.main(tiny.flags(tmp_path / "gpu", "--max_step", "1"))
    assert "faster with    --cuda_graphs" in caplog.text
