"""Tests of DeBERTa-v2's benchmark: a quick run of this project alone, table, arithmetic."""

import sys

import pytest


@pytest.fixture
def script(load_script):
    return load_script("deberta_step")


@pytest.mark.slow
def test_quick_run_of_this_project_alone(run_quickly):
    rows = run_quickly("deberta_step", "--rounds", "1", "--steps", "1")
    assert [(row["contestant"], row["precision"]) for row in rows] == [
        ("this project, LoRA", "float32"),
        ("this project, LoRA", "bfloat16 weights + autocast"),
        ("this project, full fine-tuning", "float32"),
    ]
    for row in rows:
        assert float(row["ms per real token"]) > 0
        assert row["real tokens"] == row["computed"] == rows[0]["real tokens"]
    assert [row["times ours"] for row in rows[:2]] == ["1.00", "1.00"]


def test_table_of_known_times(script, fake_worker, read_table, capsys):
    """PEFT takes 3 s a step, this project 2 s in float32 and 1 s in bfloat16."""

    def seconds_of(plan):
        return 3 if plan["worker"] == "peers" else 1 if plan["autocast"] else 2

    plans = fake_worker(seconds_of)
    flags = ["--rounds", "1", "--steps", "2", "--peers_python", sys.executable]
    assert script.contest.main(script.BENCHMARK, flags) == 0
    rows = read_table(capsys.readouterr().out)
    times = {(row["contestant"], row["precision"]): row["times ours"] for row in rows}
    assert times == {
        ("this project, LoRA", "float32"): "1.00",
        ("this project, LoRA", "bfloat16 weights + autocast"): "1.00",
        ("this project, full fine-tuning", "float32"): "1.00",
        ("PEFT", "float32"): "1.50",
        ("PEFT", "bfloat16 weights"): "3.00",
        ("PEFT", "bfloat16 weights + autocast"): "3.00",
        ("PEFT", "bfloat16 autocast"): "3.00",
    }
    assert {plan["worker_name"] for plan in plans} == {"deberta_step_ours", "deberta_step_peers"}
    assert all(plan["shape"] == script.DEBERTA_V3_BASE for plan in plans)


@pytest.mark.parametrize("worker", ["ours", "peers"])
def test_arithmetic_of_a_step(script, worker):
    """85 M weights in the layers; 15 rows of 10 tokens and one of 20; two terms of distances."""
    contestant = script.Contestant("LoRA", worker)
    if worker == "ours":
        layers, lengths = 11 + 2 / 12, [10] * 15 + [20]
        distances = 15 * 10 * 19 + 20 * 39
    else:
        layers, lengths = 12, [20] * 16
        distances = 16 * 20 * 512
    linear = 2 * 2 * 12 * 768**2 * sum(lengths)
    attention = 3 * 4 * 768 * sum(n**2 for n in lengths)
    positions = 3 * 2 * 2 * 768 * distances
    expected = layers * (linear + attention + positions) / 1e9
    own = script.gflop(contestant, [10] * 15 + [20], script.DEBERTA_V3_BASE)
    assert own == pytest.approx(expected)
