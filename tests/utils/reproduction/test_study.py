"""Tests utils/reproduce.py --study: its data, its trials, and a very small study."""

import dataclasses
import json
import math
import random
import re
import shutil
import threading

import pytest
from paths import load_script

import reproduce
from loralib.errors import TrainingError
from reproduction import study, study_gpt2, study_report, study_rows, study_runs
from reproduction.run_file import RunFile
from reproduction.study_data import TASKS, corpus_sentences, prepare_task, whole_sentences
from reproduction.study_gpt2 import Gpt2Results, Gpt2Trial, Gpt2Trials
from reproduction.study_report import Gpt2Outcome, Outcome
from reproduction.study_runs import EncoderTrial, Results
from reproduction.trials import Cell, Trials, run_cells

WORDS = ["the", "soup", "film", "was", "very", "not", "good", "bad", "great", "and", "he", "said"]
HEADERS = {
    "SST-2": "sentence\tlabel",
    "CoLA": None,
    "RTE": "index\tsentence1\tsentence2\tlabel",
    "STS-B": "index\tsentence1\tsentence2\tscore",
}


def sentence(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(4, 9)))


def glue_row(folder, rng):
    """Returns a row of a task's file, whose label follows from its words."""
    first, second = sentence(rng), sentence(rng)
    label = int("good" in first or "great" in first)
    return {
        "SST-2": f"{first}\t{label}",
        "CoLA": f"x\t{label}\t\t{first}",
        "RTE": f"0\t{first}\t{second}\t{('not_entailment', 'entailment')[label]}",
        "STS-B": f"0\t{first}\t{second}\t{label * 2.5 + rng.random()}",
    }[folder]


@pytest.fixture(scope="module")
def glue_dir(tmp_path_factory):
    """A folder with very small versions of the four tasks."""
    folder, rng = tmp_path_factory.mktemp("glue"), random.Random(0)
    for name, header in HEADERS.items():
        (folder / name).mkdir()
        for split, count in (("train", 40), ("dev", 20)):
            rows = [glue_row(name, rng) for _ in range(count)]
            lines = [header, *rows] if header else rows
            (folder / name / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def nlg_dir(tmp_path_factory):
    """A folder with very small versions of E2E, WebNLG and DART, and a vocabulary for them."""
    folder, rng = tmp_path_factory.mktemp("nlg"), random.Random(1)
    load_script("examples/make_small_e2e.py").main(["--output_dir", str(folder / "e2e")])
    for split, count in (("valid", 12), ("test", 4)):
        path = folder / "e2e" / f"{split}.txt"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))
    # An untrained model may generate any token, so each one needs a text.
    encoder = folder / "e2e" / "vocab" / "encoder.json"
    tokens = json.loads(encoder.read_text())
    free = set(range(max(tokens.values()) + 1)) - set(tokens.values())
    _write_json(encoder, tokens | {f"free{number}": number for number in free})
    (folder / "dart").mkdir()
    sources = [{"source": source, "text": f"{source} says so ."} for source in ("e2e", "webnlg")]
    _write_json(folder / "dart" / "dart-v1.1.1-full-dev.json", [{"annotations": sources}])
    (folder / "webnlg").mkdir()
    entry = {"1": {"lexicalisations": [{"lex": sentence(rng)} for _ in range(30)]}}
    _write_json(folder / "webnlg" / "dev.json", {"entries": [entry]})
    return folder


def _write_json(path, content):
    path.write_text(json.dumps(content))


def test_parts_of_sentences_are_left_out():
    texts = ["a b", "x a b c", "b c", "a c", "b c"]
    assert whole_sentences(texts) == ["x a b c", "a c"]


def test_the_corpus_has_no_text_that_is_measured_on(glue_dir, nlg_dir, tmp_path):
    corpus = corpus_sentences(glue_dir, nlg_dir)
    assert "webnlg says so ." in corpus
    assert "e2e says so ." not in corpus  # GPT-2 is adapted to E2E
    assert len(set(corpus)) == len(corpus)
    measured = [
        text
        for task in TASKS
        for row in prepare_task(task, glue_dir)["validation"]
        for text in (row.text_a, row.text_b)
    ]
    assert not set(corpus) & set(measured)
    # A text of the training set that differs from one of the development set in case and spaces.
    shared = tmp_path / "glue"
    shutil.copytree(glue_dir, shared)
    line = prepare_task(TASKS[0], glue_dir)["validation"][0].text_a
    with open(shared / "SST-2" / "train.tsv", "a") as file:
        file.write(f"{line.upper()} \t1\n")
    assert corpus_sentences(shared, nlg_dir) == corpus


