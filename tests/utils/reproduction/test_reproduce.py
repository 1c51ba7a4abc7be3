"""Tests utils/reproduce.py: its command line, what it runs or leaves out, and a small trial."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_runs import finish_glue
from PIL import Image

import reproduce
from loralib.io.hub import fetch_file
from reproduction import programs
from reproduction.runs import run_of
from transformers.fine_tuning.data_sets import load_data_set

SCRIPT = Path(__file__).resolve().parents[3] / "utils" / "reproduce.py"


@pytest.mark.parametrize("name", ["roberta_base_xyz", "roberta-base fine-tune", "gpt2-md adapter"])
def test_a_wrong_name(name):
    with pytest.raises(ValueError, match=f"there is no recipe or row '{name}'") as caught:
        reproduce.main(["roberta_base_rte", name])
    message = str(caught.value)
    assert "\n" not in message
    for known in ("roberta-base LoRA", "gpt2-md LoRA", "roberta_base_rte", "e2e_gpt2_lg"):
        assert known in message
    assert not Path("output").exists()


@pytest.fixture
def called(monkeypatch):
    """A list of the runs that would be executed. They fail, and no recipe is started."""
    runs = []

    def execute(tree, run, flags):
        runs.append((str(run), list(flags)))
        run.folder.mkdir(parents=True, exist_ok=True)
        run.log.touch()
        run.error.write_text("x.py: error: no GPU\n")

    monkeypatch.setattr(reproduce, "execute", execute)
    return runs


def unfetched_model():
    fetch_file("org/model", "config.json")


def unfetched_data():
    load_data_set("org/set", None, None, "give files")


@pytest.fixture
def unfetched(called, monkeypatch):
    """``unfetched(fetch)``: recipes fail with the error of `fetch` in offline mode."""

    def set_to(fetch):
        with monkeypatch.context() as offline:
            offline.setenv("HF_HUB_OFFLINE", "1")
            offline.setenv("TRANSFORMERS_OFFLINE", "1")
            with pytest.raises(OSError, match="fetched") as raised:
                fetch()
        record = reproduce.execute

        def execute(tree, run, flags):
            record(tree, run, flags)
            run.error.write_text(f"run_glue.py: error: {raised.value}\n")

        monkeypatch.setattr(reproduce, "execute", execute)

    return set_to


@pytest.mark.parametrize("fetch", [unfetched_model, unfetched_data])
def test_a_file_that_cannot_be_fetched_is_tried_once_for_all_seeds(
    called, unfetched, out, monkeypatch, caplog, fetch
):
    unfetched(fetch)
    monkeypatch.setattr(reproduce, "why_out_of_reach", lambda: "no route")
    caplog.set_level("INFO")
    recipes = ["roberta_base_qqp", "roberta_base_sst2"]
    with pytest.raises(RuntimeError, match="6 of 6 runs are not finished"):
        reproduce.main([*recipes, "--output_dir", str(out), "--seeds", "0", "1", "2"])
    assert sorted(run for run, _ in called) == [f"{recipe}, seed 0" for recipe in recipes]
    assert caplog.text.count("not run (a file that it needs cannot be fetched: no route)") == 4


def test_seeds_are_tried_again_once_the_hub_answers(called, unfetched, out, monkeypatch):
    unfetched(unfetched_model)
    reach = iter(["no route", None])
    monkeypatch.setattr(reproduce, "why_out_of_reach", lambda: next(reach))
    command = ["roberta_base_qqp", "--output_dir", str(out), "--seeds", "0", "1", "2"]
    with pytest.raises(RuntimeError, match="3 of 3 runs are not finished"):
        reproduce.main(command)
    assert [run for run, _ in called] == ["roberta_base_qqp, seed 0", "roberta_base_qqp, seed 2"]


def test_another_error_of_one_seed_does_not_leave_out_the_others(called, out, monkeypatch):
    monkeypatch.setattr(reproduce, "why_out_of_reach", lambda: "no route")
    with pytest.raises(RuntimeError, match="3 of 3 runs are not finished"):
        reproduce.main(["roberta_base_qqp", "--output_dir", str(out), "--seeds", "0", "1", "2"])
    assert len(called) == 3


@pytest.mark.slow
def test_finished_runs_are_not_run_again(called, out, capsys):
    finish_glue(run_of(out, "roberta_base_qqp", 1), {"accuracy": 0.75, "f1": 0.5})
    arguments = ["roberta_base_qqp", "--output_dir", str(out), "--seeds", "0", "1", "2"]
    for _ in range(2):
        called.clear()
        with pytest.raises(RuntimeError, match=r"2 of 3 runs are not finished: see .*results\.md"):
            reproduce.main([*arguments, "--", "--bf16"])
        assert called == [(f"roberta_base_qqp, seed {seed}", ["--bf16"]) for seed in (0, 2)]
    printed = capsys.readouterr().out
    assert (out / "results.md").read_text() in printed
    assert "| QQP | accuracy | 90.8±.1 | 75.0 | 1 of 3 | 1: 75.0 |" in printed
    assert "- QQP: seed 0: failed: x.py: error: no GPU\n" in printed
    assert "after the recipes' own: `--bf16`" in printed


def test_a_run_without_weights_to_start_from_is_not_executed(called, out, capsys):
    with pytest.raises(RuntimeError, match="1 of 1 runs are not finished"):
        reproduce.main(["roberta_base_rte", "--output_dir", str(out), "--seeds", "4"])
    assert called == []
    assert (
        "- MRPC, RTE, STS-B: not run (it starts from the LoRA weights of roberta_base_mnli"
        in capsys.readouterr().out
    )


def test_all_runs_of_a_folder_must_have_the_same_settings(called, out, monkeypatch):
    def ask(*more: str) -> None:
        reproduce.main(["e2e_gpt2_md", "--seeds", "1", "--output_dir", str(out), *more])

    for _ in range(2):
        with pytest.raises(RuntimeError):
            ask("--", "--bf16")
    with pytest.raises(
        ValueError, match=r"runs made with --bf16, not with no flags: give the same"
    ):
        ask()
    with pytest.raises(ValueError, match="not with --small and --bf16"):
        ask("--small", "--", "--bf16")
    monkeypatch.setenv("NPROC", "1")
    with pytest.raises(ValueError, match="with --bf16, not with NPROC=1 and --bf16"):
        ask("--", "--bf16")
    assert len(called) == 2


@pytest.mark.parametrize("flag", ["--seed", "--seed=7", "--output_dir", "--metric_for_best_model"])
def test_a_flag_that_this_program_sets_is_refused(called, out, flag):
    with pytest.raises(ValueError, match=f"{flag.split('=')[0]} cannot follow --: this program"):
        reproduce.main(["roberta_base_qqp", "--output_dir", str(out), "--", flag, "7"])
    assert not called
    assert not out.exists()


@pytest.mark.parametrize("row", ["roberta-base LoRA", "roberta_base_rte"])
def test_a_recipes_flag_before_the_dashes_is_refused(called, out, capsys, row):
    with pytest.raises(SystemExit):
        reproduce.main([row, "--data_dir", "X", "--output_dir", str(out)])
    expected = "unrecognized arguments: --data_dir X; flags of the recipes go after --, as in NAME"
    assert expected in capsys.readouterr().err
    with pytest.raises(SystemExit):
        reproduce.main([row, "--seed", "1", "--", "--data_dir", "X"])
    assert "--seed 1; did you mean --seeds?; flags of the" in capsys.readouterr().err
    assert not called


def test_a_trial_says_what_it_leaves_out(called, out, caplog, monkeypatch):
    monkeypatch.setattr(reproduce.Glue, "make_small", lambda tree: None)
    caplog.set_level("INFO")
    with pytest.raises(RuntimeError):
        reproduce.main(["roberta-base LoRA", "--small", "--output_dir", str(out)])
    tasks = ("mnli", "mrpc", "cola", "qnli", "qqp", "rte", "stsb")
    listed = ", ".join(f"roberta_base_{task}" for task in tasks)
    expected = f"left out of the trial: {listed} (the small data has SST-2 only)"
    assert caplog.messages.count(expected) == 1
    assert [run for run, _ in called] == ["roberta_base_sst2, seed 0", "roberta_base_sst2, seed 1"]


def start(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
def test_a_trial_of_a_glue_row_and_of_e2e(out, called, capsys, quick_start):
    asked = [
        "roberta-base LoRA",
        "e2e_gpt2_md",
        "--small",
        "--seeds",
        "7",
        "--output_dir",
        str(out),
    ]
    result = start(*asked)
    assert result.returncode == 0, result.stderr + "".join(
        p.read_text() for p in out.glob("*/*/*.txt")
    )
    text = (out / "results.md").read_text()
    assert result.stdout == text + "\n"
    assert "**A trial**" in text
    row = next(line for line in text.splitlines() if line.startswith("| SST-2 "))
    _, _, paper, here, counts, each, trained = row.strip("| ").split(" | ")
    assert (paper, counts, each) == ("95.1±.2", "1 of 1", f"7: {here}")
    assert 0 < float(here) <= 100
    # Two layers of width 32 with rank 8 on two projections; a head of two classes.
    assert trained == f"{2 * 2 * 2 * 8 * 32:,} + {32 * 32 + 32 + 2 * 32 + 2:,} in the head"
    row = next(line for line in text.splitlines() if line.startswith("| E2E "))
    assert re.search(rf"\| 1 of 1 \| 7: \d+\.\d \| {4 * 2 * 2 * 4 * 128:,} \|$", row)
    assert "- MNLI, MRPC, CoLA, QNLI, QQP, RTE, STS-B: not run (the small data has" in text
    assert "- DART, WebNLG: not run" in text
    with Image.open(out / "learning_curves.png") as picture:
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 10

    reproduce.main(asked)
    assert called == []
    assert capsys.readouterr().out == result.stdout


@pytest.mark.slow
def test_an_error_is_one_line():
    result = start("no_such_recipe")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(
        "reproduce.py: error: there is no recipe or row 'no_such_recipe'"
    )


WITHOUT_TORCH = """
import contextlib, sys
sys.path.insert(0, {folder!r})
import reproduce
for words in (["no_such_recipe"], ["roberta_base_rte", "--", "--seed", "7"]):
    with contextlib.suppress(ValueError):
        reproduce.main(words)
