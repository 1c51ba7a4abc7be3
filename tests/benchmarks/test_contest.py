"""What the benchmarks share: turns, failures, the command line."""

import argparse

import pytest


@pytest.fixture
def runners(contest):
    names = [("a", "ours"), ("b", "ours"), ("c", "peers")]
    return [contest.Contestant(name, worker) for name, worker in names]


def columns(contest):
    return contest.Columns("s", 1, per=len, gflop=lambda one, batch: 6 * len(batch))


def flags(**given):
    about = {
        "rounds": 3,
        "threads": 1,
        "device": "cpu",
        "only": "",
        "json": None,
        "peers_python": "there",
    }
    return argparse.Namespace(**{**about, **given})


def plan_of(contestant, number):
    return {"warmup": 1, "batches": [[0], [number], [number, number]]}


def test_turns_rotate_on_the_same_batches(contest, runners, fake_worker):
    plans = fake_worker(lambda plan: 2)
    results, failed = contest.take_turns("x", runners, plan_of, flags())
    assert [plan["name"] for plan in plans] == [*"abc", *"bca", *"cab"]
    assert [plan["worker_name"] for plan in plans[:3]] == ["x_ours", "x_ours", "x_peers"]
    assert not failed
    for runs in results.values():
        assert [run["batches"] for run in runs] == [[[n], [n, n]] for n in range(3)]


def test_what_failed_is_named_and_not_run_again(contest, runners, fake_worker, capsys):
    def seconds_of(plan):
        if plan["name"] == "b":
            raise RuntimeError("no memory")
        return 2 if plan["name"] == "a" else 5

    plans = fake_worker(seconds_of)
    ours = {"float32": runners[0]}
    measurement = contest.Measurement(runners, contest.by_dtype(ours), plan_of, columns(contest))
    assert contest.compete("x", measurement, flags()) == 1
    printed = capsys.readouterr().out
    assert "- failed: b, float32: no memory" in printed
    # A batch has one element or two.
    assert "| c | float32 | 3.75 | 2.50 | 2 | 3.00 |" in printed
    assert [plan["name"] for plan in plans].count("b") == 1
    assert contest.compete("x", measurement, flags(peers_python=None)) == 1
    assert "| c |" not in capsys.readouterr().out


def test_no_row_without_its_baseline(contest, runners, fake_worker, capsys):
    fake_worker(lambda plan: 1)
    half = contest.Contestant("half", "ours", weights="bfloat16")
    ours = {"float32": runners[0], "bfloat16": contest.Contestant("absent", "ours")}
    measurement = contest.Measurement(
        [*runners, half], contest.by_dtype(ours), plan_of, columns(contest)
    )
    assert contest.compete("x", measurement, flags()) == 0
    assert "half" not in capsys.readouterr().out


def test_only_some_run_by_name_or_precision(contest, runners, fake_worker, capsys):
    plans = fake_worker(lambda plan: 1)
    half = contest.Contestant("half", "ours", weights="bfloat16")
    measurement = contest.Measurement(
        [*runners, half],
        contest.by_dtype({"float32": runners[0], "bfloat16": half}),
        plan_of,
        columns(contest),
    )
    for only, names in (("c", "ac"), ("bfloat16", ["half"])):
        plans.clear()
        assert contest.compete("x", measurement, flags(only=only, rounds=1)) == 0
        assert [plan["name"] for plan in plans] == list(names)
    with pytest.raises(SystemExit, match="--only d: no contestant is called so, of a, float32; b"):
        contest.compete("x", measurement, flags(only="d"))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo warning >&2; echo no module named peft >&2; exit 1", "^no module named peft$"),
        ("exit 3", "^exit status 3$"),
        ("kill -9 $$", "^killed by signal 9$"),
    ],
)
def test_a_worker_that_fails_says_why(contest, tmp_path, script, why):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match=why):
        contest.run_worker(str(python), "x_peers", {"threads": 1, "worker": "peers"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--peers_python", "no/such/python"], "no/such/python is not a program"),
        (["--data_dir", "."], "--data_dir and --vocab go together"),
        (["--rounds", "0"], "argument --rounds: 0 is not at least 1"),
        (["--threads", "two"], "argument --threads: invalid positive value: 'two'"),
    ],
)
def test_wrong_flags(contest, capsys, given, message):
    benchmark = contest.Benchmark("x", "", "", rounds=1, flags=[], measure=None)
    with pytest.raises(SystemExit) as stop:
        contest.parse(benchmark, given)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
