"""Tests of what the benchmarks share: turns, failures, shares, flags, charts."""

import argparse
import importlib
import itertools
import sys
from itertools import pairwise

import pytest
import torch
from PIL import Image


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
        "plot": None,
        "peers_python": "there",
        "quick": False,
    }
    return argparse.Namespace(**{**about, **given})


def plan_of(contestant, number):
    return {"warmup": 1, "batches": [[0], [number], [number, number]]}


def with_half(contest, runners):
    """A measurement of the runners and of a contestant in bfloat16, with a baseline each."""
    half = contest.Contestant("half", "ours", weights="bfloat16")
    baseline_of = contest.by_dtype({"float32": runners[0], "bfloat16": half})
    return contest.Measurement([*runners, half], baseline_of, plan_of, columns(contest))


@pytest.mark.parametrize("quick", [False, True])
def test_quick_runs_are_marked_as_such(contest, runners, fake_worker, capsys, quick):
    fake_worker(lambda plan: 2)
    ours = {"float32": runners[0]}
    measurement = contest.Measurement(runners, contest.by_dtype(ours), plan_of, columns(contest))
    contest.compete("x", measurement, flags(quick=quick))
    assert ("- --quick: a tiny shape" in capsys.readouterr().out) == quick


def test_turns_rotate_on_the_same_batches(contest, runners, fake_worker):
    plans = fake_worker(lambda plan: 2)
    measurement = contest.Measurement(runners, None, plan_of, columns(contest))
    results, rates, failed = contest.take_turns("x", runners, measurement, flags())
    assert [plan["name"] for plan in plans] == [*"abc", *"bca", *"cab"]
    assert [plan["worker_name"] for plan in plans[:3]] == ["x_ours", "x_ours", "x_peers"]
    assert not failed
    assert not rates
    for runs in results.values():
        assert [run["batches"] for run in runs] == [[[n], [n, n]] for n in range(3)]


def test_a_contestant_that_failed_is_named_and_not_run_again(contest, runners, fake_worker, capsys):
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


def test_shares_are_of_the_machines_measured_rate(
    contest, runners, fake_worker, monkeypatch, capsys
):
    happened = []

    def seconds_of(plan):
        happened.append(plan["name"])
        return 2 if plan["name"] == "a" else 5

    def rate(dtype, products, _):
        """20 before a run, 28 after it."""
        happened.append((dtype, *products))
        return 20 if len(happened) % 3 == 1 else 28

    fake_worker(seconds_of)
    monkeypatch.setattr(contest, "matrix_rate", rate)
    ours = {"float32": runners[0]}
    measurement = contest.Measurement(
        runners, contest.by_dtype(ours), plan_of, columns(contest), products=[(8, 4, 4, 1)]
    )
    assert contest.compete("x", measurement, flags()) == 0
    asked = ("float32", (8, 4, 4, 1))
    assert happened[::3] == happened[2::3] == [asked] * 9
    assert asked not in happened[1::3]
    printed = capsys.readouterr().out
    # Batches of 6 and 12 GFLOP, in 2 seconds or 5, of 24 GFLOP/s.
    assert "| a | float32 | 1.5 | 1.00 | 4 | 19% | 3.00 |" in printed
    assert "| c | float32 | 3.75 | 2.50 | 2 | 8% | 3.00 |" in printed
    assert "- the machine at the step's products, float32: 24 GFLOP/s" in printed


@pytest.mark.parametrize("fails_from", [1, 2, 3, 6])  # calls
def test_rows_remain_when_a_rate_cannot_be_measured(
    contest, runners, fake_worker, monkeypatch, capsys, fails_from
):
    calls = itertools.count(1)

    def rate(dtype, products, _):
        if dtype == "bfloat16" and next(calls) >= fails_from:
            raise RuntimeError("no memory")
        return 24

    fake_worker(lambda plan: 2)
    monkeypatch.setattr(contest, "matrix_rate", rate)
    half = contest.Contestant("half", "ours", weights="bfloat16")
    measurement = contest.Measurement(
        [runners[0], half],
        contest.by_dtype({"float32": runners[0], "bfloat16": half}),
        plan_of,
        columns(contest),
        products=[(8, 4, 4, 1)],
    )
    assert contest.compete("x", measurement, flags()) == 1
    printed = capsys.readouterr().out
    assert "- failed: products, bfloat16: no memory" in printed
    assert "| a | float32 | 1.5 | 1.00 | 4 | 19% | 3.00 |" in printed
    assert "| half | bfloat16 weights | 1.5 | 1.00 | 4 | - | 3.00 |" in printed