print({{"torch", "scipy", "matplotlib"}} & sys.modules.keys())
"""


@pytest.mark.slow
def test_names_and_flags_are_checked_before_anything_slow_is_imported():
    code = WITHOUT_TORCH.format(folder=str(SCRIPT.parent))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.slow
def test_sigterm_ends_it_with_its_table(out):
    """The run's program is ended as well, and the run is unfinished."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import reproduce\n"
        "reproduce.Nlg.command = lambda self, run: (['bash', '-c', 'echo on; sleep 600'], {})\n"
        "reproduce.start()"
    )
    arguments = [SCRIPT.parent, "e2e_gpt2_md", "--seeds", "1", "--output_dir", out]
    program = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    log = run_of(out, "e2e_gpt2_md", 1).log
    while not (log.is_file() and log.read_text() == "on\n"):
        assert program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    printed, _ = program.communicate(timeout=500)
    assert program.returncode == 143
    assert "- E2E: unfinished; the same command resumes it" in printed
    wait_for_lock(run_of(out, "e2e_gpt2_md", 1).folder)


def test_a_program_is_ended_if_the_signal_arrives_while_it_starts(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self.pid)
            signal.raise_signal(signal.SIGTERM)

    def stop(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    monkeypatch.setattr(programs.subprocess, "Popen", Interrupted)
    try:
        with (
            programs.lock_folder(tmp_path / "run") as lock,
            (tmp_path / "log").open("w") as log,
            pytest.raises(SystemExit, match=r"^143$"),
        ):
            programs._run_program(["sleep", "600"], dict(os.environ), log, lock)
        assert signal.getsignal(signal.SIGTERM) is stop
        with pytest.raises(ProcessLookupError):
            os.kill(started[0], 0)
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_lock(folder, seconds=60):
    """Waits until nothing holds a folder's lock: bash's own programs may end a little after it."""
    end = time.monotonic() + seconds
    while True:
        try:
            with programs.lock_folder(folder):
                return
        except ValueError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_each_recipe_is_estimated_once(called, out, monkeypatch, capsys):
    asked = []

    def show(tree, run, flags):
        asked.append((run.recipe, list(flags)))
        return int(run.recipe == "roberta_base_qqp")

    monkeypatch.setattr(reproduce, "show_estimate", show)
    arguments = ["--output_dir", str(out), "--estimate", "--", "--bf16"]
    reproduce.main(["roberta_base_sst2", "e2e_gpt2_md", *arguments])
    assert sorted(asked) == [("e2e_gpt2_md", ["--bf16"]), ("roberta_base_sst2", ["--bf16"])]
    assert "## e2e_gpt2_md" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="no estimate of roberta_base_qqp: see above"):
        reproduce.main(["roberta_base_qqp", *arguments])
    assert called == []
    assert not out.exists()


def test_a_trial_is_not_estimated(called, out):
    with pytest.raises(ValueError, match="leave out --small"):
        reproduce.main(["roberta_base_sst2", "--small", "--estimate"])
