"""Tests utils/ablations.py: its tables show its runs' results, and no run is repeated."""

import json
import math
import statistics
import sys

import pytest
from paths import load_script
from small_quickstart import make_base_and_task

import ablations
from loralib.training import process
from reproduction import ablation_report, ablation_rows
from reproduction.ablation_report import Outcome, Settings, draw, report
from reproduction.ablation_rows import HEAD_ALONE, QUESTIONS, Question, lora
from reproduction.ablation_runs import Experiment, Results
from reproduction.run_file import RunFile
from reproduction.trials import Trial

RATES = (1e-3, 3e-2)
QUERY = lora("query", 1)
FEW = (
    Question("Points", [QUERY, lora("value", 2, "LoRA+", lora_plus_ratio=4)]),
    Question("Curves", [QUERY, lora("query", 4)], over_rank=True),
)
FEW_ROWS = {row.key: row for row in (HEAD_ALONE, *FEW[0].rows, *FEW[1].rows)}
# Student's t for two values and a confidence of 95 %.
T_OF_TWO = 12.7062


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A very small version of what quickstart.sh writes."""
    return make_base_and_task(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture
def run(quickstart, out, monkeypatch, capsys):
    """``run(*arguments)``: runs main on a few rows."""
    for module in (ablations, ablation_report):
        monkeypatch.setattr(module, "QUESTIONS", FEW)

    def main(*arguments):
        flags = ["--quickstart_dir", quickstart, "--output_dir", out, "--num_train_epochs", 2]
        flags += ["--learning_rates", *RATES]
        ablations.main([str(flag) for flag in (*flags, *arguments)])
        assert capsys.readouterr().out == f"{out / 'ablations.md'}\n"

    return main


def entries(out):
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def of_row(out, row, tuning):
    """Returns a row's runs in the file, as pairs of learning rate and results."""
    mine = [e for e in entries(out) if row.flags.items() <= e["run"]["flags"].items()]
    mine = [e for e in mine if row.flags or "apply_lora" not in e["run"]["flags"]]
    return [(e["run"]["learning_rate"], e["results"]) for e in mine if e["run"]["tuning"] is tuning]


