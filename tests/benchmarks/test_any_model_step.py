"""Tests of the benchmark of upstream's models: contestants, table, workers' environment, step."""

import json
import subprocess
import sys

import pytest
import torch

import loralib as lora


@pytest.fixture
def script(load_script):
    return load_script("any_model_step")


def test_all_rows_of_one_setting_have_one_baseline_in_each_dtype(script):
    everyone = script.contestants()
    assert len(everyone) == len(set(everyone)) == 5 * len(script.settings())
    for one in everyone:
        baseline = script.baseline_of(one)
        assert baseline in everyone
        assert (baseline.worker, baseline.dtype) == ("loralib", one.dtype)
        for field in ("model", "adapted", "variant", "lora_dropout"):
            assert getattr(baseline, field) == getattr(one, field)
    ours = [one for one in everyone if one.worker == "loralib"]
    assert [script.baseline_of(one) for one in ours] == ours


def test_table_of_known_times(script, fake_worker, read_table, capsys):
    """PEFT takes 3 s a step, this project 2 s, 1 s in bfloat16; DoRA takes both twice as long."""

    def seconds_of(plan):
        times = 2 if plan["variant"] == "dora" else 1
        return times * (
            3 if plan["worker"] == "peers" else 1 if plan["weights"] != "float32" else 2
        )

    plans = fake_worker(seconds_of)
    flags = ["--rounds", "2", "--steps", "4", "--peers_python", sys.executable]
    assert script.contest.main(script.BENCHMARK, flags) == 0
    rows = read_table(capsys.readouterr().out)
    assert len(rows) == len(script.contestants())
    for row in rows:
        is_half = row["precision"] != "float32"
        expected = "1.00" if "loralib" in row["contestant"] else "3.00" if is_half else "1.50"
        assert row["times ours"] == expected
        assert row["real tokens"] == rows[0]["real tokens"]
        assert row["computed"] == rows[0]["computed"]
    for plan in plans:
        model = script.MODELS[plan["model"]]
        assert plan["targets"] == model.targets[plan["adapted"]]
        assert plan["batches"] in (plans[0]["batches"], plans[-1]["batches"])
        assert [len(batch) for batch in plan["batches"]] == [8] * 6


def test_only_also_runs_the_baselines(script, fake_worker, read_table, capsys):
    fake_worker(lambda plan: 3 if plan["worker"] == "peers" else 2)
    flags = ["--rounds", "1", "--steps", "1", "--peers_python", sys.executable]
    flags += ["--only", "q/v, DoRA, dropout 0.1: PEFT"]
    assert script.contest.main(script.BENCHMARK, flags) == 0
    rows = read_table(capsys.readouterr().out)
    name = "RoBERTa-base, q/v, DoRA, dropout 0.1"
    assert [row["contestant"] for row in rows] == [f"{name}: loralib"] * 2 + [f"{name}: PEFT"] * 3
    assert [row["times ours"] for row in rows] == ["1.00"] * 2 + ["1.50"] * 3


def test_arithmetic_of_a_step(script):
    """8 rows padded to 10 tokens; Llama has three matrices in a feed-forward layer, and a head."""
    batch = [5] * 7 + [10]
    roberta, llama = (
        script.gflop(script.Contestant("", "peers", model=name), batch, model.shape)
        for name, model in script.MODELS.items()
    )
    attention = 12 * 3 * 4 * 768 * 8 * 10**2
    linear = 2 * 2 * 12 * 80 * 768**2
    assert roberta == pytest.approx((12 * linear + attention) / 1e9)
    head = 2 * 2 * 768 * 8000 * 80
    assert llama == pytest.approx((12 * linear + attention + head) / 1e9)


def test_upstreams_models_need_the_peers_environment(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.contest.main(script.BENCHMARK, [])
    assert stop.value.code == 2
    assert "--peers_python is needed" in capsys.readouterr().err


@pytest.mark.parametrize("worker", ["ours", "loralib", "peers"])
def test_workers_find_only_the_packages_they_need(contest, monkeypatch, worker):
    """In the peers' environment, only the worker "loralib" finds one, which is loralib."""
    given = []

    def run(command, env, **_):
        given.append(env.get("PYTHONPATH"))
        command[-1].write_text(json.dumps({"seconds": [1]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(contest.subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert contest.run_worker(
        "python", "x", {"worker": worker, "threads": None, "device": "cpu"}
    ) == {"seconds": [1]}
    root = str(contest.ROOT.parent)
    ours = f"{contest.NLG}{contest.os.pathsep}elsewhere"
    assert given == [{"ours": ours, "loralib": root, "peers": None}[worker]]


def test_a_training_step_changes_only_lora(load_worker):
    """The step that PEFT's worker and loralib's share, on a small model with LoRA."""
    training_step = load_worker("peer_training").training_step
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    lora.add_lora(model, ["0"], r=2, lora_dropout=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = {"device": "cpu", "autocast": None}
    step = training_step(plan, model, lambda batch: model(batch["x"]).square().mean(), 0.1, 1.0)
    assert torch.isfinite(step({"x": torch.randn(4, 6)}))
    after = model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == {"0.lora_A", "0.lora_B"}  # A by weight decay: B has been zero
