"""run_glue.py on two processes of one machine, which talk through gloo."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from compare import assert_same_bits
from launches import run_launcher
from paths import HELPERS

from loralib.io.tensors import read_tensors
from transformers.trainer_utils import list_checkpoints

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "text-classification" / "run_glue.py"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(
    launcher: str, *command: object, forks: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs a script on two processes, as the release's recipes do or as torchrun does."""
    flags = ["--nproc_per_node=2", f"--master_port={free_port()}"]
    tree = "NLU" if forks else None
    how = {"tree": tree, "timeout": 240, "environment": environment}
    return run_launcher(launcher, *flags, *command, **how)


def run_and_resume(
    helper: Path, flags: Callable[[Path], list[str]], whole: Path, resumed: Path, **how: object
) -> list[subprocess.CompletedProcess]:
    """Runs run_glue.py under a helper, then again from the first epoch's checkpoint.

    Args:
        helper: a script that runs another.
        flags: output folder -> run_glue.py's flags.
        whole, resumed: the two output folders.
        how: as for `launch`.
    """
    results = []
    for out in (whole, resumed):
        if out is resumed:
            shutil.copytree(whole / "checkpoint-1", out / "checkpoint-1")
        call = [helper, SCRIPT, *flags(out), "--save_strategy", "epoch"]
        result = launch("torch.distributed.run", *call, **how)
        assert result.returncode == 0, result.stderr
        results.append(result)
    return results


def arguments(base: Path, glue: Path, out: Path, batch_size: int, *more: object) -> list[str]:
    """Flags for RTE's 45 rows: with eight per step, the last step of an epoch has five.

    AdamW's epsilon is so large that the rounding of a gradient near zero does not make a full step.
    """
    given = f"--model_name_or_path {base} --task_name rte --data_dir {glue} --do_train --do_eval "
    given += f"--do_predict --max_seq_length 60 --per_device_train_batch_size {batch_size} "
    given += "--num_train_epochs 2 --learning_rate 1e-3 --adam_epsilon 1e-3 --logging_steps 1 "
    given += (
        f"--report_to none --disable_tqdm --apply_lora --lora_r 4 --lora_alpha 8 --output_dir {out}"
    )
    return [*given.split(), *map(str, more)]


def history(out: Path, key: str) -> list[float]:
    records = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [record[key] for record in records if key in record]


def lora_of(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "pytorch_model_lora.safetensors")[0]


def assert_same_run(first: Path, second: Path, tolerance: float) -> None:
    """Compares two runs' losses, in evaluations too, and their metrics, predictions and weights."""
    for key, rounding in (
        ("loss", 1e-4),
        ("eval_loss", 0),
        ("train_loss", 0),
        ("eval_accuracy", 0),
    ):
        numbers = history(first, key)
        assert len(numbers) >= 1
        assert numbers == pytest.approx(history(second, key), abs=tolerance + rounding, rel=0)
    results = [json.loads((out / "eval_results.json").read_text()) for out in (first, second)]
    for key in ("eval_loss", "eval_accuracy", "eval_samples"):
        assert results[0][key] == pytest.approx(results[1][key], abs=tolerance, rel=0)
    predictions = [(out / "test_results_rte.txt").read_text() for out in (first, second)]
    assert predictions[0] == predictions[1]
    tensors = [lora_of(out) for out in (first, second)]
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensor, tensors[1][name], atol=tolerance, rtol=0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("forks", "more"),
    [
        (False, ["--evaluation_strategy", "steps", "--eval_steps", 3]),
        (
            True,
            # Six batches per epoch: two are left over for the second epoch.
            ["--gradient_accumulation_steps", 4, "--evaluation_strategy", "epoch"],
        ),
        (
            True,
            [
                *("--lora_variant", "dora", "--lora_init", "pissa", "--lora_rank_pattern"),
                *("value=2", "--lora_plus_ratio", 4, "--evaluation_strategy", "epoch"),
            ],
        ),
        (True, ["--lora_freeze_A", "--evaluation_strategy", "epoch"]),
    ],
)
def test_two_processes_train_as_one_with_twice_the_batch(
    run_glue, base_without_dropout, tiny_glue, tmp_path, forks, more
):
    launcher = "torch.distributed.run" if forks else "torch.distributed.launch"
    given = arguments(base_without_dropout, tiny_glue, tmp_path / "two", 4, *more)
    result = launch(launcher, SCRIPT, *given, forks=forks)
    assert result.returncode == 0, result.stderr
    run_glue.main(arguments(base_without_dropout, tiny_glue, tmp_path / "one", 8, *more))
    assert_same_run(tmp_path / "two", tmp_path / "one", 1e-5)
    # Only one process prints and writes.
    assert "train_runtime" not in result.stdout
    assert result.stderr.count("train_runtime ") == 1
    assert result.stderr.count("***** eval metrics *****") == 1