@pytest.mark.slow
def test_tables_show_the_runs_results(run, out):
    run("--seeds", 0, 1)
    assert len(entries(out)) == len(FEW_ROWS) * (len(RATES) + 2)
    text = (out / "ablations.md").read_text()
    for row in FEW_ROWS.values():
        tried = of_row(out, row, tuning=True)
        assert [rate for rate, _ in tried] == list(RATES)
        best = min(tried, key=lambda one: one[1]["loss"])[0]
        runs = of_row(out, row, tuning=False)
        assert [rate for rate, _ in runs] == [best, best]
        values = [100 * results["accuracy"] for _, results in runs]
        half = T_OF_TWO * statistics.stdev(values) / math.sqrt(2)
        cell = f"{statistics.mean(values):.1f} ± {half:.1f}"
        if row is HEAD_ALONE:
            assert f"alone, without LoRA, gives {cell} (learning rate {best:g})" in text
            assert runs[0][1]["lora_parameters"] == 0
            continue
        # Two layers, and A and B of 16 × r each.
        parameters = 2 * 2 * 16 * row.rank
        seconds = statistics.mean(results["seconds"] for _, results in runs)
        cells = [row.name, row.rank, cell, parameters, f"{best:g}", f"{seconds:.1f}"]
        assert f"| {' | '.join(map(str, cells))} |" in text
        # The head: a layer of 16 × 16 and one of 2 × 16, with their biases.
        assert runs[0][1]["parameters"] == parameters + 16 * 17 + 2 * 17
    assert (out / "ablations.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_finished_runs_are_not_run_again(run, out, monkeypatch):
    run("--seeds", 0, 1)
    before, table = entries(out), (out / "ablations.md").read_text()
    trials = []
    train = Experiment.run
    monkeypatch.setattr(Experiment, "run", lambda self, t: trials.append(t) or train(self, t))
    run("--seeds", 0, 1)
    assert trials == []
    assert (entries(out), (out / "ablations.md").read_text()) == (before, table)
    run("--seeds", 1, 0, 2)
    assert [trial.seed for trial in trials] == [2] * len(FEW_ROWS)
    assert entries(out)[: len(before)] == before
    trials.clear()
    run("--seeds", 0, 1, "--num_train_epochs", 1)
    assert len(trials) == len(before)  # other settings, other runs


@pytest.mark.slow
def test_a_row_trains_as_run_glue_does(quickstart, out, tmp_path):
    flags = {"lora_variant": "rslora", "lora_init": "orthogonal", "lora_plus_ratio": 4}
    row = lora("query attention_output", 2, **flags)
    found = Experiment(quickstart, 2, out).run(Trial(row, 1e-2, seed=3, tuning=False))
    load_script("examples/text-classification/run_glue.py").main(
        [
            *("--model_name_or_path", str(quickstart / "base"), "--task_name", "sst2"),
            *("--data_dir", str(quickstart / "data"), "--output_dir", str(tmp_path / "glue")),
            *("--do_train", "--do_eval", "--num_train_epochs", "2", "--learning_rate", "1e-2"),
            *("--seed", "3", "--per_device_train_batch_size", "16", "--warmup_ratio", "0.06"),
            *("--weight_decay", "0.1", "--report_to", "none", "--disable_tqdm", "--apply_lora"),
            *("--lora_targets", "query", "attention_output", "--lora_r", "2", "--lora_alpha", "16"),
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        ]
    )
    expected = json.loads((tmp_path / "glue" / "eval_results.json").read_text())
    assert found.accuracy == expected["eval_accuracy"]
    assert found.loss == pytest.approx(expected["eval_loss"], rel=1e-6)


@pytest.mark.slow
def test_tuning_never_sees_the_development_set(quickstart, out):
    experiment = Experiment(quickstart, 1, out)
    expected = experiment.run(Trial(QUERY, 1e-2, seed=0, tuning=True))
    experiment.development = []
    again = experiment.run(Trial(QUERY, 1e-2, seed=0, tuning=True))
    assert (again.loss, again.accuracy) == (expected.loss, expected.accuracy)
    assert again.accuracy * 8 in range(9)  # a fifth of 40 sentences


def test_rows_of_table_5_train_equally_many_parameters():
    first, second, third = QUESTIONS
    assert {len(row.flags["lora_targets"]) * row.rank for row in first.rows} == {8}
    assert sorted(len(row.flags["lora_targets"]) for row in first.rows) == [1, 1, 1, 1, 2, 2, 4]
    assert [row.rank for row in second.rows] == [1, 2, 4, 8, 64] * 3
    assert len({row.key for row in third.rows}) == len(third.rows) == 9
    assert {(row.rank, *row.flags["lora_targets"]) for row in third.rows} == {(8, "query", "value")}


def outcome(*accuracies):
    return Outcome(1e-3, [Results(value, 0.5, 64, 100, 1.0) for value in accuracies])


def test_the_picture_shows_means_and_intervals(monkeypatch):
    monkeypatch.setattr(ablation_report, "QUESTIONS", FEW)
    accuracies = [(0.5, 0.5), (0.6, 0.8), (0.7, 0.7), (0.9, 0.7)]
    outcomes = {k: outcome(*a) for k, a in zip(FEW_ROWS, accuracies, strict=True)}
    points, curves = draw(outcomes).axes
    bars = points.containers[0]
    assert list(bars.lines[0].get_xdata()) == pytest.approx([70, 70])
    ends = [segment[:, 0] for segment in bars.lines[2][0].get_segments()]
    half = T_OF_TWO * 100 * statistics.stdev([0.6, 0.8]) / math.sqrt(2)
    assert ends[0] == pytest.approx([70 - half, 70 + half], rel=1e-4)
    assert ends[1] == pytest.approx([70, 70])
    assert [label.get_text() for label in points.get_yticklabels()] == [
        "query (r = 1)",
        "LoRA+ (r = 2)",
    ]
    (curve,) = curves.containers
    assert list(curve.lines[0].get_ydata()) == pytest.approx([70, 80])
    assert list(curve.lines[0].get_xdata()) == [1, 4]
    for panel in (points, curves):
        dashed = next(line for line in panel.lines if line.get_label() == "the head alone")
        assert 50 in (dashed.get_xdata()[0], dashed.get_ydata()[0])


def test_the_picture_names_ranks_where_they_differ():
    rows = [HEAD_ALONE, *(row for question in QUESTIONS for row in question.rows)]
    points, curves, variants = draw({row.key: outcome(0.5, 0.5) for row in rows}).axes
    assert points.get_yticklabels()[-1].get_text() == "all four (r = 2)"
    names = [label.get_text() for label in variants.get_yticklabels()]
    assert names == [row.name for row in QUESTIONS[2].rows]
    assert [curve.get_label() for curve in curves.containers] == [
        "query",
        "query, value",
        "all four",
    ]
    assert list(curves.get_xticks()) == [1, 2, 4, 8, 64]


@pytest.mark.parametrize(
    ("rates", "expected_parts"),
    [
        (
            [1e-3],
            ["All rows use a learning rate of 0.001.", "One learning rate for all favors"],
        ),
        (
            [1e-3, 2e-3],
            [
                "A row's learning rate is the one of 0.001, 0.002 with the lowest loss",
                "may lie beyond it: query (r = 1); LoRA+ (r = 2); query (r = 4).",
            ],
        ),
        ([5e-4, 1e-3, 2e-3], ["may lie beyond it: none."]),
    ],
)
def test_the_report_explains_its_figures(monkeypatch, rates, expected_parts):
    monkeypatch.setattr(ablation_report, "QUESTIONS", FEW)
    outcomes = {key: outcome(0.5, 0.6, 0.7) for key in FEW_ROWS}
    text = report(outcomes, Settings("python x.py", 2.0, rates, labels=[1, 1, 0, 1]))
    for part in (
        "```bash\nbash quickstart.sh\npython x.py\n```",
        "over 3 seeds",
        "75.0 %",
        *expected_parts,
    ):
        assert part in text
    assert "for an accuracy of 90 % on 4 sentences, is ±29.4." in text


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"run": {}, "results": {"accuracy": 1}}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "runs.jsonl"
    results = '{"accuracy": 1, "loss": 0, "lora_parameters": 1, "parameters": 1, "seconds": 1}'
    path.write_text(f'{{"run": {{}}, "results": {results}}}\n{line}\n')
    with pytest.raises(ValueError, match=r"runs\.jsonl:2: not a run; delete this line"):
        RunFile(path, Results)


def test_a_missing_matplotlib_is_an_error_before_anything_runs(monkeypatch, out):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lines = []
    with pytest.raises(SystemExit):
        process.run(lambda: ablations.main(["--output_dir", str(out)]), lines.append)
    assert lines[0].endswith("the picture needs matplotlib: pip install matplotlib")
    assert not out.exists()


def test_rows_with_the_same_flags_share_their_runs():
    def keys(question):
        return {row.key for row in question.rows}

    projections, ranks, variants = map(keys, QUESTIONS)
    assert len(projections & ranks) == 3
    assert variants & ranks == {ablation_rows.variant("LoRA").key}
