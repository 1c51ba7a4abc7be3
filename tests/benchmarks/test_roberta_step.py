"""Tests of RoBERTa's benchmark: a quick run of this project alone, table, arithmetic, errors."""

import json
import sys
from statistics import mean

import pytest


@pytest.fixture
def script(load_script):
    return load_script("roberta_step")


@pytest.mark.slow
def test_quick_run_of_this_project_alone(run_quickly, tmp_path):
    out = tmp_path / "steps.json"
    rows = run_quickly("roberta_step", "--rounds", "1", "--steps", "2", "--json", str(out))
    assert [(row["contestant"], row["precision"]) for row in rows] == [
        ("this project, LoRA", "float32"),
        ("this project, LoRA", "bfloat16 weights + autocast"),
        ("this project, full fine-tuning", "float32"),
    ]
    for row in rows:
        assert float(row["ms per real token"]) > 0
        assert float(row["peak GiB"]) > 0.05
        assert row["real tokens"] == row["computed"] == rows[0]["real tokens"]
    assert [row["times ours"] for row in rows[:2]] == ["1.00", "1.00"]
    for record in json.loads(out.read_text()):
        (run,) = record["runs"]
        assert len(run["seconds"]) == 2
        assert run["threads"] == 1
        assert [len(batch) for batch in run["batches"]] == [16, 16]


def test_table_of_known_times_and_of_one_that_failed(
    script, fake_worker, read_table, tmp_path, capsys
):
    """PEFT takes 3 s a step, padded to 512 20 s; this project 2 s in float32, 1 s in bfloat16."""

    def seconds_of(plan):
        if plan["weights"] == "bfloat16" and not plan["autocast"]:
            raise RuntimeError("killed by signal 9")
        if plan["worker"] == "peers":
            return 20 if plan["pad_to"] else 3
        return 1 if plan["autocast"] else 2

    fake_worker(seconds_of)
    flags = ["--rounds", "2", "--steps", "4", "--json", str(tmp_path / "steps.json")]
    assert script.contest.main(script.BENCHMARK, [*flags, "--peers_python", sys.executable]) == 1
    printed = capsys.readouterr().out
    assert "failed: PEFT, bfloat16 weights: killed by signal 9" in printed
    rows = {(row["contestant"], row["precision"]): row for row in read_table(printed)}
    assert ("PEFT", "bfloat16 weights") not in rows
    times = {
        name: row["times ours"] for name, row in rows.items() if name[0] != "this project, LoRA"
    }
    assert times == {
        ("this project, full fine-tuning", "float32"): "1.00",
        ("PEFT", "float32"): "1.50",
        ("PEFT", "bfloat16 weights + autocast"): "3.00",
        ("PEFT", "bfloat16 autocast"): "3.00",
        ("PEFT, padded to 512", "float32"): "10.00",
    }
    assert rows["PEFT, padded to 512", "float32"]["computed"] == f"{2 * 2 * 16 * 512:,}"
    dynamic = rows["PEFT", "float32"]
    records = json.loads((tmp_path / "steps.json").read_text())
    batches = [batch for run in records[0]["runs"] for batch in run["batches"]]
    assert dynamic["real tokens"] == f"{sum(map(sum, batches)):,}"
    assert dynamic["computed"] == f"{sum(16 * max(batch) for batch in batches):,}"


def test_cuda_graphs_are_recorded_before_they_are_timed(script):
    args = script.contest.parse(script.BENCHMARK, ["--device", "cuda", "--steps", "3"])
    measurement = script.measure(args)
    graphs = [one for one in measurement.contestants if one.graphs]
    assert [one.dtype for one in graphs] == ["float32", "bfloat16", "float16"]
    assert not any(one.graphs for one in script.contestants("cpu"))
    for one in graphs:
        plan = measurement.plan_of(one, 0)
        timed = plan["batches"][plan["warmup"] :]
        assert len(timed) == 3
        assert plan["batches"][plan["warmup"] - 3 : plan["warmup"]] == timed
        baseline = measurement.baseline_of(one)
        assert measurement.plan_of(baseline, 0)["batches"][-3:] == timed


def test_arithmetic_of_a_step(script):
    """85 M weights in the layers; 16 rows of 10 tokens."""
    full = script.Contestant("full", "peers", full=True)
    batch = [10] * 16
    linear = 2 * 3 * 12 * 12 * 768**2 * 160
    attention = 2 * 3 * 12 * 2 * 768 * 16 * 10**2
    assert script.gflop(full, batch, script.ROBERTA_BASE) == pytest.approx(
        (linear + attention) / 1e9
    )


def test_a_turn_has_at_least_one_step(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.contest.main(script.BENCHMARK, ["--steps", "0"])
    assert stop.value.code == 2
    assert "argument --steps: must be at least 1, not 0" in capsys.readouterr().err


def test_missing_files_are_named(script, tmp_path):
    with pytest.raises(SystemExit, match=r"RTE/train\.tsv is missing"):
        script.count_tokens(tmp_path, tmp_path)
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE" / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n")
    with pytest.raises(SystemExit, match=r"neither vocab\.json nor encoder\.json"):
        script.count_tokens(tmp_path, tmp_path)


@pytest.mark.slow
def test_built_in_quantiles_are_those_of_rte(script, data):
    lengths = sorted(script.count_tokens(data / "glue", data / "gpt2-vocab"))
    assert len(lengths) == 2490
    assert [lengths[int((i + 0.5) * 2490 / 50)] for i in range(50)] == script.QUANTILES
    assert mean(script.QUANTILES) == pytest.approx(mean(lengths), rel=0.01)
