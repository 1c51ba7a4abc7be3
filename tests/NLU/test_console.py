"""What a run prints without a terminal: each message once, and no progress bars."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from glue_runs import common, on_rte
from launches import fork_server, launch

from transformers import TrainingArguments

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "text-classification" / "run_glue.py"


def run(arguments: list, processes: int = 1) -> subprocess.CompletedProcess:
    if processes > 1:
        settings = {"launcher": "torch.distributed.run", "restarts": 0, "tree": "NLU"}
        return launch(processes, SCRIPT, *arguments, **settings)
    return fork_server("NLU").run([SCRIPT, *arguments], os.environ, timeout=300)


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_a_log_has_no_bars_and_each_figure_once(tiny_base, tiny_glue, tmp_path, processes):
    arguments = [flag for flag in common(tiny_base) if flag != "--disable_tqdm"]
    arguments += [
        *on_rte(tiny_glue, tmp_path / "out"),
        "--do_predict",
        "--per_gpu_eval_batch_size",
        4,
    ]
    result = run(arguments, processes)
    assert result.returncode == 0, result.stderr
    printed = result.stdout + result.stderr
    assert "\r" not in printed
    assert "%|" not in printed
    for name in ("train_runtime", "train_loss", "eval_loss", "eval_accuracy", "eval_mem_cpu_peak"):
        assert printed.count(name) == 1, name
    assert printed.count(", lr ") == 6 // processes  # every second step
    assert "\033" not in printed
    events = re.findall(r"^\d\d:\d\d:\d\d (.*)$", printed, re.MULTILINE)
    assert len({*events}) == len(events)
    assert events.count("training") == events.count("finished") == 1
    # Only the main process warns.
    assert printed.count("--per_gpu_eval_batch_size is now --per_device_") == 1
    (line,) = (line for line in printed.splitlines() if "train_mem_cpu_peak" in line)
    number, unit = line.split(" = ")[1].split()
    assert unit == "MiB"
    assert 50 < float(number.replace(",", "")) < 50_000


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_a_log_of_errors_is_empty(tiny_base, tiny_glue, tmp_path, processes):
    flags = ["--log_level", "error", "--per_gpu_eval_batch_size", 4]  # a warning without it
    arguments = [*common(tiny_base), *on_rte(tiny_glue, tmp_path / "out"), *flags]
    result = run(arguments, processes)
    assert result.returncode == 0, result.stderr
    # Launchers and PyTorch's C++ may print messages of their own.
    assert not re.search(r"^\d\d:\d\d:\d\d ", result.stdout + result.stderr, re.MULTILINE)
    assert not any(name in result.stderr for name in ("--per_gpu_eval_batch_size", "eval_loss"))
    assert (tmp_path / "out" / "eval_results.json").is_file()


def test_the_loss_is_in_the_bar_and_evaluations_are_lines(make_trainer, caplog, capsys):
    trainer = make_trainer(
        disable_tqdm=False, evaluation_strategy="epoch", logging_steps=5, log_level="info"
    )
    trainer.train()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ", lr " in captured.err  # in the bar
    lines = [line for line in caplog.messages if line.startswith("step ")]
    assert [line.split(":")[:2] for line in lines] == [
        [f"step {step} of 10", " evaluation"] for step in (5, 10)
    ]


def test_an_unknown_log_level_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="--log_level must be one of debug, info, warning, error, not"
    ):
        TrainingArguments(str(tmp_path), log_level="all")


@pytest.mark.slow
def test_a_library_s_own_error_is_not_printed_twice(tiny_base, tmp_path):
    (tmp_path / "train.json").write_text("no JSON at all")
    arguments = [*common(tiny_base), "--train_file", tmp_path / "train.json", "--do_train"]
    result = run([*arguments, "--output_dir", tmp_path / "out"])
    assert result.returncode == 1
    assert "ERROR" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if "train.json" in line)
    assert line.startswith("run_glue.py: error: ")


def test_the_bar_says_predicting_or_evaluating(make_trainer, capsys):
    trainer = make_trainer(disable_tqdm=False)
    trainer.predict(trainer.eval_dataset)
    printed = capsys.readouterr().err
    assert "predicting" in printed
    assert "evaluating" not in printed
    trainer.evaluate()
    assert "evaluating" in capsys.readouterr().err


def test_bars_can_be_asked_for(tmp_path):
    assert TrainingArguments(str(tmp_path)).disable_tqdm
    assert not TrainingArguments(str(tmp_path), disable_tqdm=False).disable_tqdm