@pytest.mark.distributed
def test_two_processes_with_graphs_train_as_one_with_twice_the_batch(
    run_glue, base_without_dropout, tiny_glue, tmp_path
):
    """Gradients of several batches are averaged once, and those left over are resumed."""
    given = partial(arguments, base_without_dropout, tiny_glue)
    more = ["--gradient_accumulation_steps", 4, "--evaluation_strategy", "epoch"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    results = run_and_resume(
        HELPERS / "graphed_run.py", lambda out: given(out, 4, *more), whole, resumed
    )
    # Six batches, an evaluation and a checkpoint, then four: the fourth of each epoch is due.
    for result, count in zip(results, (10, 4), strict=True):
        assert f"replays: {count}\n" in result.stderr
    run_glue.main(given(tmp_path / "one", 8, *more))
    assert_same_run(whole, tmp_path / "one", 1e-5)
    ended = [lora_of(out) for out in (whole, resumed)]
    assert [name for name in ended[0] if not torch.equal(ended[0][name], ended[1][name])] == []


@pytest.mark.gpu
@pytest.mark.parametrize("how", [[], ["--cuda_graphs"]])
def test_two_processes_on_one_gpu_train_as_one_with_twice_the_batch(
    run_glue, base_without_dropout, tiny_glue, tmp_path, environment_with_gpus, how
):
    """On the GPU, a run is resumed bit-exactly, with gradients that no update has used yet."""
    given = partial(arguments, base_without_dropout, tiny_glue)
    more = ["--gradient_accumulation_steps", 4, "--evaluation_strategy", "epoch"]
    on_gpu = ["--use_deterministic_algorithms", *more, *how]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_and_resume(
        HELPERS / "on_one_gpu.py",
        lambda out: given(out, 4, *on_gpu),
        whole,
        resumed,
        forks=False,
        environment=environment_with_gpus,
    )
    run_glue.main(given(tmp_path / "one", 8, "--no_cuda", *more))
    assert_same_run(whole, tmp_path / "one", 1e-4)
    assert_same_bits(lora_of(whole), lora_of(resumed))


@pytest.fixture(scope="module")
def finished(tiny_base, base_without_dropout, tiny_glue, tmp_path_factory) -> Path:
    """A folder with the runs of two processes that the tests below check."""
    folder = tmp_path_factory.mktemp("finished")
    leftover = ["--gradient_accumulation_steps", 4, "--save_strategy", "epoch"]
    whole = arguments(tiny_base, tiny_glue, folder / "whole", 4, *leftover)
    half_way = [str(folder / name / "checkpoint-1") for name in ("whole", "resumed")]
    saved = ["--save_steps", 4, "--evaluation_strategy", "epoch"]
    calls = [
        whole,
        {"copy": half_way},
        [part.replace("whole", "resumed") for part in whole],
        arguments(tiny_base, tiny_glue, folder / "few", 4, "--max_val_samples", 1),
        arguments(base_without_dropout, tiny_glue, folder / "steady", 4, *saved),
        arguments(tiny_base, tiny_glue, folder / "grouped", 4, "--group_by_length", "--bf16"),
    ]
    (folder / "calls.json").write_text(json.dumps(calls))
    worker = HELPERS / "two_processes.py"
    result = launch("torch.distributed.run", worker, folder / "calls.json", folder / "results.json")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.distributed
def test_gradients_are_summed_only_before_updates(finished):
    # With seven batches per epoch, updates follow the third and the sixth of each epoch.
    assert json.loads((finished / "results.json").read_text()) == [3, 6, 10, 13]


@pytest.mark.distributed
def test_two_processes_resume_bit_exactly(finished):
    """With dropout, and with gradients that no update has used yet."""
    checkpoint = finished / "whole" / "checkpoint-1"
    states = [torch.load(checkpoint / f"rng_state_{n}.pth", weights_only=True) for n in (0, 1)]
    assert all(state["pending_gradients"] for state in states)
    assert not torch.equal(states[0]["rng"]["torch"], states[1]["rng"]["torch"])
    whole, resumed = lora_of(finished / "whole"), lora_of(finished / "resumed")
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    assert history(finished / "whole", "loss") == history(finished / "resumed", "loss")
    names = [Path(path).name for path in list_checkpoints(finished / "resumed")]
    assert names == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.distributed
def test_one_process_resumes_a_run_of_two(
    run_glue, finished, base_without_dropout, tiny_glue, tmp_path, caplog
):
    shutil.copytree(finished / "steady" / "checkpoint-4", tmp_path / "out" / "checkpoint-4")
    given = arguments(
        base_without_dropout, tiny_glue, tmp_path / "out", 8, "--evaluation_strategy", "epoch"
    )
    run_glue.main(given)
    assert (
        "belongs to a run with processes = 2; with processes = 1 it resumes, but not bit-exactly"
        in caplog.text
    )
    assert_same_run(tmp_path / "out", finished / "steady", 1e-5)


@pytest.mark.distributed
def test_evaluation_with_fewer_examples_than_processes(finished):
    results = json.loads((finished / "few" / "eval_results.json").read_text())
    assert results["eval_samples"] == 1
    assert results["eval_accuracy"] in (0, 1)


@pytest.mark.distributed
def test_training_in_half_precision_with_batches_by_length(finished):
    assert len(history(finished / "grouped", "loss")) == 12
    assert history(finished / "grouped", "train_loss")[0] < 3


@pytest.mark.distributed
def test_a_bad_flag_ends_both_processes(tiny_base, tiny_glue, tmp_path):
    given = arguments(tiny_base, tiny_glue, tmp_path / "out", 4, "--max_train_samples", 0)
    result = launch("torch.distributed.run", SCRIPT, *given)
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("run_glue.py: error")]
    message = "--max_train_samples must be at least 1, not 0"
    # The launcher ends the other process, which may have printed its own error by then.
    expected = {f"run_glue.py: error: {message}", f"run_glue.py: error (process 1): {message}"}
    assert lines
    assert set(lines) <= expected
    assert 'run_glue.py", line' not in result.stderr
    assert not (tmp_path / "out").exists()


JOINS = """
import os, sys
import torch.distributed as dist
from transformers import HfArgumentParser, TrainingArguments
for flags in (["--local_rank", "0"], ["--local-rank=0"], []):
    if not flags:
        os.environ["LOCAL_RANK"] = "0"
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", *flags]
    )
    print(args.local_rank, args.world_size, args.process_index, dist.get_backend())
    dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_the_rank_comes_from_either_flag_or_the_environment():
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    result = subprocess.run(
        [sys.executable, "-c", JOINS],
        env={**os.environ, **group, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    # PyTorch 2.9 prints a line of its own when processes join.
    printed = [line for line in result.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert printed == ["0 1 0 gloo"] * 3
