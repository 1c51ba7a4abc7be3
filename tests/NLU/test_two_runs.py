"""Two runs with the same output folder: the second ends at once and changes nothing."""

import os
from pathlib import Path

import pytest
from glue_runs import SCRIPT, common, failure, lora_of, on_rte
from launches import launch
from trainer_runs import largest_difference

from loralib.training.locks import sole_use
from transformers import TrainingArguments
from transformers.fine_tuning.folders import sole_use_of_output


@pytest.fixture
def listing():
    """Reads the contents and times of all files of a folder, except the lock."""

    def read(folder):
        files = (path for path in folder.rglob("*") if path.is_file())
        return {
            str(path): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in files
            if not path.name.startswith(".lock")
        }

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--overwrite_output_dir"], [], ["--do_train", "false", "--lora_path", "."]]
)
def test_a_second_run_of_run_glue_is_refused(
    run_glue, tiny_base, tiny_glue, trained, monkeypatch, capsys, listing, flags
):
    """Whether it is to train from the start, to resume, or only to evaluate."""
    flags = [trained if flag == "." else flag for flag in flags]
    arguments = [*common(tiny_base), *on_rte(tiny_glue, trained), *flags]
    before = listing(trained)
    with sole_use(trained):
        line = failure(run_glue, arguments, monkeypatch, capsys)
    assert f"{trained}: another run is writing there (process {os.getpid()} on " in line
    assert listing(trained) == before
    run_glue.main(list(map(str, arguments)))


@pytest.mark.distributed
def test_a_second_run_of_several_processes_is_refused(tiny_base, tiny_glue, tmp_path):
    """One process asks for the lock; if it fails, all end, and leave the folder to the next run."""
    out = tmp_path / "out"
    out.mkdir()
    command = [2, SCRIPT, *common(tiny_base), *on_rte(tiny_glue, out)]
    call = {"launcher": "torch.distributed.run", "restarts": 0, "tree": "NLU"}
    with sole_use(out):
        ended = launch(*command, **call)
    assert ended.returncode != 0
    assert "run_glue.py: error" in ended.stderr
    assert f"another run is writing there (process {os.getpid()} on " in ended.stderr
    assert list(out.iterdir()) == []
    ended = launch(*command, **call)
    assert ended.returncode == 0, ended.stderr
    assert largest_difference(lora_of(out), lora_of(out / "checkpoint-4")) > 0


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path):
    """Only files of the names that a run writes are removed; other hidden files stay."""
    written = ("pytorch_model_lora.safetensors", "all_results.json", "training_args.bin")
    written = (*written, "learning_curves.png")
    left = [f".{name}.half-ab12cd_3{Path(name).suffix}" for name in written]
    for name in (*left, "pytorch_model.bin", ".notes"):
        (tmp_path / name).touch()
    for name in (".checkpoint.unfinished", ".checkpoint.replaced", ".checkpoint-3.deleted"):
        (tmp_path / name / "inner").mkdir(parents=True)
    with sole_use_of_output(TrainingArguments(str(tmp_path), no_cuda=True)):
        names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".lock")}
    assert names == {"pytorch_model.bin", ".notes"}
