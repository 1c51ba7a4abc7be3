"""run_glue.py under a launcher that restarts killed processes ends with the same bits."""

import json
from pathlib import Path

import pytest
from compare import assert_same_bits
from launches import killed, launch

from loralib.io.tensors import read_tensors
from transformers.trainer_utils import list_checkpoints

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "text-classification" / "run_glue.py"


def arguments(base: Path, glue: Path, out: Path, *more: object) -> list[str]:
    given = f"--model_name_or_path {base} --task_name rte --data_dir {glue} --do_train --do_eval "
    given += "--max_seq_length 60 --per_device_train_batch_size 3 --num_train_epochs 3 "
    given += "--learning_rate 1e-2 --logging_steps 1 --save_steps 2 --evaluation_strategy epoch "
    given += "--report_to none --disable_tqdm --apply_lora --lora_r 4 --lora_alpha 8 "
    given += f"--overwrite_output_dir --output_dir {out}"
    return [*given.split(), *map(str, more)]


@pytest.fixture(scope="module")
def uninterrupted(tiny_base, tiny_glue, tmp_path_factory):
    """``uninterrupted(processes)``: the output folder of a run that was not interrupted."""
    runs: dict[int, Path] = {}

    def run(processes: int) -> Path:
        if processes not in runs:
            runs[processes] = tmp_path_factory.mktemp("uninterrupted") / "out"
            command = [SCRIPT, *arguments(tiny_base, tiny_glue, runs[processes])]
            result = launch(processes, *command, tree="NLU")
            assert result.returncode == 0, result.stderr
        return runs[processes]

    return run


def assert_same_run(out: Path, expected: Path) -> None:
    """Asserts equal tensors at the end and in the last checkpoint, and equal losses throughout."""
    ours, theirs = (list_checkpoints(folder)[-1] for folder in (out, expected))
    assert Path(ours).name == Path(theirs).name
    for mine, other in ((out, expected), (Path(ours), Path(theirs))):
        for name in ("pytorch_model.bin", "pytorch_model_lora.safetensors"):
            assert_same_bits(read_tensors(mine / name)[0], read_tensors(other / name)[0])
    losses = [
        [
            record["loss"]
            for record in json.loads(path.read_text())["log_history"]
            if "loss" in record
        ]
        for path in (out / "trainer_state.json", expected / "trainer_state.json")
    ]
    assert losses[0] == losses[1]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("processes", "rank", "at", "count"),
    [
        (3, 0, "beat", 8),  # in the second epoch, after an evaluation
        (3, 2, "beat", 6),  # in the evaluation after the first epoch
        (3, 0, "sync", 28),  # while the second checkpoint is written
        (1, 0, "beat", 20),
    ],
    ids=["rank 0 in a step", "rank 2 in an evaluation", "rank 0 in a write", "alone"],
)
def test_a_killed_run_is_restarted_and_ends_with_the_same_bits(
    uninterrupted, tiny_base, tiny_glue, tmp_path, processes, rank, at, count
):
    """Here processes are forked; GPT-2's tests restart processes that each start Python."""
    mark = tmp_path / "killed"
    out = tmp_path / "out"
    command = [*killed(mark, rank, at, count), SCRIPT, *arguments(tiny_base, tiny_glue, out)]
    result = launch(processes, *command, tree="NLU")
    assert result.returncode == 0, result.stderr
    assert mark.exists()
    assert "Traceback" not in result.stderr
    assert "resuming from" in result.stderr
    assert_same_run(out, uninterrupted(processes))
