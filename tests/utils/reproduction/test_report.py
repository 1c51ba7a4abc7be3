"""Tests the report: its table and its learning curves."""

import pytest
from fake_runs import finish_glue, finish_nlg

from reproduction import report
from reproduction.runs import run_of


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([86.64], "86.6"),
        ([1.0, 2.0], "1.5±6.4"),  # 12.706 · 0.7071 / √2
        ([86.0, 86.0, 86.0], "86.0±0.0"),
        ([84.0, 85.0, 90.0, 86.0, 87.0], "86.0±2.9"),  # 2.776 · 2.3022 / √5
    ],
)
def test_median_and_interval(values, expected):
    assert report.median_with_interval(values) == expected


def test_a_cell_of_every_kind(rows, out):
    """One cell has finished runs among failed and unfinished ones, others have no figures."""
    for seed, accuracy in ((0, 0.75), (1, 0.5)):
        run = run_of(out, "roberta_base_sst2", seed)
        finish_glue(run, {"accuracy": accuracy}, {"accuracy": 0.25})
    failed = [
        run_of(out, "roberta_base_sst2", 2),
        run_of(out, "roberta_base_cola", 0),
    ]
    for run in failed:
        run.folder.mkdir(parents=True)
        run.log.touch()
        run.error.write_text("run_glue.py: error: it is full\n")
    unfinished = [
        run_of(out, "roberta_base_sst2", 3),
        run_of(out, "roberta_base_qnli", 0),
    ]
    for run in unfinished:
        run.folder.mkdir(parents=True)
        run.log.touch()
    asked = [run_of(out, "roberta_base_sst2", seed) for seed in range(5)]
    row = rows["roberta-base LoRA"]
    lines = report.report_row(row, report.cells_of(row, out, asked))
    starts = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2:5] for line in lines}
    assert starts["SST-2"] == ["95.1±.2", "62.5±158.8", "2 of 5"]
    assert starts["CoLA"][1] == "failed"
    assert starts["QNLI"][1] == "unfinished"
    assert starts["QQP"][1] == "not run"
    assert starts["average"][:2] == ["87.2", "not all run"]
    for note in (
        "- SST-2: seed 2: failed: run_glue.py: error: it is full",
        "- SST-2: seed 3: unfinished; the same command resumes it",
        "- SST-2: seed 4: not run",
        "- CoLA: failed: run_glue.py: error: it is full",
        "- MNLI, QQP: not run",
        "- parameters trained, in the paper: 0.3M",
    ):
        assert note in lines


@pytest.mark.parametrize(
    ("kinds", "word"),
    [("nun", "unfinished"), ("unf", "failed"), ("nn", "not run")],
)
def test_a_cell_without_figures_shows_its_worst_problem(rows, out, kinds, word):
    runs = [run_of(out, "roberta_base_qqp", seed) for seed in range(len(kinds))]
    for run, kind in zip(runs, kinds, strict=True):
        run.folder.mkdir(parents=True)
        if kind in "uf":
            run.log.touch()
        if kind == "f":
            run.error.write_text("x.py: error: y\n")
    assert report.cells_of(rows["roberta-base LoRA"], out, runs)["qqp"].result == word


def test_a_whole_row(rows, out):
    """The average is that of the first figures, as in the paper."""
    values = dict(
        zip(
            ("mnli", "sst2", "mrpc", "cola", "qnli", "qqp", "rte", "stsb"),
            range(80, 88),
            strict=True,
        )
    )
    for task, value in values.items():
        first = {"cola": "matthews_correlation", "stsb": "pearson"}.get(task, "accuracy")
        for seed in range(3):
            run = run_of(out, f"roberta_base_{task}", seed)
            score = (value + seed - 1) / 100
            more = {"stsb": {"spearmanr": 0.5}}.get(task, {})
            finish_glue(
                run, {first: score, **more}, **({"accuracy_mm": 0.25} if task == "mnli" else {})
            )
    row = rows["roberta-base LoRA"]
    text = "\n".join(report.report_row(row, report.cells_of(row, out, [])))
    # 4.303 · 1 / √3
    assert (
        "| MNLI | matched/mismatched accuracy | 87.5±.3/86.9±.3 | 80.0±2.5/25.0±0.0 | 3 of 3 |"
        in text
    )
    assert "0: 79.0/25.0, 1: 80.0/25.0, 2: 81.0/25.0" in text
    assert "| STS-B | Pearson/Spearman correlation | 91.5±.2/91.3±.2 | 87.0±2.5/50.0±0.0 |" in text
    assert "| average | of the first figures | 87.2 | 83.5 |" in text
    assert "not run" not in text


def test_the_other_scores(rows, out):
    for seed, nist, meteor in ((110, 8.5, 0.46), (111, 8.75, None), (112, 8.9, 0.46)):
        scores = {"BLEU": 0.7, "NIST": nist, "METEOR": meteor}
        finish_nlg(run_of(out, "e2e_gpt2_md", seed), all=scores)
    row = rows["gpt2-md LoRA"]
    assert "- E2E, medians of the other scores: NIST 8.75" in report.report_row(
        row, report.cells_of(row, out, [])
    )


def test_rows_without_runs_are_left_out(rows, out):
    finish_nlg(run_of(out, "e2e_gpt2_md", 110), all={"BLEU": 0.7})
    asked = [run_of(out, "roberta_large_cola", 0)]
    text = report.write_report(out, list(rows.values()), asked, {"small": False, "flags": []})
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == [
        "## roberta-large LoRA: GLUE, development sets",
        "## gpt2-md LoRA: GPT-2, test sets",
    ]
    assert "trial" not in text


def test_the_learning_curves(glue, nlg, out):
    runs = [run_of(out, "roberta_base_rte", seed) for seed in (0, 1)]
    finish_glue(runs[0], {"accuracy": 0.5}, {"accuracy": 0.75})
    failed = run_of(out, "e2e_gpt2_md", 110)
    figure = report.draw({"roberta_base_rte": (glue, runs), "e2e_gpt2_md": (nlg, [failed])})
    first, second = figure.axes
    assert first.get_title() == "roberta_base_rte"
    assert first.axison
    assert [line.get_label() for line in first.lines] == ["seed 0", "seed 1"]
    assert first.lines[0].get_xydata().tolist() == [[1, 50], [2, 75]]
    assert (first.get_xlabel(), first.get_ylabel()) == ("epoch", "accuracy, %")
    assert (second.get_xlabel(), second.get_ylabel()) == ("step", "validation loss")