def test_learning_rates_are_chosen_only_on_the_training_set(glue_dir):
    for task in TASKS:
        splits = prepare_task(task, glue_dir)
        assert splits["tuning_train"] + splits["tuning"] == splits["train"]
        assert 0 < len(splits["tuning"]) < len(splits["tuning_train"])
        guids = {row.guid for row in splits["train"]}
        assert not guids & {row.guid for row in splits["validation"]}
    few = dataclasses.replace(TASKS[1], train_rows=10)
    assert prepare_task(few, glue_dir)["train"] == prepare_task(TASKS[1], glue_dir)["train"][:10]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["LoRA"], "there is no row 'LoRA' in the study; rows: full fine-tuning; "),
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--data_dir", "nowhere"], "download_glue_data.py"),
    ],
)
def test_a_study_that_cannot_run_leaves_nothing(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        reproduce.main(["--study", *flags])
    assert not list(tmp_path.iterdir())


def results(score, **changes):
    values = {"score": score, "loss": 0.5, "parameters": 1000, "head_parameters": 10}
    return Results(**{**values, "seconds": 2.0, "memory": 2**20, **changes})


def test_the_tables_show_means_intervals_and_what_was_not_run():
    lora, full = study_rows.LORA[1], study_rows.FULL
    outcomes = {
        ("sst2", lora.name): Outcome(1e-3, True, [results(0.7), results(0.8)]),
        **{
            (task.name, full.name): Outcome(3e-4, False, [results(0.5), results(0.5)])
            for task in TASKS
        },
    }
    labels = {task.name: ["a", "a", "b"] for task in TASKS}
    settings = study_report.Settings([0, 1], labels, 12_345, "a machine")
    text = study_report.report(outcomes, {}, settings)
    # Student's t of two values: 12.706 times their distance / 2.
    assert f"| {lora.name} | 1,000 | 75.0 ± 63.5 | not run |" in text
    assert f"| {full.name} | 1,000 |{' 50.0 ± 0.0 |' * 4} 50.0 | 8 | 1 |" in text
    assert "| the most frequent label | - | 66.7 | 0 | 66.7 | 0 |" in text
    assert f"| {lora.name} | 0.001* | - |" in text
    assert "12,345 words" in text
    assert "Measured on: a machine." in text
    assert f"| {full.name} | 0.0003 | 0.0003 |" in text
    figure = study_report.draw(outcomes)
    assert [panel.get_title() for panel in figure.axes] == [task.title for task in TASKS]


@pytest.fixture
def run(glue_dir, nlg_dir, out, monkeypatch, capsys):
    """``run(*arguments)``: runs a study of two methods on two tasks, and of a GPT-2; its report."""
    shape = {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 2, "max_seq_length": 64}
    monkeypatch.setattr(study, "BASE_SHAPE", {**study.BASE_SHAPE, **shape, "intermediate_size": 16})
    monkeypatch.setattr(study, "BASE_FLAGS", {**study.BASE_FLAGS, "max_steps": 2})
    for module in (study, study_report):
        monkeypatch.setattr(module, "METHODS", (ONE_RATE, TWO_RATES))
        for table in ("PROJECTIONS", "BY_RANK"):
            monkeypatch.setattr(module, table, ())
    for module in (study, study_report, study_runs):
        monkeypatch.setattr(module, "TASKS", TWO_TASKS)
    monkeypatch.setattr(study, "GPT2_METHODS", (ONE_GPT2_RATE,))

    def main(*arguments):
        flags = ["--data_dir", glue_dir, "--nlg_dir", nlg_dir, "--vocab", nlg_dir / "e2e" / "vocab"]
        flags += ["--output_dir", out, "--jobs", 2, *arguments]
        reproduce.main(["--study", *map(str, flags)])
        assert capsys.readouterr().out.splitlines()[-1] == str(out / "study.md")
        assert (out / "study.png").stat().st_size > 1000
        return (out / "study.md").read_text()

    return main


TWO_TASKS = (TASKS[0], TASKS[3])
ONE_RATE = dataclasses.replace(study_rows.FULL, rates=(1e-3,))
TWO_RATES = dataclasses.replace(study_rows.LORA[1], rates=(1e-3, 3e-3))
ONE_GPT2_RATE = dataclasses.replace(study_rows.GPT2_METHODS[1], rates=(1e-3,))


@pytest.mark.slow
def test_the_encoders_study_resumes_and_reports(run, out, quick_start):
    lora = TWO_RATES
    text = run(ONE_RATE.name, "--seeds", "0")
    assert f"| {ONE_RATE.name} |" in text
    assert f"| {lora.name} |" not in text
    first = (out / "runs.jsonl").read_text().splitlines()
    assert len(first) == 2  # a single rate needs no trial

    text = run(lora.name, "--seeds", "0")  # what is finished is reported as well
    assert f"| {ONE_RATE.name} |" in text
    assert f"| {lora.name} |" in text
    second = (out / "runs.jsonl").read_text().splitlines()
    assert second[:2] == first
    assert len(second) == 2 + 2 * (len(lora.rates) + 1)
    tuned = [entry for line in second if (entry := json.loads(line))["run"]["tuning"]]
    best = {
        task.name: min(
            (entry for entry in tuned if entry["run"]["task"] == task.name),
            key=lambda entry: entry["results"]["loss"],
        )["run"]["learning_rate"]
        for task in TWO_TASKS
    }
    for line in second[2:]:
        ran = json.loads(line)["run"]
        assert ran["tuning"] or ran["learning_rate"] == best[ran["task"]]


@pytest.mark.slow
def test_gpt2s_study_runs_and_reports(run, out, quick_start):
    assert f"| {ONE_GPT2_RATE.name} |" in run(ONE_GPT2_RATE.name, "--seeds", "0")
    (line,) = (out / "gpt2" / "runs.jsonl").read_text().splitlines()
    results = json.loads(line)["results"]
    assert results["loss"] > 0
    assert "BLEU" in results["scores"]
    assert results["parameters"] == 4 * 2 * 2 * 4 * 128  # layers, projections, A and B, r, width
    assert not list((out / "gpt2").glob("lora_*/*.pt"))
    assert not (out / "base").exists()  # GPT-2's rows do not need it


class Known(Trials):
    """Trials that diverge with a learning rate above 1; `carried_out` has all that were run."""

    def __init__(self, folder):
        super().__init__(RunFile(folder / "runs.jsonl", Results))
        self.carried_out = []

    def describe(self, trial):
        return dataclasses.asdict(trial)

    def carry_out(self, trials):
        for trial in trials:
            self.carried_out.append(trial)
            yield trial, results(0.5, loss=math.inf if trial.learning_rate > 1 else 0.7)


def test_a_learning_rate_that_diverges_is_not_chosen(tmp_path):
    trials = Known(tmp_path)
    tuning = [
        EncoderTrial(study_rows.FULL, rate, 0, tuning=True, task="rte") for rate in (3.0, 0.3)
    ]
    final = run_cells(trials, {"a": Cell(study_rows.FULL, tuning)}, ["a"], seeds=[0, 1])
    assert [(t.learning_rate, t.seed, t.tuning) for t in final["a"]] == [
        (0.3, 0, False),
        (0.3, 1, False),
    ]
    again = RunFile(tmp_path / "runs.jsonl", Results)
    assert again[trials.describe(tuning[0])].loss == math.inf


def test_cells_that_are_tuned_as_another_one_share_its_trials(tmp_path):
    trials, cells = Known(tmp_path), study.encoder_cells()
    wanted = [("sst2", method.name) for method in (study_rows.LORA[8], *study_rows.PROJECTIONS)]
    final = run_cells(trials, cells, wanted, seeds=[0])
    assert final.keys() == set(wanted)
    tuned = [trial for trial in trials.carried_out if trial.tuning]
    methods = [study_rows.LORA[r] for r in (8, 4, 2)]
    assert len(tuned) == sum(len(method.rates) for method in methods)
    assert all(trial.method in methods for trial in tuned)
    assert len(trials.carried_out) == len(tuned) + len(wanted)


@pytest.fixture
def gpt2(tmp_path, monkeypatch):
    """``gpt2(jobs, carry_out)``: trials that call `carry_out`, `jobs` at once, and do not train."""
    monkeypatch.setattr(Gpt2Trials, "fingerprint", "a base")

    def make(jobs, carry_out):
        monkeypatch.setattr(Gpt2Trials, "_carry_out", lambda self, trial: carry_out(trial))
        return Gpt2Trials(tmp_path, tmp_path, RunFile(tmp_path / "runs.jsonl", Gpt2Results), jobs)

    return make


def gpt2_trials(count):
    return [Gpt2Trial(study_rows.GPT2_METHODS[0], 0.1, seed, tuning=False) for seed in range(count)]


GPT2_RESULTS = Gpt2Results(loss=0.5, scores={}, parameters=1, seconds=1.0, memory=1)


@pytest.fixture
def cancelled(monkeypatch):
    """An event that is set when the trials that have not begun have been cancelled."""
    event, cancel = threading.Event(), study_gpt2._cancel
    monkeypatch.setattr(study_gpt2, "_cancel", lambda trials: (cancel(trials), event.set()))
    return event


def test_results_of_trials_next_to_a_failing_one_are_kept(gpt2, cancelled):
    begun, both = [], threading.Barrier(2, timeout=60)

    def carry_out(trial):
        begun.append(trial.seed)
        if trial.seed < 2:
            both.wait()
        if trial.seed == 0:
            raise TrainingError("no memory")
        assert cancelled.wait(60)
        return GPT2_RESULTS

    study, trials = gpt2(2, carry_out), gpt2_trials(6)
    with pytest.raises(TrainingError, match="no memory"):
        study.run(trials, "training")
    assert [study.is_finished(trial) for trial in trials[:2]] == [False, True]
    assert set(begun) <= {0, 1, 2}  # the third may have begun after the first failed


def test_an_interrupted_study_starts_no_more_trials(gpt2, cancelled):
    begun = []

    def carry_out(trial):
        begun.append(trial.seed)
        assert trial.seed == 0 or cancelled.wait(60)
        return GPT2_RESULTS

    running = gpt2(1, carry_out).carry_out(gpt2_trials(6))
    next(running)
    running.close()
    assert set(begun) <= {0, 1}


def test_a_learning_rate_with_which_gpt2_diverges_is_not_chosen(gpt2, monkeypatch):
    study = gpt2(1, Gpt2Trials._carry_out)
    monkeypatch.undo()
    final = gpt2_trials(1)[0]
    tuning = dataclasses.replace(final, tuning=True)

    def fail(message):
        def train(self, trial, work):
            raise TrainingError(f"gpt2_ft.py: {message}")

        monkeypatch.setattr(Gpt2Trials, "_train", train)

    fail("the loss of step 3 is nan at learning rate 3: that step is not saved; try a lower --lr")
    assert study._carry_out(tuning).loss == math.inf
    with pytest.raises(TrainingError, match="is nan"):
        study._carry_out(final)
    fail("the validation loss after step 9 is inf")
    assert study._carry_out(tuning).loss == math.inf
    fail("no space left on device")
    with pytest.raises(TrainingError, match="no space"):
        study._carry_out(tuning)


def test_a_score_that_a_run_lacks_is_in_no_column():
    """METEOR needs Java, and a study may have been continued without it, or with it."""
    runs = [
        dataclasses.replace(GPT2_RESULTS, scores=scores)
        for scores in ({"BLEU": 0.5, "METEOR": 0.25}, {"BLEU": 0.75})
    ]
    for several in (runs, runs[::-1]):
        header, _, row, _ = study_report.gpt2_table({"LoRA": Gpt2Outcome(0.1, several)})
        assert "| trained | BLEU | test loss |" in header
        assert "| 0.625 ±" in row
