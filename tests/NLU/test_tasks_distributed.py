"""run_ner.py, run_qa.py and run_swag.py on two processes, also killed and restarted."""

from pathlib import Path

import pytest
import torch
from compare import assert_same_bits
from glue_runs import lora_of, results
from launches import killed, launch
from paths import load_script
from task_runs import SCRIPTS, command, write_data

pytestmark = pytest.mark.distributed


def flags_of(task: str, folder: Path, batch_size: int) -> list:
    flags = [*write_data(task, folder / "data"), "--do_train", "--do_eval", "--do_predict"]
    flags += ["--lora_targets", "all-linear", "--num_train_epochs", 2, "--overwrite_output_dir"]
    # With this large epsilon of AdamW, the rounding of a gradient near zero makes no full step.
    flags += ["--learning_rate", 1e-3, "--adam_epsilon", 1e-3, "--evaluation_strategy", "epoch"]
    return [*flags, "--save_steps", 5, "--per_device_train_batch_size", batch_size]


@pytest.fixture(scope="module")
def on_two_processes(base_without_dropout, tmp_path_factory):
    """``on_two_processes(task)``: the output folder of a run on two processes."""
    made = {}

    def run(task: str) -> Path:
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            flags = command(base_without_dropout, folder / "out", *flags_of(task, folder, 4))
            result = launch(2, SCRIPTS[task], *flags, tree="NLU")
            assert result.returncode == 0, result.stderr
            assert result.stderr.count("***** eval metrics *****") == 1
            made[task] = folder / "out"
        return made[task]

    return run


@pytest.mark.parametrize("task", SCRIPTS)
def test_two_processes_equal_one_with_twice_the_batch(
    on_two_processes, base_without_dropout, tmp_path, task
):
    out = on_two_processes(task)
    script = load_script(SCRIPTS[task])
    script.main(command(base_without_dropout, tmp_path / "one", *flags_of(task, tmp_path, 8)))
    ours, one = results(out), results(tmp_path / "one")
    assert ours.keys() == one.keys()
    if task == "ner":
        # A batch's loss is the mean over its tags, whose numbers differ between the processes.
        assert ours["eval_loss"] == pytest.approx(one["eval_loss"], abs=0.1)
        return
    assert ours == pytest.approx(one, abs=1e-4)
    tensors, other = lora_of(out), lora_of(tmp_path / "one")
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", SCRIPTS)
def test_a_killed_run_is_restarted_and_ends_with_the_same_bits(
    on_two_processes, base_without_dropout, tmp_path, task
):
    """One of two processes is killed in the second epoch, after a checkpoint."""
    expected, mark = on_two_processes(task), tmp_path / "killed"
    flags = command(base_without_dropout, tmp_path / "out", *flags_of(task, tmp_path, 4))
    result = launch(2, *killed(mark, 1, "beat", 14), SCRIPTS[task], *flags, tree="NLU")
    assert result.returncode == 0, result.stderr
    assert mark.exists()
    assert "Traceback" not in result.stderr
    assert "resuming from" in result.stderr
    assert_same_bits(lora_of(tmp_path / "out"), lora_of(expected))
    for split in ("eval", "test"):
        assert results(tmp_path / "out", split) == results(expected, split)
