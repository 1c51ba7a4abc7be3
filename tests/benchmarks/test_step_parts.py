"""Tests of the profile of a step: its parts, and how nested parts are counted."""

from collections import Counter

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from loralib.nn.fast_paths import fast_paths_off

KERNELS = {
    "products with weights",
    "attention's products",
    "attention's softmax",
    "random numbers",
    "LoRA's own products",
    "GELU",
    "norms",
    "optimizer",
}
RESTS = {
    "attention, the rest",
    "dropout outside of it, the rest",
    "the rest",
    "between operations",
}


@pytest.fixture
def script(load_script):
    return load_script("step_parts")


@pytest.fixture
def worker(load_worker):
    return load_worker("step_parts_ours")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "own"), [("deberta_step", set()), ("gpt2_step", {"the head's cross-entropy"})]
)
def test_parts_of_a_step(script, forked_workers, read_table, capsys, step, own):
    script.main([step, "--quick", "--steps", "2", "--threads", "1"])
    rows = {row.pop("ms"): row for row in read_table(capsys.readouterr().out)}
    kernels, wholes = KERNELS | own, {"a step, profiled", "a step"}
    wholes |= {"kernels: all but rests", "its arithmetic at the machine's rate"}
    shares = {"as a share of a step": "a step"}
    shares |= {"as a share of its kernels": "kernels: all but rests"}
    assert rows.keys() == kernels | RESTS | wholes | shares.keys()
    for share, whole in shares.items():
        for dtype, shown in rows.pop(share).items():
            # Each of the three is rounded.
            arithmetic = _number(rows["its arithmetic at the machine's rate"][dtype])
            least = (arithmetic - 0.05) / (_number(rows[whole][dtype]) + 0.05)
            most = (arithmetic + 0.05) / (_number(rows[whole][dtype]) - 0.05)
            assert least - 0.006 < float(shown.rstrip("%")) / 100 < most + 0.006
    rounded = 0.05 * (len(rows) + 1)  # to a tenth of a millisecond each
    for dtype in ("float32", "bfloat16"):
        seconds = {name: _number(row[dtype]) for name, row in rows.items()}
        of_kernels = sum(seconds[name] for name in kernels)
        of_rests = sum(seconds[name] for name in RESTS)
        assert of_kernels == pytest.approx(seconds["kernels: all but rests"], abs=rounded)
        step = seconds["a step, profiled"]
        assert of_kernels + of_rests == pytest.approx(step, abs=rounded)
        # Time counted twice, or in another thread, would make "between operations" negative.
        assert all(part >= 0 for part in seconds.values())
        busy = {"attention's products", "attention, the rest", "products with weights"}
        assert all(seconds[name] > 0 for name in wholes | busy)


def _number(cell: str) -> float:
    return float(cell.partition(" ")[0].replace(",", ""))


def test_nested_parts_are_counted_once(worker):
    """A frozen product within a LoRA layer is not LoRA's; what is not a kernel is the rest."""
    x = torch.rand(300, 300)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("_LowRankLinear"):
            x.exp()
            torch.addmm(x, x, x)
            with record_function(worker.PRODUCTS):
                torch.mm(x, x)
        x.sin()
    events = profiler.events()
    found = worker.seconds_by_part(events)
    own: Counter[str] = Counter()
    for event in events:
        own[event.name] += event.self_cpu_time_total / 1e6
    assert found.keys() == {worker.PRODUCTS, worker.LORA, worker.REST}
    assert found[worker.PRODUCTS] == pytest.approx(own["aten::mm"])
    assert found[worker.LORA] == pytest.approx(own["aten::addmm"])
    # The time of the mark itself belongs to no part.
    assert found.total() == pytest.approx(own.total() - own[worker.PRODUCTS])
    assert found[worker.REST] >= own["aten::sin"] + own["aten::exp"]


@pytest.mark.parametrize("name", ["mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"])
def test_a_product_is_a_kernel_in_every_part(worker, name):
    rests = {worker.REST, *worker.REST_OF.values()}
    for part in (worker.PRODUCTS, worker.LORA, worker.ATTENTION, worker.REST):
        assert worker.counted_as(f"aten::{name}", part) not in rests
    assert worker.counted_as("aten::mul", worker.ATTENTION) == "attention, the rest"
    assert worker.counted_as("aten::mul", "norms") == "norms"


def test_a_column_has_the_time_between_operations(script):
    run = {"seconds": [0.5, 0.7], "profiled": [1.0, 2.0], "parts": {"norms": 0.4, "GELU": 1.6}}
    assert list(script.column(run).items()) == [
        ("GELU", 0.8),
        (script.BETWEEN, pytest.approx(0.5)),
        ("norms", 0.2),
        (script.KERNELS, pytest.approx(1.0)),
        (script.PROFILED, 1.5),
        (script.TIMED, pytest.approx(0.6)),
    ]


def test_a_part_that_one_precision_lacks_has_a_row(script):
    wholes = dict.fromkeys((script.KERNELS, script.PROFILED), 0.2)
    wholes |= dict.fromkeys((script.TIMED, script.AT_THE_RATE), 0.1)
    lines = script.table({"a": {"x": 0.2, **wholes}, "b": {"x": 0.1, "y": 0.1, **wholes}})
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines.splitlines()[2:]]
    assert rows == ["x", "y", *wholes, *script.SHARES]
    assert lines.splitlines()[-1] == "| as a share of its kernels | 50% | 50% |"
    assert "| y | 0.0 (0%) | 100.0 (50%) |" in lines


@pytest.mark.parametrize("fails", ["step_parts_ours", "matrix_rate_ours"])
def test_a_failing_worker_gives_one_line(script, monkeypatch, fails):
    def run(python, name, plan):
        if name == fails:
            raise RuntimeError("killed by signal 9")
        return {"gflops": 1.0}

    monkeypatch.setattr(script.contest, "run_worker", run)
    with pytest.raises(SystemExit, match="this project, LoRA, float32 failed: killed by signal 9"):
        script.main(["gpt2_step", "--quick"])


def test_it_is_refused_while_the_fast_paths_are_off(script, capsys):
    with fast_paths_off(), pytest.raises(SystemExit):
        script.parse(["gpt2_step"])
    assert "LORALIB_PLAIN is set" in capsys.readouterr().err


def test_wrong_flags_are_refused(script, capsys):
    for flags, message in (
        (["bert_step"], "invalid choice: 'bert_step'"),
        (["gpt2_step", "--data_dir", "here"], "give both --data_dir and --vocab"),
        (["gpt2_step", "--steps", "0"], "must be at least 1, not 0"),
    ):
        with pytest.raises(SystemExit):
            script.parse(flags)
        assert message in capsys.readouterr().err
