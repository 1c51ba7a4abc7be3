"""Tests of GPT-2's training benchmark: a quick run of this project alone, table, rows."""

import json
import sys

import pytest


@pytest.fixture
def script(load_script):
    return load_script("gpt2_step")


@pytest.mark.slow
def test_quick_run_of_this_project_alone(run_quickly, tmp_path):
    out = tmp_path / "steps.json"
    rows = run_quickly("gpt2_step", "--rounds", "1", "--steps", "2", "--json", str(out))
    assert [(row["contestant"], row["precision"]) for row in rows] == [
        ("this project, LoRA", "float32"),
        ("this project, LoRA", "bfloat16 weights + autocast"),
        ("this project, full fine-tuning", "float32"),
    ]
    assert [row["times ours"] for row in rows[:2]] == ["1.00", "1.00"]
    for row in rows:
        assert float(row["ms per example"]) > 0
        # No row's last token is computed: 2 steps of 8 rows.
        assert int(row["real tokens"].replace(",", "")) - 16 == int(
            row["computed"].replace(",", "")
        )
    for record in json.loads(out.read_text()):
        (run,) = record["runs"]
        assert [len(batch) for batch in run["batches"]] == [8, 8]


def test_table_of_known_times(script, fake_worker, read_table, capsys):
    """PEFT takes 3 s a step, padded to 512 24 s; this project 2 s in float32, 1 s in bfloat16."""

    def seconds_of(plan):
        if plan["worker"] == "peers":
            return 24 if plan["pad_to"] else 3
        return 1 if plan["autocast"] else 2

    plans = fake_worker(seconds_of)
    flags = ["--rounds", "1", "--steps", "4", "--peers_python", sys.executable]
    assert script.contest.main(script.BENCHMARK, flags) == 0
    rows = {
        (row["contestant"], row["precision"]): row for row in read_table(capsys.readouterr().out)
    }
    assert {name: row["times ours"] for name, row in rows.items() if "PEFT" in name[0]} == {
        ("PEFT", "float32"): "1.50",
        ("PEFT", "bfloat16 weights"): "3.00",
        ("PEFT", "bfloat16 weights + autocast"): "3.00",
        ("PEFT", "bfloat16 autocast"): "3.00",
        ("PEFT, padded to 512", "float32"): "12.00",
    }
    assert rows["PEFT", "float32"]["ms per example"] == "375"
    assert rows["PEFT, padded to 512", "float32"]["computed"] == f"{2 * 8 * 512:,}"
    # Only in half precision does compiling kernels take long. Padded to 512, there are few steps.
    warmups = {
        (plan["autocast"] or plan["weights"], plan["pad_to"]): plan["warmup"] for plan in plans
    }
    assert warmups == {("float32", None): 2, ("bfloat16", None): 10, ("float32", 512): 1}
    # The timed batches are the same for all, or the first of them.
    timed = [plan["batches"][plan["warmup"] :] for plan in plans]
    assert {len(batches) for batches in timed} == {4, 2}
    assert all(batches == timed[0][: len(batches)] for batches in timed)


def test_arithmetic_of_a_step(script):
    """8 rows of 6 tokens of context and 4 of completion; 38.6 M weights in the head."""
    shape, batch = script.GPT2_SMALL, [(6, 4)] * 8
    head = 768 * 50257
    peers = 2 * 2 * (12 * 12 * 768**2 + head) * 80 + 3 * 12 * 4 * 768 * 8 * 10**2
    assert script.gflop(script.Contestant("", "peers"), batch, shape) == pytest.approx(peers / 1e9)
    # Of 9 tokens a row, 4 have a target; the last layer's queries, keys and values are all there.
    linear = 11 * 12 * 768**2 * 72 + 3 * 768**2 * 72 + 9 * 768**2 * 32 + head * 32
    ours = 2 * 3 * linear + 3 * 12 * 4 * 768 * 8 * 9**2
    full = script.Contestant("", "ours", full=True)
    assert script.gflop(full, batch, shape) == pytest.approx(ours / 1e9)


def test_missing_files_are_named(script, tmp_path):
    with pytest.raises(SystemExit, match=r"neither train\.txt nor valid\.txt"):
        script.count_rows(tmp_path, tmp_path)
    (tmp_path / "valid.txt").write_text("a : b||c\n")
    with pytest.raises(SystemExit, match=r"neither vocab\.json nor encoder\.json"):
        script.count_rows(tmp_path, tmp_path)


@pytest.mark.slow
def test_built_in_rows_are_those_of_e2e(script, data):
    e2e = data / "nlg" / "e2e"
    if (e2e / "train.txt").is_file():
        pytest.skip("the quantiles are the validation file's")
    rows = sorted(script.count_rows(e2e, data / "gpt2-vocab"), key=lambda row: (sum(row), row))
    assert len(rows) == 4672
    assert [rows[int((i + 0.5) * 4672 / 50)] for i in range(50)] == script.ROWS
