"""Tests of the benchmark of mixed adapters: a quick run, table, arithmetic, batches, check."""

import sys

import pytest
import torch


@pytest.fixture
def script(load_script):
    return load_script("mixed_adapters")


@pytest.mark.slow
def test_quick_run_of_this_project_alone(script, forked_workers, read_table, monkeypatch, capsys):
    """In one precision each, except for the baselines."""
    chosen = [
        script.ours(measured)[precision]
        for measured, precision in (
            ("plain batch", 0),
            ("plain batch", 1),
            ("4 adapters", 0),
            ("16 adapters", 1),
            ("a switch", 0),
        )
    ]
    monkeypatch.setattr(script, "contestants", lambda: chosen)
    flags = ["--quick", "--threads", "1", "--rounds", "1", "--steps", "1", "--switches", "9"]
    assert script.contest.main(script.BENCHMARK, flags) == 0
    rows = read_table(capsys.readouterr().out)
    assert [(row["contestant"], row["precision"]) for row in rows] == [
        (one.name, one.precision) for one in chosen
    ]
    assert [row["times ours"] for row in rows[:2]] == ["1.00", "1.00"]
    assert rows[0]["real tokens"] != "0"
    for row in rows:
        is_switch = "switch" in row["contestant"]
        assert float(row["ms per batch or switch"]) > 0
        assert row["real tokens"] == row["computed"]
        assert row["real tokens"] == ("0" if is_switch else rows[0]["real tokens"])


def test_table_of_known_times(script, fake_worker, read_table, capsys):
    """Adapters cost this project 1 % each, PEFT 10 %; 1,000 switches take it 20 ms, PEFT 2 s.

    Upstream's model takes 4 s.
    """

    def seconds_of(plan):
        is_ours, is_bank = plan["worker"] == "ours", plan["worker"] != "peers"
        if plan["way"] == "switch":
            return 0.02 if is_bank else 2
        if is_ours:
            return (1 if plan["autocast"] else 2) * (1 + plan["adapters"] / 100)
        return 4 * (1 + plan["adapters"] / (100 if is_bank else 10))

    plans = fake_worker(seconds_of)
    flags = ["--rounds", "2", "--steps", "4", "--peers_python", sys.executable]
    assert script.contest.main(script.BENCHMARK, flags) == 0
    rows = {
        (row["contestant"], row["precision"]): row for row in read_table(capsys.readouterr().out)
    }
    times = {name: (row["ms per batch or switch"], row["times ours"]) for name, row in rows.items()}
    ours, half = "this project", "bfloat16 weights + autocast"
    in_upstream = "loralib in upstream's model"
    assert times == {
        (f"{ours}, plain batch", "float32"): ("2000", "1.00"),
        (f"{ours}, plain batch", half): ("1000", "1.00"),
        (f"{ours}, 1 adapter", "float32"): ("2020", "1.01"),
        (f"{ours}, 1 adapter", half): ("1010", "1.01"),
        (f"{ours}, 4 adapters", "float32"): ("2080", "1.04"),
        (f"{ours}, 4 adapters", half): ("1040", "1.04"),
        (f"{ours}, 16 adapters", "float32"): ("2320", "1.16"),
        (f"{ours}, 16 adapters", half): ("1160", "1.16"),
        (f"{ours}, a switch", "float32"): ("0.02", "1e-05"),
        (f"{ours}, a switch", half): ("0.02", "2e-05"),
        ("upstream, plain batch", "float32"): ("4000", "2.00"),
        ("upstream, plain batch", "bfloat16 weights"): ("4000", "4.00"),
        ("PEFT, 1 adapter", "float32"): ("4400", "2.20"),
        ("PEFT, 1 adapter", "bfloat16 weights"): ("4400", "4.40"),
        ("PEFT, 4 adapters", "float32"): ("5600", "2.80"),
        ("PEFT, 4 adapters", "bfloat16 weights"): ("5600", "5.60"),
        ("PEFT, 16 adapters", "float32"): ("1.04e+04", "5.20"),
        ("PEFT, 16 adapters", "bfloat16 weights"): ("1.04e+04", "10.40"),
        ("PEFT, a switch", "float32"): ("2", "0.001"),
        ("PEFT, a switch", "bfloat16 weights"): ("2", "0.002"),
        (f"{in_upstream}, 1 adapter", "float32"): ("4040", "2.02"),
        (f"{in_upstream}, 1 adapter", "bfloat16 weights"): ("4040", "4.04"),
        (f"{in_upstream}, 4 adapters", "float32"): ("4160", "2.08"),
        (f"{in_upstream}, 4 adapters", "bfloat16 weights"): ("4160", "4.16"),
        (f"{in_upstream}, 16 adapters", "float32"): ("4640", "2.32"),
        (f"{in_upstream}, 16 adapters", "bfloat16 weights"): ("4640", "4.64"),
        (f"{in_upstream}, a switch", "float32"): ("0.02", "1e-05"),
        (f"{in_upstream}, a switch", "bfloat16 weights"): ("0.02", "2e-05"),
    }
    of_rounds = [plan["batches"] for plan in plans if plan["name"] == "this project, plain batch"]
    first, second = of_rounds[0], of_rounds[-1]
    assert first != second
    for plan in plans:
        if plan["way"] == "switch":
            assert plan["batches"] == [{"lengths": [], "repeats": 1000}] * 6
        else:
            assert plan["batches"] in (first, second)
            assert [len(entry["lengths"]) for entry in plan["batches"]] == [32] * 6
    batches = [entry["lengths"] for entry in first[2:] + second[2:]]
    real = sum(map(sum, batches))
    computed = {"this project": real, "PEFT": sum(32 * max(batch) for batch in batches)}
    for name, tokens in computed.items():
        row = rows[f"{name}, 4 adapters", "float32"]
        assert (row["real tokens"], row["computed"]) == (f"{real:,}", f"{tokens:,}")
        assert rows[f"{name}, a switch", "float32"]["GFLOP/s"] == "0"


