"""The same command, run in two processes, writes the same bytes.

They are forks of two others, so that their hash seeds differ, as those of two Pythons do.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from glue_runs import common, on_rte
from launches import fork_server
from trainer_runs import RUNTIMES, without_runtimes

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "text-classification" / "run_glue.py"


def contents(folder: Path) -> dict[str, object]:
    """Returns the contents of a run's files, without the times that some of them record."""
    found: dict[str, object] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.name.endswith("_results.json"):
            found[name] = figures(json.loads(path.read_text()))
        elif path.name == "trainer_state.json":
            state = json.loads(path.read_text())
            found[name] = {**state, "log_history": without_runtimes(state["log_history"])}
        elif path.name == "training_args.bin":
            # The name of TensorBoard's folder contains the time; nothing is written there here.
            found[name] = {**torch.load(path, weights_only=True), "logging_dir": None}
        else:
            found[name] = path.read_bytes()
    return found


def figures(results: dict) -> dict:
    left_out = (*RUNTIMES, "mem_cpu_peak")
    return {name: value for name, value in results.items() if not name.endswith(left_out)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "bitfit"])
def test_run_glue_writes_the_same_bytes_twice(tiny_base, tiny_glue, tmp_path, kind):
    out = tmp_path / "out"
    arguments = [*common(tiny_base), *on_rte(tiny_glue, out), "--do_predict"]
    if kind == "bitfit":
        at = arguments.index("--apply_lora")
        arguments[at : at + 5] = ["--apply_bitfit"]
    for name, server in (("first", "NLU"), ("second", "others")):
        result = fork_server(server).run([SCRIPT, *arguments], os.environ, timeout=300)
        assert result.returncode == 0, result.stderr
        out.rename(tmp_path / name)
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    written = {Path(name).suffix for name in first}
    assert {".bin", ".safetensors", ".pt", ".pth", ".json", ".txt"} <= written