def test_rows_without_their_baseline_are_left_out(contest, runners, fake_worker, capsys):
    fake_worker(lambda plan: 1)
    half = contest.Contestant("half", "ours", weights="bfloat16")
    ours = {"float32": runners[0], "bfloat16": contest.Contestant("absent", "ours")}
    measurement = contest.Measurement(
        [*runners, half], contest.by_dtype(ours), plan_of, columns(contest)
    )
    assert contest.compete("x", measurement, flags()) == 0
    assert "half" not in capsys.readouterr().out


def test_only_selects_by_name_or_precision(contest, runners, fake_worker):
    plans = fake_worker(lambda plan: 1)
    measurement = with_half(contest, runners)
    for only, names in (("c", "ac"), ("bfloat16", ["half"])):
        plans.clear()
        assert contest.compete("x", measurement, flags(only=only, rounds=1)) == 0
        assert [plan["name"] for plan in plans] == list(names)
    with pytest.raises(SystemExit, match="--only d matches no contestant; known: a, float32; b"):
        contest.compete("x", measurement, flags(only="d"))


@pytest.mark.parametrize(("device", "count"), [("cuda", 3), ("cpu", 4)])
def test_a_dtype_that_a_gpu_emulates_is_left_out(
    contest, runners, fake_worker, monkeypatch, device, count
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    plans = fake_worker(lambda plan: 1)
    measurement = with_half(contest, runners)
    assert contest.compete("x", measurement, flags(rounds=1, device=device)) == 0
    assert len(plans) == count


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
        contest.run_worker(
            str(python), "x_peers", {"threads": 1, "worker": "peers", "device": "cpu"}
        )


@pytest.mark.parametrize("worker", ["ours", "peers", "loralib"])
@pytest.mark.parametrize(
    ("device", "seen", "given"),
    [
        ("cuda", None, "0"),
        ("cuda", "3,5", "3"),
        ("cuda", "", ""),
        ("cpu", "3,5", "3,5"),
    ],
)
def test_a_worker_sees_one_gpu(contest, tmp_path, monkeypatch, worker, device, seen, given):
    """Upstream's Trainer would use several."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "sees <$CUDA_VISIBLE_DEVICES>" >&2; exit 1\n')
    python.chmod(0o755)
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    plan = {"threads": None, "worker": worker, "device": device}
    with pytest.raises(RuntimeError, match=f"^sees <{given}>$"):
        contest.run_worker(str(python), "x", plan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--peers_python", "no/such/python"], "no/such/python is not a program"),
        (["--data_dir", "."], "give both --data_dir and --vocab"),
        (["--rounds", "0"], "argument --rounds: must be at least 1, not 0"),
        (["--plot", "chart.jpeg"], "--plot: chart.jpeg: unknown format of a picture"),
        (["--plot", "nowhere/a.png"], "--plot: nowhere/a.png: there is no folder nowhere"),
        (["--json", "nowhere/a.json"], "--json: nowhere/a.json: there is no folder nowhere"),
        (["--threads", "two"], "argument --threads: invalid positive value: 'two'"),
    ],
)
def test_wrong_flags_are_refused(contest, capsys, given, message):
    benchmark = contest.Benchmark("x", "", "", rounds=1, flags=[], measure=None)
    with pytest.raises(SystemExit) as stop:
        contest.parse(benchmark, given)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("docstring", "shown"), [("One line.\nMore.", "One line."), (None, "")])
def test_help_needs_no_docstring(contest, capsys, docstring, shown):
    """Python -OO leaves docstrings out."""
    benchmark = contest.Benchmark("x", docstring, "", rounds=1, flags=[], measure=None)
    with pytest.raises(SystemExit):
        contest.parse(benchmark, ["--help"])
    help_text = capsys.readouterr().out
    assert shown in help_text
    assert "More." not in help_text


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    contest, capsys, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    measured = []
    benchmark = contest.Benchmark("x", "", "", rounds=1, flags=[], measure=measured.append)
    with pytest.raises(SystemExit) as stop:
        contest.main(benchmark, ["--plot", str(tmp_path / "a.png")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--plot: the picture needs matplotlib: pip install matplotlib" in line
    assert not measured


@pytest.fixture
def drawn(contest, monkeypatch):
    """A list of the charts that are drawn: (title, bars, footer)."""
    charts, draw = [], contest.draw

    def record(title, bars, footer):
        charts.append((title, bars, footer))
        return draw(title, bars, footer)

    monkeypatch.setattr(contest, "draw", record)
    return charts


def test_the_chart_has_the_tables_rows(contest, runners, fake_worker, capsys, drawn, tmp_path):
    fake_worker(lambda plan: {"a": 2, "b": 1, "c": 5}[plan["name"]])
    ours = {"float32": runners[0]}
    measurement = contest.Measurement(runners, contest.by_dtype(ours), plan_of, columns(contest))
    path = tmp_path / "chart.png"
    assert contest.compete("x", measurement, flags(plot=path)) == 0
    ((title, bars, footer),) = drawn
    assert title == "benchmarks/x.py"
    assert [(bar.label, bar.value, bar.says, bar.is_ours) for bar in bars] == [
        ("a, float32", 1.0, "1.00 (1.5 s)", True),
        ("b, float32", 0.5, "0.50 (0.75 s)", True),
        ("c, float32", 2.5, "2.50 (3.75 s)", False),
    ]
    printed = capsys.readouterr().out
    assert all(line.strip() in printed for line in footer.splitlines())
    with Image.open(path) as image:
        assert image.format == "PNG"


def test_no_chart_is_drawn_without_rows(contest, runners, fake_worker, drawn, tmp_path, capsys):
    fake_worker(lambda plan: 1)
    ours = {"float32": contest.Contestant("absent", "ours")}
    measurement = contest.Measurement(runners, contest.by_dtype(ours), plan_of, columns(contest))
    assert contest.compete("x", measurement, flags(plot=tmp_path / "chart.png")) == 0
    assert not drawn
    printed = capsys.readouterr().out
    assert f"- not drawn: {tmp_path / 'chart.png'}: the table has no rows" in printed


def test_hyphens_in_the_machines_name_stay_in_the_footer(
    contest, runners, fake_worker, drawn, tmp_path, monkeypatch
):
    fake_worker(lambda plan: 1)
    monkeypatch.setattr(contest, "machine", lambda *_: "- CPU: a- b - c\n- Python")
    ours = {"float32": runners[0]}
    measurement = contest.Measurement(runners, contest.by_dtype(ours), plan_of, columns(contest))
    assert contest.compete("x", measurement, flags(plot=tmp_path / "chart.png")) == 0
    assert [footer for _, _, footer in drawn] == ["CPU: a- b - c\nPython"]


@pytest.fixture
def chart(contest):
    return importlib.import_module("chart")


def bars_of(chart, *values):
    return [
        chart.Bar(f"bar {v}", v, f"{v} s", v <= 1, number % 2) for number, v in enumerate(values)
    ]


def test_the_fastest_of_a_group_is_first(chart):
    bars = bars_of(chart, 1.0, 0.9, 4.0, 3.0, 2.0)
    assert [bar.value for bar in chart.in_order(bars)] == [1.0, 2.0, 4.0, 0.9, 3.0]
    figure = chart.draw("title", bars, "footer")
    figure.draw_without_rendering()  # places the texts
    panel, right = figure.axes[0], figure.axes[0].child_axes[0]
    widths = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in panel.patches}
    assert widths == dict(enumerate([1.0, 2.0, 4.0, 0.9, 3.0]))
    assert [text.get_text() for text in panel.get_yticklabels()] == [
        f"bar {value}" for value in (1.0, 2.0, 4.0, 0.9, 3.0)
    ]
    assert [text.get_text() for text in right.get_yticklabels()][1] == "2.0 s"
    assert panel.get_xscale() == "linear"


def test_bars_of_very_different_lengths_have_a_log_scale(chart):
    figure = chart.draw("title", bars_of(chart, 1.0, 1e-6, 300.0), "footer")
    assert figure.axes[0].get_xscale() == "log"


def test_labels_stay_within_the_picture_and_do_not_overlap(chart):
    bars = [
        chart.Bar(
            f"a contestant with a long name, bfloat16 weights + autocast {n}", n, "9 s", False, 0
        )
        for n in range(1, 30)
    ]
    figure = chart.draw("title", bars, "footer")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_yticklabels()]
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
    for above, below in pairwise(boxes):
        assert below.y1 <= above.y0
