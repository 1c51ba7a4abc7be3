"""What the tests of run_glue.py share: its arguments, and what it has written."""

import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from paths import ROOT

from loralib.io.tensors import read_tensors
from transformers.utils.cli import run_script

SCRIPT = ROOT / "examples" / "text-classification" / "run_glue.py"
LORA = ["--apply_lora", "--lora_r", "4", "--lora_alpha", "8"]


def common(base: Path) -> list[str]:
    arguments = f"--model_name_or_path {base} --max_seq_length 60 --report_to none --disable_tqdm "
    arguments += "--per_device_train_batch_size 8 --learning_rate 1e-2 --logging_steps 2"
    return arguments.split()


def on_rte(tiny_glue: Path, out: Path) -> list:
    """Arguments for two epochs of six steps, with a checkpoint in the middle of each."""
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_train", "--do_eval"]
    return [*arguments, *LORA, "--num_train_epochs", 2, "--save_steps", 4, "--output_dir", out]


def results(out: Path, split: str = "eval") -> dict:
    """A results file without the values that depend on the clock."""
    values = json.loads((out / f"{split}_results.json").read_text())
    runtimes = ("runtime", "per_second", "mem_cpu_peak", "epoch")
    return {name: value for name, value in values.items() if not name.endswith(runtimes)}


def lora_of(out: Path) -> dict[str, torch.Tensor]:
    return read_tensors(out / "pytorch_model_lora.bin")[0]


def failure(run_glue, arguments, monkeypatch, capsys) -> str:
    """Runs a call that must fail, and returns its one line of error."""
    monkeypatch.setattr(sys, "argv", ["run_glue.py"])
    with pytest.raises(SystemExit) as ended:
        run_script(partial(run_glue.main, list(map(str, arguments))))
    assert ended.value.code in (1, 2)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    lines = [line for line in captured.err.splitlines() if line.startswith("run_glue.py: error")]
    assert len(lines) == 1
    return lines[0]


def write(path: Path, rows: list[dict]) -> Path:
    """Writes a CSV or JSON-lines file."""
    if path.suffix == ".csv":
        lines = [rows[0].keys(), *(row.values() for row in rows)]
        quoted = (
            ",".join('"{}"'.format(str(v).replace('"', '""')) for v in line) for line in lines
        )
        path.write_text("\n".join(quoted) + "\n", encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def own_rows(labels: list, pair: bool = False, count: int = 24) -> list[dict]:
    chance = random.Random(4)
    words = ['a "good" dog', "null", "the river, cold", "NA", "sings", "naïve"]
    rows = []
    for number in range(count):
        text = " ".join(chance.choices(words, k=3))
        texts = {"review": text, "answer": chance.choice(words)} if pair else {"review": text}
        rows.append({"number": number, **texts, "label": labels[number % len(labels)]})
    return rows