def test_arithmetic_of_a_batch(script):
    """32 rows of 5 tokens, except for one of 10; 7.1 M weights in a layer."""

    def gflop(name, worker, **fields):
        contestant = script.Contestant(name, worker, **fields)
        entry = script.make_entry(contestant, [5] * 31 + [10], switches=3)
        return script.gflop(contestant, entry, script.roberta_step.ROBERTA_BASE)

    padded = 12 * (2 * 12 * 768**2 * 320 + 4 * 768 * 32 * 10**2)
    assert gflop("PEFT", "peers", adapters=4) == pytest.approx(padded / 1e9)
    # Of the last layer only keys and values, 2 of 12 squares, are computed for every token.
    packed = (11 + 2 / 12) * (2 * 12 * 768**2 * 165 + 4 * 768 * (31 * 5**2 + 10**2))
    assert gflop("ours", "ours", adapters=4) == pytest.approx(packed / 1e9)
    assert gflop("ours", "ours", adapters=16, way="switch") == 0


def plan_of(adapters, weights="float32"):
    about = {"seed": 0, "device": "cpu", "shape": {"vocab_size": 100}, "pad_to": None}
    return {**about, "adapters": adapters, "weights": weights}


def logits_of(inputs, names):
    """Logits that show each row's second token and the number of its adapter."""
    ids = inputs["input_ids"]
    names = [names] * len(ids) if isinstance(names, str) else names
    numbers = [int(name.removeprefix("task")) for name in names]
    return torch.stack([ids[:, 1], torch.tensor(numbers)], dim=1).float()


def with_next_adapters(inputs, names):
    """In mixed batches, each row has the adapter of the next one."""
    return logits_of(inputs, names if isinstance(names, str) else [*names[1:], names[0]])


def with_one_adapter(inputs, names):
    """All rows have the same adapter."""
    return logits_of(inputs, "task0")


def not_finite(inputs, names):
    """Logits are not finite."""
    return logits_of(inputs, names) * float("nan")


def slightly_off(inputs, names):
    """Logits of mixed batches are off by 0.01."""
    return logits_of(inputs, names) + (0 if isinstance(names, str) else 0.01)


@pytest.mark.parametrize(
    ("adapters", "weights", "function", "message"),
    [
        (1, "float32", logits_of, None),
        (4, "float32", logits_of, None),
        (4, "bfloat16", slightly_off, None),
        (4, "float32", slightly_off, "the logits of task0 differ by 0.01 in a mixed batch"),
        (4, "bfloat16", with_next_adapters, "the logits of task0 differ by 1 in a mixed batch"),
        (2, "float32", not_finite, "the logits of task0 differ by nan in a mixed batch"),
        (4, "float32", with_one_adapter, "all adapters give the logits of task0"),
    ],
)
def test_wrong_mixing_by_a_worker_is_detected(load_worker, adapters, weights, function, message):
    shared = load_worker("adapter_rows")
    plan = plan_of(adapters, weights)
    if message is None:
        shared.check_mixing(plan, shared.make_batch, function)
    else:
        with pytest.raises(ValueError, match=f"^{message}$"):
            shared.check_mixing(plan, shared.make_batch, function)


def test_our_worker_puts_rows_of_an_adapter_next_to_each_other(load_worker):
    plan, entry = plan_of(3), {"lengths": [3, 4, 5, 6, 7, 8, 9], "repeats": 1}
    mixed = load_worker("adapter_rows").make_batch(plan, 2, entry)
    assert mixed["names"] == ["task0", "task1", "task2", "task0", "task1", "task2", "task0"]
    ours = load_worker("mixed_adapters_ours").make_batch(plan, 2, entry)
    assert ours["names"] == ["task0"] * 3 + ["task1"] * 2 + ["task2"] * 2
    for name in ("input_ids", "attention_mask"):
        assert ours[name].equal(mixed[name][[0, 3, 6, 1, 4, 2, 5]])
    assert ours["attention_mask"].sum(1).tolist() == [3, 6, 9, 4, 7, 5, 8]
    assert ours["packed_rows"].lengths == [3, 6, 9, 4, 7, 5, 8]


@pytest.mark.parametrize("adapters", [0, 2])
def test_our_model_does_not_read_the_mask(load_worker, monkeypatch, adapters):
    """The packed rows come with the batch, so that the model need not read the mask."""
    worker, shape = load_worker("mixed_adapters_ours"), {"hidden_size": 8, "num_attention_heads": 2}
    shape |= {"vocab_size": 100, "num_hidden_layers": 1, "intermediate_size": 8}
    plan = {**plan_of(adapters), "rank": 2, "alpha": 2, "autocast": None, "way": "batch"}
    plan["shape"] = shape
    step = worker.make_step(plan)
    batch = worker.make_batch(plan, 0, {"lengths": [4, 3], "repeats": 1})

    def not_read(mask):
        raise AssertionError("the mask is read")

    monkeypatch.setattr("transformers.modeling_encoder.PackedRows", not_read)
    assert step(batch).shape == (2, 2)


@pytest.mark.parametrize("worker", ["adapter_rows", "mixed_adapters_ours"])
def test_a_plain_batch_and_switches(load_worker, worker):
    make_batch = load_worker(worker).make_batch
    plain = make_batch(plan_of(0), 2, {"lengths": [4, 3], "repeats": 1})
    assert plain["names"] == []
    assert plain["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    switches = {"lengths": [], "repeats": 5}
    assert make_batch(plan_of(3), 2, switches) == switches
