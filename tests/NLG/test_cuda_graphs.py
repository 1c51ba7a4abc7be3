"""Tests gpt2_ft.py with --cuda_graphs, on a simulated GPU and on a real one."""

import json
import shutil
from contextlib import nullcontext

import pytest
from simulated_gpu import GPUS, SimulatedGpu
from simulated_graphs import SimulatedGraphs

import gpt2_ft
from loralib.nn import packing
from loralib.nn.fast_paths import fast_paths_off
from optimizer import Scheduler
from run_state import read_run

FLAGS = ("--max_step", "8", "--lr", "1e-4", "--eval_interval", "4", "--log_interval", "1")


def losses_of(work_dir):
    lines = (work_dir / "metrics.jsonl").read_text().splitlines()
    return [row.get("loss", row.get("valid_loss")) for row in map(json.loads, lines)]


@pytest.mark.parametrize("how", [(), ("--bf16",), ("--fp16",), ("--grad_acc", "2")])
@pytest.mark.parametrize("kind", GPUS)
def test_a_run_has_the_losses_of_one_without(tiny, tmp_path, kind, how):
    with kind():
        gpt2_ft.main(tiny.flags(tmp_path / "plain", *FLAGS, *how, "--no_cuda_graphs"))
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


def test_the_help_says_what_it_means_to_turn_them_off(capsys):
    with pytest.raises(SystemExit):
        gpt2_ft.main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--no_cuda_graphs start each operation by itself" in words


def test_a_run_without_graphs_goes_on_without(tiny, tmp_path, error_of, caplog):
    flags = tiny.flags(tmp_path, *FLAGS)
    with SimulatedGpu(), SimulatedGraphs():
        gpt2_ft.main([*flags, "--no_cuda_graphs"])
        error = error_of([*flags, "--resume", "--cuda_graphs"])
        gpt2_ft.main([*flags, "--resume"])
    assert "belongs to a run with --cuda_graphs False, but this run has True: give the" in error
    assert "this run is finished" in caplog.text


@pytest.mark.parametrize("kind", GPUS)
def test_a_run_on_a_gpu_uses_them_by_default(tiny, tmp_path, caplog, kind):
    caplog.set_level("INFO")
    with kind(), SimulatedGraphs() if kind is SimulatedGpu else nullcontext():
        gpt2_ft.main(tiny.flags(tmp_path, *FLAGS))
    assert "CUDA graphs    used; --no_cuda_graphs turns them off" in caplog.text
    assert "faster with" not in caplog.text


class Killed(BaseException):
    """Stands in for a kill: nothing in the script catches it."""


def kill_after_two_steps(patch):
    def step(scheduler):
        if scheduler.state_dict()["step"] == 2:
            raise Killed
        original(scheduler)

    original = Scheduler.step
    patch.setattr(Scheduler, "step", step)


def test_a_run_with_graphs_may_go_on_without(tiny, tmp_path, monkeypatch, caplog):
    """They may turn out to take too much memory. A finished run does not go on."""
    flags = tiny.flags(tmp_path, "--max_step", 4, "--save_interval", 2)
    warning = "resumes, but not bit-exactly: the run began with CUDA graphs, and goes on without"
    monkeypatch.setattr(packing, "padding_is_cheap", lambda *_: True)
    monkeypatch.setattr(gpt2_ft, "why_no_graphs", lambda *_: None)
    with SimulatedGraphs(), fast_paths_off():
        with monkeypatch.context() as patch:
            kill_after_two_steps(patch)
            with pytest.raises(Killed):
                gpt2_ft.main(flags)
        shutil.copytree(tmp_path, tmp_path / "with")
        gpt2_ft.main([*flags, "--resume", "--work_dir", str(tmp_path / "with")])
        gpt2_ft.main([*flags, "--resume", "--work_dir", str(tmp_path / "with"), "--no_cuda_graphs"])
        assert warning not in caplog.text
        gpt2_ft.main([*flags, "--resume", "--no_cuda_graphs"])
    assert f"{tmp_path}: {warning}" in caplog.text


@pytest.mark.parametrize(("has_gpu", "replays"), [(True, 4), (False, 2)])
def test_a_run_that_was_killed_resumes_with_them(tiny, tmp_path, monkeypatch, has_gpu, replays):
    """On a CPU, which has none, it resumes without."""
    argv = tiny.flags(tmp_path, "--max_step", 4, "--save_interval", 2)
    monkeypatch.setattr(packing, "padding_is_cheap", lambda *_: True)
    with SimulatedGraphs() as graphs, fast_paths_off():
        with monkeypatch.context() as patch:
            patch.setattr(gpt2_ft, "why_no_graphs", lambda *_: None)
            kill_after_two_steps(patch)
            with pytest.raises(Killed):
                gpt2_ft.main(argv)
        assert graphs.replays == 2
        if has_gpu:
            monkeypatch.setattr(gpt2_ft, "why_no_graphs", lambda *_: None)
        gpt2_ft.main([*argv, "--resume"])
    assert graphs.replays == replays
    assert read_run(tmp_path)["finished"]


def test_a_run_that_could_use_graphs_says_so(tiny, tmp_path, caplog):
    caplog.set_level("INFO")
    gpt2_ft.main(tiny.flags(tmp_path / "cpu", "--max_step", "1"))
    assert "training" in caplog.text
    assert "faster with" not in caplog.text
    assert "CUDA graphs" not in caplog.text
    with SimulatedGpu():
        gpt2_ft.main(tiny.flags(tmp_path / "gpu", "--max_step", "1", "--no_cuda_graphs"))
    assert "faster with    --cuda_graphs" in caplog.text
