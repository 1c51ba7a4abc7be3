"""Where a step's time goes: parts of real steps, and how nested ones are counted."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from loralib.nn.plain import plain

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
IN_ALL = {
    "products with weights",
    "attention",
    "dropout outside of attention",
    "LoRA's own products",
    "GELU",
    "norms",
    "optimizer",
    "the rest",
    "between operations",
}


@pytest.fixture
def script(load_script):
    return load_script("step_parts")


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "workers"))
    import step_parts_ours

    return step_parts_ours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "own"), [("deberta_step", set()), ("gpt2_step", {"the head's cross-entropy"})]
)
def test_parts_of_a_step(read_table, step, own):
    command = [sys.executable, BENCHMARKS / "step_parts.py", step, "--quick", "--steps", "2"]
    done = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True, check=True)
    rows = {row.pop("ms"): row for row in read_table(done.stdout)}
    wholes = {"a step, profiled", "a step", "its arithmetic at the machine's rate"}
    assert rows.keys() == IN_ALL | own | wholes
    for dtype in ("float32", "bfloat16"):
        seconds = {name: _number(row[dtype]) for name, row in rows.items()}
        parts = sum(seconds[name] for name in IN_ALL | own)
        # Rounded to a tenth of a millisecond each.
        assert parts == pytest.approx(seconds["a step, profiled"], abs=0.05 * (len(rows) + 1))
        # What is counted twice, or in another thread, would leave less than nothing between.
        assert all(part >= 0 for part in seconds.values())
        assert all(seconds[name] > 0 for name in wholes | {"attention", "products with weights"})


def _number(cell: str) -> float:
    return float(cell.partition(" ")[0].replace(",", ""))


def test_what_is_within_a_part_is_counted_once(worker):
    """A product within LoRA's layer is a product; what is in no part is the rest."""
    x = torch.rand(300, 300)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("_LowRankLinear"):
            x.exp()
            with record_function(worker.PRODUCTS):
                x @ x
        x.sin()
    events = {event.name: event for event in profiler.events()}
    found = worker.seconds_by_part(profiler.events())
    outer, inner = events["_LowRankLinear"], events[worker.PRODUCTS]
    within = outer.cpu_time_total - inner.cpu_time_total
    assert found.keys() == {worker.PRODUCTS, "LoRA's own products", worker.REST}
    assert found[worker.PRODUCTS] == pytest.approx(inner.cpu_time_total / 1e6)
    assert found["LoRA's own products"] == pytest.approx(within / 1e6)
    assert found[worker.REST] == pytest.approx(events["aten::sin"].cpu_time_total / 1e6)


def test_a_column_has_what_is_between_operations(script):
    run = {"seconds": [0.5, 0.7], "profiled": [1.0, 2.0], "parts": {"norms": 0.4, "GELU": 1.6}}
    assert list(script.column(run).items()) == [
        ("GELU", 0.8),
        (script.BETWEEN, pytest.approx(0.5)),
        ("norms", 0.2),
        (script.PROFILED, 1.5),
        (script.TIMED, pytest.approx(0.6)),
    ]


def test_a_part_that_one_precision_lacks_has_its_row(script):
    wholes = {script.PROFILED: 0.2, script.TIMED: 0.1, script.AT_THE_RATE: 0.1}
    lines = script.table({"a": {"x": 0.2, **wholes}, "b": {"x": 0.1, "y": 0.1, **wholes}})
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines.splitlines()[2:]]
    assert rows == ["x", "y", *wholes]
    assert "| y | 0.0 (0%) | 100.0 (50%) |" in lines


@pytest.mark.parametrize("fails", ["step_parts_ours", "matrix_rate_ours"])
def test_a_worker_that_fails_is_a_line(script, monkeypatch, fails):
    def run(python, name, plan):
        if name == fails:
            raise RuntimeError("killed by signal 9")
        return {"gflops": 1.0}

    monkeypatch.setattr(script.contest, "run_worker", run)
    with pytest.raises(SystemExit, match="this project, LoRA, float32 failed: killed by signal 9"):
        script.main(["gpt2_step", "--quick"])


def test_the_plain_path_has_other_parts(script, capsys):
    with plain(), pytest.raises(SystemExit):
        script.parse(["gpt2_step"])
    assert "LORALIB_PLAIN is set" in capsys.readouterr().err


def test_wrong_calls_end_with_a_line(script, capsys):
    for flags, says in (
        (["bert_step"], "invalid choice: 'bert_step'"),
        (["gpt2_step", "--data_dir", "here"], "--data_dir and --vocab go together"),
        (["gpt2_step", "--steps", "0"], "0 is not at least 1"),
    ):
        with pytest.raises(SystemExit):
            script.parse(flags)
        assert says in capsys.readouterr().err
